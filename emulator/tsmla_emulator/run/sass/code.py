"""The interpreter's code of one kernel, as its machine code is lowered: registers in fixed slots, constants, lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..ptx.encoding import FIRST_FREE_SLOT, op_number
from ..ptx.model import PtxError
from .model import (
    ALWAYS,
    ALWAYS_DONE,
    ZERO,
    Constant,
    Convergence,
    Descriptor,
    Float,
    Instruction,
    Integer,
    Operand,
    Predicate,
    Predicates,
    Register,
    Scoreboard,
    Special,
    Target,
)  # fmt: skip
from .model import Address as Place

UNIFORM_REGISTERS = 128
NONE = -(2**31)
"""An operand that is absent, and the result that nobody reads."""

_UNIFORM = FIRST_FREE_SLOT + 256
_PREDICATE = _UNIFORM + UNIFORM_REGISTERS
_UNIFORM_PREDICATE = _PREDICATE + 8
_SCRATCH = _UNIFORM_PREDICATE + 8
SLOTS = _SCRATCH + 16

NEGATED, ALL_LANES, ONE_LANE = 1, 8, 16
"""Bits of an instruction (core/machine.h)."""


class UnknownInstruction(PtxError):
    """Machine code has an opcode, modifier or operand that the emulator does not know."""

    def __init__(self, instruction: Instruction, why: str = ""):
        Exception.__init__(
            self,
            f"not implemented: {text_of(instruction)} at 0x{instruction.address:04x} of the machine code"
            + (f" ({why})" if why else ""),
        )
        self.line = instruction.address


@dataclasses.dataclass
class Op:
    """One of the interpreter's instructions. target: the address of the instruction that it branches to."""

    number: int
    d: int = NONE
    a: int = NONE
    b: int = NONE
    c: int = NONE
    e: int = NONE
    items: tuple[int, ...] = ()
    flags: int = 0
    width: int = 0
    extra: int = 0
    imm: int = 0
    guard: int = -1
    bits: int = 0
    target: int | None = None
    table: bool = False


class Constants:
    """Constants that instructions have, each once; a place is given as the interpreter reads it."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def place(self, value: int, slots: int = 1) -> int:
        value &= 2 ** (32 * slots) - 1
        if (value, slots) not in self._places:
            self._places[value, slots] = len(self.values)
            self.values += [value >> 32 * half & 0xFFFFFFFF for half in range(slots)]
        return ~self._places[value, slots]


class Code:
    """Where lowering one instruction after the other puts what it makes."""

    def __init__(self, architecture: str, second_bank: int, instructions: Sequence[Instruction] = ()) -> None:
        self.architecture, self.second_bank = architecture, second_bank
        self.constants = Constants()
        self.ops: list[Op] = []
        self.of: list[int] = []
        """Position of the instruction that each of `ops` comes from."""
        self.products: set[int] = set()
        """Slots of registers that products of warpgroups have for operands."""
        self.groups: dict[int, set[str]] = {}
        """Scoreboard -> which instructions count groups of copies with it. Bulk stores free it when they have read."""
        self.load_boards = 0
        """Bit i: loads of tensor memory free scoreboard i."""
        for instruction in instructions:
            control, opcode = instruction.control, instruction.opcode
            board = control.operands if opcode == "UTMACMDFLUSH" else control.result
            if board is not None and opcode in ("LDGDEPBAR", "UTMACMDFLUSH"):
                self.groups.setdefault(board, set()).add(opcode)
            if board is not None and opcode == "LDTM":
                self.load_boards |= 1 << board
        self._current: Instruction
        self._position = 0

    def begin(self, position: int, instruction: Instruction) -> None:
        self._position, self._current = position, instruction
        if boards := instruction.control.awaits & self.load_boards:
            self.emit("await_loads", imm=boards, guard=NONE)

    def refuse(self, why: str = "") -> UnknownInstruction:
        return UnknownInstruction(self._current, why)

    def emit(self, op: str | int, *, lanes: int = 0, guard: int | None = None, **fields) -> None:
        """Add an instruction.

        lanes: ALL_LANES or ONE_LANE.
        guard: the slot of a predicate in place of the instruction's own; NONE for none.
        """
        made = Op(op if isinstance(op, int) else op_number(op), bits=lanes, **fields)
        own = self._current.guard
        if guard is not None:
            made.guard = max(guard, -1)
        elif own.number != ALWAYS:
            made.guard = predicate_slot(own)
            made.bits |= NEGATED if own.negated else 0
        elif own.negated:
            made = Op(op_number("nop"))
        self.ops.append(made)
        self.of.append(self._position)

    def scratch(self, index: int = 0) -> int:
        """A slot that one instruction's own steps use; two belong together."""
        return _SCRATCH + 2 * index

    def constant(self, value: int, slots: int = 1) -> int:
        return self.constants.place(value, slots)

    def result(self, operand: Operand) -> int:
        """The slot of a result."""
        if isinstance(operand, Predicate) and not operand.negated:
            return NONE if operand.number == ALWAYS else predicate_slot(operand)
        if isinstance(operand, Register) and not (operand.suffixes or operand.negated or operand.absolute):
            return NONE if operand.number == ZERO else register_slot(operand)
        raise self.refuse()

    def registers(self, operand: Operand, count: int, *, results: bool = False) -> tuple[int, ...]:
        """Slots of so many registers from one on."""
        if not isinstance(operand, Register) or operand != Register(operand.number, operand.uniform):
            raise self.refuse()
        if operand.number == ZERO:
            return count * (NONE if results else self.constant(0),)
        return tuple(register_slot(operand) + i for i in range(count))

    def source(self, operand: Operand, width: int = 1) -> int:
        """The slot of a plain source of so many registers, one or two."""
        if isinstance(operand, Register) and operand == Register(operand.number, operand.uniform):
            return self.constant(0, width) if operand.number == ZERO else register_slot(operand)
        if isinstance(operand, Integer) and (width == 1 or operand.value >= 0):
            return self.constant(operand.value, width)
        if isinstance(operand, Float) and operand.width == 32 and width == 1:
            return self.constant(operand.bits)
        raise self.refuse()

    def numeric(self, operand: Operand) -> tuple[int, int]:
        """The slot of a source and its signs: 1 negated, 2 absolute or inverted."""
        if isinstance(operand, Register) and not operand.suffixes:
            signs = int(operand.negated) | 2 * (operand.absolute or operand.inverted)
            plain = Register(operand.number, operand.uniform)
            return self.source(plain), signs
        return self.source(operand), 0

    def predicate(self, operand: Operand) -> tuple[int, int]:
        """The slot of a predicate and whether it is inverted."""
        if not isinstance(operand, Predicate):
            raise self.refuse()
        if operand.number == ALWAYS:
            return self.constant(0 if operand.negated else 0xFFFFFFFF), 0
        return predicate_slot(operand), int(operand.negated)

    def plain_predicate(self, operand: Operand, scratch: int = 7) -> int:
        """The slot of a predicate as it is read, inverted ahead if need be."""
        slot, inverted = self.predicate(operand)
        if not inverted:
            return slot
        from ..ptx.simple_ops import number_of

        self.emit(number_of("not.pred"), d=self.scratch(scratch), a=slot)
        return self.scratch(scratch)


