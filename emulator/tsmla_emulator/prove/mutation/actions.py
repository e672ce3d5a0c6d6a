"""Changes of one encoded instruction of a kernel, each of which makes a mutant."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator

from ...run.ptx.encoding import op_number
from ...run.ptx.lower_async import RELAXED as RELAXED_FLAG
from ...run.ptx.program import Program
from ...run.ptx.simple_ops import SIMPLE_OPS, number_of

REMOVED, ALWAYS_TRUE, NO_BYTES = "removed", "always true", "arrives, but expects no bytes"
RELAXED, OF_GLOBAL_MEMORY = "relaxed", "of global memory only"
ONE_MORE, ONE_LESS, NEXT_BARRIER = "for one arrival more", "for one arrival less", "at the next barrier"
NEXT_MBARRIER, MORE_BYTES, FEWER_BYTES = "at the next mbarrier", "of 16 bytes more", "of 16 bytes fewer"
PARITY_0, PARITY_1 = "for parity 0", "for parity 1"
EARLIER, LATER = "before what it covers last", "behind what comes next"
NEXT_COLUMN, NEXT_ROW, WIDER = "a column further", "128 bytes further", "of 8 columns more"
OTHER_BOUND = "with the other bound"
PLACE_FURTHER = "16 bytes further"
MORE_REGISTERS, FEWER_REGISTERS = "of 8 registers more", "of 8 registers fewer"
B_AWAY, B_STRIDE, B_SWIZZLE = "with B 32 bytes away", "with another stride of B", "with another swizzle of B"
MOVES = (EARLIER, LATER)
"""Actions that change the positions of other instructions of the basic block."""

_INSTRUCTION = 48
_OPCODE, _GUARD, _RESULT, _OPERAND_A, _OPERAND_B, _OPERAND_E, _FLAGS, _FIRST, _COUNT, _EXTRA, _IMMEDIATE = (
    (0, "<H"), (4, "<i"), (8, "<i"), (12, "<i"), (16, "<i"), (24, "<i"), (28, "<I"), (32, "<I"), (36, "<H"), (38, "<H"),
    (40, "<q"),
)  # fmt: skip
"""Offset and format of the fields of an encoded instruction; see `Insn` in core/machine.h."""
_ENDS_BLOCK = [op_number(name) for name in ("bra", "exit", "trap")]
_COVERED = [op_number(name) for name in ("wgmma", "tmem_mma", "bulk_store_tensor", "bulk_copy")]
"""Opcodes of what commits cover."""
_MEETS = _COVERED + [
    op_number(name)
    for name in (
        "mbarrier_arrive",
        "barrier_sync",
        "barrier_arrive",
        "warp_sync",
        "wgmma_wait",
        "bulk_wait",
        "tensor_fence",
        "proxy_fence",
    )
]
"""Opcodes that a commit must not move behind unnoticed."""
_COLUMNS_OF_PRODUCT, _COLUMN_UNITS = 17, 0x3F
"""Position and mask of N / 8 in a tcgen05 instruction descriptor (PTX ISA 9.7.16.4.2, table 44)."""
_START, _STRIDE, _SWIZZLE = 1 << 1, 1 << 32, 1 << 62
"""One bit each of a matrix descriptor's address, its stride (both in units of 16 bytes) and its swizzle; the same for
wgmma and tcgen05 (PTX ISA 9.7.15.5.1, 9.7.16.4.1)."""


def changed(program: Program, position: int, action: str) -> Program | None:
    """Return the program with the instruction at `position` changed as the action says; None where it cannot be."""
    return _ACTIONS[action](program, position)


def _replaced(program: Program, position: int) -> Program:
    return _patched(program, position, [(_OPCODE, op_number("nop"))])


def _always_true(program: Program, position: int) -> Program:
    return _patched(program, position, [(_OPCODE, number_of("mov.pred"))], (_OPERAND_A, 0xFFFFFFFF))


def _without_bytes(program: Program, position: int) -> Program:
    return _patched(program, position, [(_EXTRA, 0)], (_OPERAND_B, 1))


def _relaxed(program: Program, position: int) -> Program:
    return _patched(program, position, [(_FLAGS, _field(program, position, _FLAGS) | RELAXED_FLAG)])


def _of_global_memory(program: Program, position: int) -> Program:
    return _patched(program, position, [(_IMMEDIATE, 1)])


def _operand(field: tuple[int, str], step: int) -> Callable[[Program, int], Program | None]:
    """Return an action that changes a constant operand by `step`."""

    def change(program: Program, position: int) -> Program | None:
        value = _constant(program, position, field)
        return None if value is None else _patched(program, position, [], (field, value + step))

    return change


def _offset(step: int) -> Callable[[Program, int], Program]:
    """Return an action that changes the constant part of an address, or the number of registers, by `step`."""

    def change(program: Program, position: int) -> Program:
        return _patched(program, position, [(_IMMEDIATE, _field(program, position, _IMMEDIATE) + step)])

    return change


def _wrong_b(bits: int) -> Callable[[Program, int], Program]:
    """Return an action that makes some bits of B's matrix descriptor wrong."""

    def change(program: Program, position: int) -> Program:
        added = dataclasses.replace(program, constants=(*program.constants, bits & 0xFFFFFFFF, bits >> 32))
        return _patched(added, position, [(_OPERAND_E, ~len(program.constants))])

    return change


