"""Fields of an instruction's 128 bits: where an operand or a part of the name stands, and how it is read.

A field knows its bits (`mask`) and reads them out of the word. `on` gives the field for an architecture, whose uniform
registers have numbers of 6 bits (Hopper) or 8 (Blackwell).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tsmla_emulator.run.sass.model import (
    ALWAYS,
    ZERO,
    Address,
    Constant,
    Convergence,
    Descriptor,
    Float,
    Integer,
    MachineCodeError,
    Operand,
    Predicate,
    Predicates,
    Register,
    Scoreboard,
    Special,
    Target,
)


def bits(first: int, width: int = 1) -> int:
    """Return the mask of a field."""
    return (1 << width) - 1 << first


def signed(value: int, width: int) -> int:
    """Return a number of `width` bits in two's complement as an int."""
    return value - (value >> width - 1 << width)


Parts = tuple[tuple[int, int], ...]
"""(first bit, width) of the parts of a number that does not stand in one piece, low ones first."""


def parts_mask(parts: Parts) -> int:
    """Return the mask of all parts."""
    return sum(bits(first, width) for first, width in parts)


def parts_value(word: int, parts: Parts) -> int:
    """Return a signed number that stands in parts; 0 if there are none."""
    value, width = 0, 0
    for first, part in parts:
        value |= (word >> first & bits(0, part)) << width
        width += part
    return signed(value, width) if width else 0


@dataclasses.dataclass(frozen=True)
class Field:
    """Base of all fields."""

    @property
    def mask(self) -> int:
        raise NotImplementedError

    @property
    def own(self) -> int:
        """The bits that no other field may read."""
        return self.mask

    def read(self, word: int) -> Operand | None:
        """Return the operand, or None where nvdisasm leaves it out. Raises MachineCodeError."""
        raise NotImplementedError

    def on(self, uniform_bits: int) -> Field:
        """Return this field on an architecture."""
        changed = {
            field.name: value.on(uniform_bits)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Field)
        }
        return dataclasses.replace(self, **changed) if changed else self


@dataclasses.dataclass(frozen=True)
class Choice:
    """A part of the name, or of an operand's suffix: a name for each value; values without one are not known."""

    first: int
    width: int
    names: Sequence[str] | Mapping[int, str]

    @property
    def mask(self) -> int:
        return bits(self.first, self.width)

    def name(self, word: int) -> str:
        value = (word & self.mask) >> self.first
        known = dict(self.names) if isinstance(self.names, Mapping) else dict(enumerate(self.names))
        if value not in known:
            raise MachineCodeError(f"bits {self.first} to {self.first + self.width - 1} are {value:#x}")
        return known[value]


def flag(bit: int, name: str) -> Choice:
    """Return the part of a name that stands there when a bit is set."""
    return Choice(bit, 1, ("", name))


@dataclasses.dataclass(frozen=True)
class Reg(Field):
    """A register. The signs are single bits, if there are any.

    silent: not printed where it is RZ. absent: it has to be RZ, and is not printed. present: it has to be another.
    again: another operand's field as well.
    """

    first: int
    negated: int | None = None
    absolute: int | None = None
    inverted: int | None = None
    part: Choice | None = None
    suffix: str = ""
    silent: bool = False
    absent: bool = False
    present: bool = False
    again: bool = False
    uniform: bool = False
    width: int = 8

    @property
    def own(self) -> int:
        return 0 if self.again else self.mask

    @property
    def mask(self) -> int:
        found = bits(self.first, self.width) | (self.part.mask if self.part else 0)
        return found | sum(1 << bit for bit in (self.negated, self.absolute, self.inverted) if bit is not None)

    def number(self, word: int) -> int:
        number = word >> self.first & bits(0, self.width)
        return ZERO if number == bits(0, self.width) else number

    def read(self, word: int) -> Register | None:
        number = self.number(word)
        if self.absent and number != ZERO or self.present and number == ZERO:
            raise MachineCodeError(f"register {number} in bits {self.first} to {self.first + self.width - 1}")
        if number == ZERO and (self.silent or self.absent):
            return None
        negated, absolute, inverted = (
            bit is not None and bool(word >> bit & 1) for bit in (self.negated, self.absolute, self.inverted)
        )
        suffixes = (self.part.name(word) if self.part else self.suffix).split(".")
        return Register(number, self.uniform, negated, absolute, inverted, tuple(one for one in suffixes if one))

    def on(self, uniform_bits: int) -> Reg:
        return dataclasses.replace(self, width=uniform_bits) if self.uniform else self


