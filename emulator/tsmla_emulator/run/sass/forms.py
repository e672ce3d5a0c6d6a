"""Forms of instructions: which bits are fixed, which are fields, and what is printed in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tsmla_emulator.run.sass.fields import Choice, Field, Flt, Int, Reg, bits

OPCODE = bits(0, 12)
GUARD = bits(12, 4)
CONTROL = bits(105, 21)
"""Bits 0 to 11 are the opcode with the kinds of its operands, 12 to 15 the guard, 105 to 125 are for the scheduler."""

Fixed = Mapping[tuple[int, int], int]
"""(first bit, width) -> the value that these bits have in this form. All bits that are nowhere mentioned are 0."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A source operand of an arithmetic instruction, whose place depends on the kinds of the operands.

    slot: "a", "b" or "c", the first, second and third source.
    signs: what its sign bits mean: "" nothing, "-" negated, "~" inverted, "||" absolute, "-||" negated and absolute.
    immediate: the field's class where it is a number: "signed", "unsigned" or "float".
    reuse: which bit says that it stays in the reuse cache, where it is not that of its slot.
    """

    slot: str
    signs: str = ""
    immediate: str = "unsigned"
    part: Choice | None = None
    negated: int | None = None
    absolute: int | None = None
    reuse: int = 0

    def place(self, kind: Kind) -> Field:
        """Return the field, for these kinds of the second and the third source."""
        first, what = {"a": (24, "register"), "b": kind.b, "c": kind.c}[self.slot]
        if what == "number":
            return Flt(32) if self.immediate == "float" else Int(32, signed=self.immediate == "signed")
        negate, absolute = SIGNS[first]
        negate = self.negated or negate
        return Reg(
            first,
            negated=negate if "-" in self.signs else None,
            absolute=(self.absolute or absolute) if "||" in self.signs else None,
            inverted=negate if "~" in self.signs else None,
            part=self.part,
            uniform=what == "uniform",
        )


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the second and the third source of an arithmetic instruction are, and where they stand.

    code: bits 9 to 11 of the opcode.
    """

    code: int
    b: tuple[int, str]
    c: tuple[int, str]


KINDS = {
    "rr": Kind(1, (32, "register"), (64, "register")),
    "rn": Kind(2, (64, "register"), (32, "number")),
    "nr": Kind(4, (32, "number"), (64, "register")),
    "ur": Kind(6, (32, "uniform"), (64, "register")),
    "ru": Kind(7, (64, "register"), (32, "uniform")),
}
"""Kinds by their letters: r for a register, u for a uniform one, n for a number. Codes 3 and 5 are for constant memory,
which no kernel here reads this way."""

SIGNS = {24: (72, 73), 32: (63, 62), 64: (75, 74)}
"""First bit of a source register -> the bits that negate it and take its absolute value, unless a form has others."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of an instruction.

    code: bits 0 to 11.
    name: opcode and modifiers, strings and choices, in the order in which they are printed.
    operands: fields in the order in which they are printed.
    fixed: bits that tell this form from others of the same code, or that always have one value.
    uniform: the guard is a uniform predicate.
    reuse: sources that may stay in the reuse cache, bit 0 to 2 for the first to the third.
    awaits: it may await scoreboards in its bits for the scheduler.
    """

    code: int
    name: tuple[str | Choice, ...]
    operands: tuple[Field, ...]
    fixed: Fixed = dataclasses.field(default_factory=dict)
    uniform: bool = False
    reuse: int = 0
    awaits: bool = True

    def on(self, uniform_bits: int) -> Form:
        """Return this form on an architecture; see Field.on."""
        return dataclasses.replace(self, operands=tuple(field.on(uniform_bits) for field in self.operands))

    @property
    def fields(self) -> int:
        """Mask of all bits that fields read."""
        found = 0
        masks = [one.mask for one in self.name if isinstance(one, Choice)]
        for mask in (*masks, *(field.own for field in self.operands)):
            if found & mask:
                raise AssertionError(f"two fields of {self.name} share a bit")
            found |= mask
        return found

    def pattern(self) -> tuple[int, int]:
        """Return the mask of all bits that are not in fields, and the value that they have."""
        mask = bits(0, 128) & ~(self.fields | GUARD | CONTROL)
        value = self.code
        for (first, width), number in self.fixed.items():
            if bits(first, width) & ~mask:
                raise AssertionError(f"a fixed bit of {self.name} is in a field")
            value |= number << first
        return mask, value


def form(code: int, name: str, *operands: Field, parts: Sequence[str | Choice] = (), fixed: Fixed | None = None,
         uniform: bool = False, reuse: int = 0, awaits: bool = True) -> Form:  # fmt: skip
    """Return a form. `name` is printed first; `parts` follow."""
    return Form(code, (*name.split("."), *parts), operands, dict(fixed or {}), uniform, reuse, awaits)


def arithmetic(
    code: int, name: str, kinds: str, *operands: Field | Source, parts: Sequence[str | Choice] = (),
    fixed: Fixed | None = None, uniform: bool = False, registers: str = "abc",
) -> list[Form]:  # fmt: skip
    """Return the forms of an arithmetic instruction, one for each of the `kinds` of its second and third source.

    code: bits 0 to 8.
    uniform: all registers are uniform ones.
    registers: slots of sources that may stay in the reuse cache.
    """
    found = []
    for letters in kinds.split():
        kind = KINDS[letters]
        placed, reuse = [], 0
        for operand in operands:
            if isinstance(operand, Source):
                place = operand.place(kind)
                if isinstance(place, Reg) and not place.uniform and operand.slot in registers:
                    reuse |= 1 << (operand.reuse or "abc".index(operand.slot))
            else:
                place = operand
            placed.append(dataclasses.replace(place, uniform=True) if uniform and isinstance(place, Reg) else place)
        bit91 = {(91, 1): 1} if uniform or "u" in letters else {}
        found.append(
            Form(kind.code << 9 | code, (*name.split("."), *parts), tuple(placed), {**bit91, **(fixed or {})}, uniform,
                 0 if uniform else reuse)
        )  # fmt: skip
    return found
