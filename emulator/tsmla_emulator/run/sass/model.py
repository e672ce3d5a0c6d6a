"""One instruction of machine code as data: guard, opcode, modifiers, operands, and what it tells the scheduler.

Names, order of operands and signs of numbers are those that nvdisasm prints.
"""

from __future__ import annotations

import dataclasses

BYTES = 16
"""Bytes of an instruction."""

ZERO = 255
"""Number of the register that reads 0, RZ or URZ, on every architecture."""

ALWAYS = 7
"""Number of the predicate that is true, PT or UPT."""


class MachineCodeError(ValueError):
    """Machine code that is not known; the text names the form and the bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """A 32-bit register, or the first of several.

    suffixes: which part of it is meant, or how wide it is: ("H1",), ("H0_H0",), ("B2",), ("F32x2", "HI_LO"), ("64",).
    The mark that operands stay in the reuse cache is in Control.
    """

    number: int
    uniform: bool = False
    negated: bool = False
    absolute: bool = False
    inverted: bool = False
    suffixes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Predicate:
    number: int
    uniform: bool = False
    negated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Predicates:
    """All predicates of a thread (PR) or of a warp's uniform path (UPR) together, a bit each."""

    uniform: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Integer:
    """A number in the instruction. Negative only where nvdisasm prints a sign: take it modulo 2^32 where that does not
    matter."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Float:
    """A floating-point number in the instruction, as its bits: 32 of them, or 16 in a packed instruction."""

    bits: int
    width: int = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A place in constant memory: c[bank][index + offset]. The offset is in bytes."""

    bank: int | Register
    offset: int
    index: Register | None = None
    negated: bool = False
    absolute: bool = False
    inverted: bool = False
    suffixes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A place in memory, the sum of its parts: [R2.64+UR4+0x10]. The offset is in bytes."""

    base: Register | None = None
    uniform: Register | None = None
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """What a uniform register describes: desc[UR4][R2.64+0x8], gdesc[UR20].tnspB, idesc[UR4], tmem[UR5+0x100].

    kind: "desc" for global memory or a cache policy, "gdesc" for a matrix in shared memory, "idesc" for a product,
        "tmem" for a place in tensor memory, to which `offset` belongs.
    address: the place that the description is for, in square brackets of its own.
    """

    kind: str
    register: Register
    offset: int = 0
    address: Address | None = None
    suffixes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Convergence:
    """A convergence barrier, B0 to B15, at which lanes that went apart meet again."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A special register by its name: "SR_TID.X", "SR_CgaCtaId", "SRZ"."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scoreboard:
    """A scoreboard that the instruction names: kind "SB" (SB0 to SB5) or "gsb" (of a warpgroup's products)."""

    kind: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A place in the code, in bytes from the kernel's first instruction. BRX and RET add a register to it."""

    address: int


Operand = (
    Register | Predicate | Predicates | Integer | Float | Constant | Address | Descriptor | Convergence | Special
    | Scoreboard | Target
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """What ptxas tells the scheduler.

    stall: clocks after which the next instruction of the warp may follow: 1 to 11 unless it yields, 0 to 15 if it does.
    yields: the scheduler had better go on with another warp (bit 109 is clear).
    result: the scoreboard that the instruction frees when its result is written, or None.
    operands: the scoreboard that it frees when its operands are read, or None.
    awaits: scoreboards that have to be free before it is issued, bit i for scoreboard i.
    reuse: source registers that stay in the reuse cache, bit 0 to 2 for the first to the third source. (The second
        source of FADD, FADD2 and HADD2 counts as the third.)
    """

    stall: int
    yields: bool = False
    result: int | None = None
    operands: int | None = None
    awaits: int = 0
    reuse: int = 0


ALWAYS_DONE = Predicate(ALWAYS)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    address: of its first byte, in bytes from the kernel's first instruction.
    guard: the predicate behind "@"; ALWAYS_DONE for none.
    opcode, modifiers: the name up to its first full stop, and what stands between full stops behind it.
    operands: in nvdisasm's order: results first.
    """

    address: int
    guard: Predicate
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    control: Control

    @property
    def name(self) -> str:
        """Opcode with modifiers: "IMAD.WIDE.U32"."""
        return ".".join((self.opcode, *self.modifiers))