def ureg(first: int, **options) -> Reg:
    """Return the field of a uniform register."""
    return Reg(first, uniform=True, **options)


@dataclasses.dataclass(frozen=True)
class Pred(Field):
    """A predicate.

    silent: not printed where it is PT. backwards: its number is stored as the difference to PT's.
    uniform_bit: the bit that tells uniform predicates, where both kinds may stand.
    """

    first: int
    negated: int | None = None
    silent: bool = False
    backwards: bool = False
    uniform: bool = False
    uniform_bit: int | None = None

    @property
    def mask(self) -> int:
        return bits(self.first, 3) | sum(1 << bit for bit in (self.negated, self.uniform_bit) if bit is not None)

    def read(self, word: int) -> Predicate | None:
        number = word >> self.first & 7 ^ (7 if self.backwards else 0)
        negated = self.negated is not None and bool(word >> self.negated & 1)
        if self.silent and number == ALWAYS and not negated:
            return None
        uniform = bool(word >> self.uniform_bit & 1) if self.uniform_bit is not None else self.uniform
        return Predicate(number, uniform, negated)


def upred(first: int, negated: int | None = None, **options) -> Pred:
    """Return the field of a uniform predicate."""
    return Pred(first, negated, uniform=True, **options)


@dataclasses.dataclass(frozen=True)
class AllPredicates(Field):
    """PR or UPR, which takes no bits."""

    uniform: bool = False

    @property
    def mask(self) -> int:
        return 0

    def read(self, word: int) -> Predicates:
        return Predicates(self.uniform)


@dataclasses.dataclass(frozen=True)
class Int(Field):
    """A number; `silent`: the value that is not printed."""

    first: int
    width: int = 32
    signed: bool = False
    silent: int | None = None

    @property
    def mask(self) -> int:
        return bits(self.first, self.width)

    def read(self, word: int) -> Integer | None:
        value = word >> self.first & bits(0, self.width)
        if value == self.silent:
            return None
        return Integer(signed(value, self.width) if self.signed else value)


@dataclasses.dataclass(frozen=True)
class TruthTable(Field):
    """The eight bits of PLOP3's table, which stand in two places."""

    @property
    def mask(self) -> int:
        return bits(64, 3) | bits(72, 5)

    def read(self, word: int) -> Integer:
        return Integer(word >> 64 & 7 | (word >> 72 & 31) << 3)


@dataclasses.dataclass(frozen=True)
class Flt(Field):
    """A floating-point number of 32 or 16 bits."""

    first: int
    width: int = 32

    @property
    def mask(self) -> int:
        return bits(self.first, self.width)

    def read(self, word: int) -> Float:
        return Float(word >> self.first & bits(0, self.width), self.width)


@dataclasses.dataclass(frozen=True)
class Const(Field):
    """A place in constant memory: bank in bits 54 to 58, offset, and maybe an index register, printed unless it is RZ
    and there is an offset."""

    first: int
    width: int
    index: Reg | None = None

    @property
    def mask(self) -> int:
        return bits(self.first, self.width) | bits(54, 5) | (self.index.mask if self.index else 0)

    def read(self, word: int) -> Constant:
        offset = signed(word >> self.first & bits(0, self.width), self.width)
        index = self.index.read(word) if self.index else None
        if index is not None and index.number == ZERO and offset:
            index = None
        return Constant(word >> 54 & 31, offset, index)