def _parity(value: int) -> Callable[[Program, int], Program | None]:
    """Return an action that makes a wait by parity always wait for the same one."""

    def change(program: Program, position: int) -> Program | None:
        by_state = _field(program, position, _EXTRA) & 1
        if by_state or _constant(program, position, _OPERAND_B) == value:
            return None
        return _patched(program, position, [], (_OPERAND_B, value))

    return change


def _wider(program: Program, position: int) -> Program | None:
    """Make a tcgen05.mma wider, if its instruction descriptor is a constant."""
    first = _field(program, position, _FIRST)
    place = program.lists[first]
    if place >= 0:
        return None
    descriptor = program.constants[~place]
    units = (descriptor >> _COLUMNS_OF_PRODUCT) + 1 & _COLUMN_UNITS
    other = descriptor & ~(_COLUMN_UNITS << _COLUMNS_OF_PRODUCT) | units << _COLUMNS_OF_PRODUCT
    lists = (*program.lists[:first], ~len(program.constants), *program.lists[first + 1 :])
    return dataclasses.replace(program, lists=lists, constants=(*program.constants, other))


_EQUAL_TOO = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}


def _other_bounds() -> dict[int, int]:
    """Return the number of each comparison's opcode -> that of the one which decides otherwise for equal numbers."""
    found = {}
    for opcode in SIMPLE_OPS:
        parts = opcode.split(".")
        if parts[0] == "setp" and parts[1] in _EQUAL_TOO:
            found[number_of(opcode)] = number_of(".".join((parts[0], _EQUAL_TOO[parts[1]], *parts[2:])))
    return found


_OTHER_BOUNDS = _other_bounds()


def _with_other_bound(program: Program, position: int) -> Program | None:
    other = _OTHER_BOUNDS.get(_field(program, position, _OPCODE))
    return None if other is None else _patched(program, position, [(_OPCODE, other)])


def _earlier(program: Program, position: int) -> Program | None:
    """Move a commit in front of the last instruction that it covers, within the basic block."""
    for before in _of_block(program, position, -1):
        if _writes_what_is_read(program, before, position):
            return None
        if _field(program, before, _OPCODE) in _COVERED:
            return _moved(program, position, before)
    return None


def _later(program: Program, position: int) -> Program | None:
    """Move a commit behind the next instruction that must not come before it, within the basic block."""
    for behind in _of_block(program, position, 1):
        if _writes_what_is_read(program, behind, position):
            return None
        if _field(program, behind, _OPCODE) in _MEETS:
            return _moved(program, position, behind)
    return None


