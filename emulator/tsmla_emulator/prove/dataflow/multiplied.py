"""Finds registers that machine code reads or overwrites although a product of matrices under way may still use them.

HGMMA and QGMMA sum in registers, and may read rows from there, long after they were issued. WARPGROUP.DEPBAR says how
many of the groups that `gsb0` closes may be left: what it does not wait for is under way, on some way through the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ...run.sass.code import register_slot, text_of
from ...run.sass.model import ZERO, Instruction, Integer, Register, Scoreboard
from ...run.sass.uses import Uses
from .flow import successors

_PRODUCTS = {"HGMMA", "QGMMA"}
_VECTOR = range(register_slot(Register(0)), register_slot(Register(0)) + ZERO)
"""Slots of ordinary registers. Descriptions of matrices lie in uniform ones, read when a product is issued."""
_OLDEST = 8
"""Groups are counted no further."""
Age = dict[int, int]
"""Slot -> how many groups were closed since a product that uses it, 0 where its own is open."""


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """An instruction that uses a register of a product that may be under way.

    kind: "read" of a sum, or "overwritten" sum or row.
    """

    instruction: Instruction
    kind: str
    slots: tuple[int, ...]

    def __str__(self) -> str:
        some = ", ".join(f"R{slot - _VECTOR.start}" for slot in self.slots)
        where = f"{self.instruction.address:#x} {text_of(self.instruction)}"
        return f"{where}: {some} {self.kind}, a product may be under way"


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """What products may still use before an instruction: sums, and rows of the first matrix."""

    sums: Age
    rows: Age

    def later(self, sums: Iterable[int], rows: Iterable[int]) -> _UnderWay:
        """Behind another product."""
        return _UnderWay(self.sums | dict.fromkeys(sums, 0), self.rows | dict.fromkeys(rows, 0))

    def closed(self) -> _UnderWay:
        """Behind the end of a group."""
        return _UnderWay(*({slot: min(age + 1, _OLDEST) for slot, age in one.items()} for one in self._both))

    def awaited(self, left: int) -> _UnderWay:
        """Behind a wait that leaves so many groups."""
        return _UnderWay(*({slot: age for slot, age in one.items() if age <= left} for one in self._both))

    def joined(self, other: _UnderWay) -> _UnderWay:
        """What one of two ways leaves."""
        both = zip(self._both, other._both, strict=True)
        return _UnderWay(*(one | {x: min(age, one.get(x, age)) for x, age in two.items()} for one, two in both))

    @property
    def _both(self) -> tuple[Age, Age]:
        return self.sums, self.rows


def multiplied(instructions: Sequence[Instruction], uses: Sequence[Uses]) -> list[Multiplied]:
    """Return what uses a register before its product was awaited."""
    if not any(one.opcode in _PRODUCTS for one in instructions):
        return []
    after = successors(instructions)
    before = {0: _UnderWay({}, {})}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        left = _behind(instructions[at], uses[at], before[at])
        for target in after[at]:
            joined = before[target].joined(left) if target in before else left
            if before.get(target) != joined:
                before[target] = joined
                waiting.append(target)
    return [found for at in sorted(before) for found in _of(instructions[at], uses[at], before[at])]


def _behind(one: Instruction, used: Uses, before: _UnderWay) -> _UnderWay:
    if one.opcode in _PRODUCTS:
        left = before.later(used.written, used.read.intersection(_VECTOR))
        return left.closed() if isinstance(one.operands[-1], Scoreboard) else left
    match one.opcode, one.operands:
        case "WARPGROUP", (_, Integer(groups)) if one.modifiers[0] == "DEPBAR":
            return before.awaited(groups)
    return before


def _of(one: Instruction, used: Uses, before: _UnderWay) -> Iterator[Multiplied]:
    product = one.opcode in _PRODUCTS  # products of a warpgroup follow each other: one goes on with another's sums
    read = used.read & before.sums.keys()
    written = used.written & (before.rows.keys() if product else before.sums.keys() | before.rows.keys())
    for kind, slots in (("read", read), ("overwritten", written)):
        if slots:
            yield Multiplied(one, kind, tuple(sorted(slots)))