@dataclasses.dataclass(frozen=True)
class Addr(Field):
    """An address in square brackets. A base register RZ is not printed where there is a uniform register.

    scale: bytes that the offset counts.
    above: how far the uniform register lies above the one that the field says.
    """

    base: Reg | None = None
    uniform: Reg | None = None
    first: int = 0
    width: int = 0
    scale: int = 1
    above: int = 0

    @property
    def mask(self) -> int:
        return bits(self.first, self.width) | sum(field.mask for field in (self.base, self.uniform) if field)

    @property
    def own(self) -> int:
        return 0 if self.uniform and self.uniform.again else self.mask

    def read(self, word: int) -> Address:
        base = self.base.read(word) if self.base else None
        offset = self.scale * signed(word >> self.first & bits(0, self.width), self.width) if self.width else 0
        if base is not None and base.number == ZERO and not base.suffixes:
            if self.uniform:
                base = None
            elif offset:
                raise MachineCodeError(f"an address without a register, {offset:#x}")
        uniform = self.uniform.read(word) if self.uniform else None
        if uniform and self.above:
            if uniform.number + self.above >= ZERO:
                raise MachineCodeError(f"an address behind UR{uniform.number}")
            uniform = dataclasses.replace(uniform, number=uniform.number + self.above)
        return Address(base, uniform, offset)


@dataclasses.dataclass(frozen=True)
class Desc(Field):
    """A descriptor: its uniform register, maybe an address, maybe suffixes.

    offset: parts of the offset in tensor memory, low ones first.
    above: how far the register lies above the one that the field says.
    """

    kind: str
    register: Reg
    address: Addr | None = None
    offset: Parts = ()
    suffixes: tuple[Choice, ...] = ()
    above: int = 0

    @property
    def mask(self) -> int:
        found = self.register.mask | parts_mask(self.offset) | sum(one.mask for one in self.suffixes)
        return found | (self.address.mask if self.address else 0)

    @property
    def own(self) -> int:
        return 0 if self.register.again else self.mask

    def read(self, word: int) -> Descriptor:
        number = self.register.number(word)
        if self.above and number + self.above >= ZERO:
            raise MachineCodeError(f"{self.kind} behind UR{number}")
        suffixes = tuple(name for one in self.suffixes if (name := one.name(word)))
        inner = self.address.read(word) if self.address else None
        register = Register(number + self.above, uniform=True)
        return Descriptor(self.kind, register, parts_value(word, self.offset), inner, suffixes)


@dataclasses.dataclass(frozen=True)
class Barrier(Field):
    """A convergence barrier in bits 16 to 19."""

    @property
    def mask(self) -> int:
        return bits(16, 4)

    def read(self, word: int) -> Convergence:
        return Convergence(word >> 16 & 15)


@dataclasses.dataclass(frozen=True)
class SpecialReg(Field):
    """A special register in bits 72 to 79."""

    names: Choice

    @property
    def mask(self) -> int:
        return self.names.mask

    def read(self, word: int) -> Special:
        return Special(self.names.name(word))


@dataclasses.dataclass(frozen=True)
class Board(Field):
    """A scoreboard that is named among the operands; `silent`: the value that stands for none."""

    kind: str
    first: int
    count: int
    silent: int | None = None

    @property
    def mask(self) -> int:
        return bits(self.first, 3)

    def read(self, word: int) -> Scoreboard | None:
        number = word >> self.first & 7
        if number == self.silent:
            return None
        if number >= self.count:
            raise MachineCodeError(f"scoreboard {self.kind}{number}")
        return Scoreboard(self.kind, number)


@dataclasses.dataclass(frozen=True)
class Offset(Field):
    """A place in the code, as the distance in bytes from the next instruction. The decoder makes a Target of it.

    parts: of the number, low ones first; it counts units of 4 bytes.
    """

    parts: Parts

    @property
    def mask(self) -> int:
        return parts_mask(self.parts)

    def read(self, word: int) -> Target:
        return Target(4 * parts_value(word, self.parts))