def _of_block(program: Program, position: int, step: int) -> Iterator[int]:
    """Yield positions of the basic block from next to `position` on."""
    targets = set(program.entry.labels.values())
    last = len(program.code) // _INSTRUCTION - 1
    other = position + step
    while 0 <= other <= last and _field(program, other, _OPCODE) not in _ENDS_BLOCK:
        if max(other, other - step) in targets:  # control may come between the two from elsewhere
            return
        yield other
        other += step


def _writes_what_is_read(program: Program, writer: int, reader: int) -> bool:
    """Whether an instruction writes a register from which a commit has its guard, its barrier or its CTAs."""
    fields = [_field(program, reader, field) for field in (_GUARD, _OPERAND_A, _OPERAND_B)]
    read = {slot + half for slot in fields if slot >= 0 for half in (0, 1)}
    first, count = _field(program, writer, _FIRST), _field(program, writer, _COUNT)
    result = _field(program, writer, _RESULT)
    touched = {result, result + 1, *program.lists[first : first + count]}
    return not read.isdisjoint(touched)


def _moved(program: Program, position: int, to: int) -> Program:
    """Move an instruction to `to`; those between make room."""
    code = [program.code[at : at + _INSTRUCTION] for at in range(0, len(program.code), _INSTRUCTION)]
    code.insert(to, code.pop(position))
    return dataclasses.replace(program, code=b"".join(code))


_ACTIONS: dict[str, Callable[[Program, int], Program | None]] = {
    REMOVED: _replaced,
    ALWAYS_TRUE: _always_true,
    NO_BYTES: _without_bytes,
    RELAXED: _relaxed,
    OF_GLOBAL_MEMORY: _of_global_memory,
    ONE_MORE: _operand(_OPERAND_B, 1),
    ONE_LESS: _operand(_OPERAND_B, -1),
    NEXT_BARRIER: _operand(_OPERAND_A, 1),
    NEXT_MBARRIER: _offset(8),
    MORE_BYTES: _operand(_OPERAND_B, 16),
    FEWER_BYTES: _operand(_OPERAND_B, -16),
    PARITY_0: _parity(0),
    PARITY_1: _parity(1),
    EARLIER: _earlier,
    LATER: _later,
    NEXT_COLUMN: _offset(1),
    NEXT_ROW: _offset(128),
    PLACE_FURTHER: _offset(16),
    B_AWAY: _wrong_b(_START),
    B_STRIDE: _wrong_b(_STRIDE),
    B_SWIZZLE: _wrong_b(_SWIZZLE),
    WIDER: _wider,
    MORE_REGISTERS: _offset(8),
    FEWER_REGISTERS: _offset(-8),
    OTHER_BOUND: _with_other_bound,
}


def _constant(program: Program, position: int, operand: tuple[int, str]) -> int | None:
    """Return the value of an operand that is a constant, or a register to which the last move before gave one."""
    place = _field(program, position, operand)
    moves = [number_of("mov.b32"), number_of("mov.b64")]
    while place >= 0:
        moved = (
            earlier
            for earlier in range(position - 1, -1, -1)
            if _field(program, earlier, _OPCODE) in moves and _field(program, earlier, _RESULT) == place
        )
        if (position := next(moved, -1)) < 0:
            return None
        place = _field(program, position, _OPERAND_A)
    return program.constants[~place]


def _field(program: Program, position: int, field: tuple[int, str]) -> int:
    offset, form = field
    return struct.unpack_from(form, program.code, position * _INSTRUCTION + offset)[0]


def _patched(
    program: Program,
    position: int,
    fields: list[tuple[tuple[int, str], int]],
    constant: tuple[tuple[int, str], int] | None = None,
) -> Program:
    """Return the program with fields of one instruction replaced. constant: an operand and its new value."""
    code, constants = bytearray(program.code), program.constants
    if constant:
        fields = [*fields, (constant[0], ~len(constants))]
        constants = (*constants, constant[1])
    for (offset, form), value in fields:
        struct.pack_into(form, code, position * _INSTRUCTION + offset, value)
    return dataclasses.replace(program, code=bytes(code), constants=constants)