def register_slot(register: Register) -> int:
    """Return the slot of a register that is not RZ."""
    return (_UNIFORM if register.uniform else FIRST_FREE_SLOT) + register.number


def predicate_slot(predicate: Predicate) -> int:
    """Return the slot of a predicate that is not PT."""
    return (_UNIFORM_PREDICATE if predicate.uniform else _PREDICATE) + predicate.number


def text_of(instruction: Instruction) -> str:
    """Return an instruction much as nvdisasm prints it."""
    guard = "" if instruction.guard == ALWAYS_DONE else f"@{_operand_text(instruction.guard)} "
    return f"{guard}{instruction.name} {', '.join(map(_operand_text, instruction.operands))}".rstrip()


def _operand_text(operand: Operand | None) -> str:
    match operand:
        case Register():
            text = f"{'U' * operand.uniform}R{'Z' if operand.number == ZERO else operand.number}"
            text = "".join((text, *(f".{suffix}" for suffix in operand.suffixes)))
            text = f"|{text}|" if operand.absolute else text
            return f"{'-' * operand.negated}{'~' * operand.inverted}{text}"
        case Predicate():
            return (
                f"{'!' * operand.negated}{'U' * operand.uniform}P{'T' if operand.number == ALWAYS else operand.number}"
            )
        case Predicates():
            return "U" * operand.uniform + "PR"
        case Integer():
            return hex(operand.value)
        case Float():
            return f"0f{operand.bits:0{operand.width // 4}x}"
        case Constant():
            index = f"{_operand_text(operand.index)}+" if operand.index else ""
            bank = operand.bank if isinstance(operand.bank, int) else _operand_text(operand.bank)
            return f"c[{bank}][{index}{operand.offset:#x}]"
        case Place():
            parts = [_operand_text(part) for part in (operand.base, operand.uniform) if part]
            return f"[{'+'.join([*parts, hex(operand.offset)])}]"
        case Descriptor():
            inner = _operand_text(operand.address) if operand.address else ""
            return f"{operand.kind}[{_operand_text(operand.register)}]{inner}"
        case Convergence():
            return f"B{operand.number}"
        case Scoreboard():
            return f"{operand.kind}{operand.number}"
        case Target():
            return hex(operand.address)
        case Special():
            return operand.name
    return ""
