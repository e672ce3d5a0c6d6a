"""Lowers Blackwell's tensor memory and products: to the operations that PTX's tcgen05 has."""

from __future__ import annotations

import re

from ..ptx.encoding import SPACES
from ..ptx.lower_async import COPIES, FILLS, MULTICAST
from .code import NONE, ONE_LANE, Code
from .lane_steps import only
from .lower_async import uniform
from .lower_flow import _nothing
from .model import ZERO, Descriptor, Instruction, Operand, Register

_KINDS = {"UTCHMMA": 0, "UTCQMMA": 2}
_A_IN_TENSOR_MEMORY, _WEIGHT_STATIONARY = 1 << 4, 1 << 5
_LARGEST = 1 << 4 | 1 << 6


def _described(code: Code, operand: Operand, kind: str) -> Register:
    if not isinstance(operand, Descriptor) or operand.kind != kind or operand.suffixes or operand.address:
        raise code.refuse()
    if kind != "tmem" and operand.offset:
        raise code.refuse()
    return operand.register


def _multiply(code: Code, instruction: Instruction) -> None:
    """Factors, where the sum lies, which rows of it are left alone, what is multiplied, maybe registers that disable
    lanes, and whether the sum counts."""
    modifiers = only(code, instruction, "2CTA", "WS")
    a, b, sums, left_alone, kinds, *disabled, added = instruction.operands
    ctas = 2 if "2CTA" in modifiers else 1
    in_memory = isinstance(a, Descriptor) and a.kind == "tmem"
    if isinstance(left_alone, Descriptor) and left_alone.offset:
        raise code.refuse()
    if isinstance(sums, Descriptor) and sums.offset or in_memory and isinstance(a, Descriptor) and a.offset:
        raise code.refuse()
    left = code.source(_described(code, a, "tmem" if in_memory else "gdesc"), 1 if in_memory else 2)
    items = (
        code.source(_described(code, kinds, "idesc")), code.plain_predicate(added), code.constant(0),
        code.source(_described(code, left_alone, "tmem")),
        *(uniform(code, first, i) for first in disabled for i in range(4 * ctas)),
    )  # fmt: skip
    flags = _KINDS[instruction.opcode] | (_A_IN_TENSOR_MEMORY if in_memory else 0)
    code.emit(
        "tmem_mma", lanes=ONE_LANE, a=code.source(_described(code, sums, "tmem")), b=left,
        c=code.source(_described(code, b, "gdesc"), 2), items=items, width=len(items) - 3, extra=ctas,
        flags=flags | (_WEIGHT_STATIONARY if "WS" in modifiers else 0),
    )  # fmt: skip


_COPIED = {
    "": "128x256b", "128dp128bit": "128x128b", "4dp256bit": "4x256b",
    "2x64dp128bit_lw02_lw13": "64x128b.warpx2::02_13", "2x64dp128bit_lw01_lw23": "64x128b.warpx2::01_23",
    "4x32dp128bit": "32x128b.warpx4",
}  # fmt: skip
"""Names of what is copied: nvdisasm's -> PTX's."""


def _copy(code: Code, instruction: Instruction) -> None:
    """From shared memory to tensor memory."""
    shape = "".join(only(code, instruction, "T", "S", "2CTA", *_COPIED) - {"T", "S", "2CTA"})
    to, source = instruction.operands
    offset = to.offset if isinstance(to, Descriptor) else 0
    code.emit(
        "tmem_copy", lanes=ONE_LANE, a=code.source(_described(code, to, "tmem")), imm=offset,
        b=code.source(_described(code, source, "gdesc"), 2), extra=2 if "2CTA" in instruction.modifiers else 1,
        flags=COPIES[tuple(_COPIED[shape].split("."))] | FILLS,
    )  # fmt: skip


def _commit(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "2CTA", "MULTICAST")
    place, nothing, *mask = instruction.operands
    if nothing != Register(ZERO, True) or bool(mask) != ("MULTICAST" in modifiers):
        raise code.refuse()
    names = {"b": code.source(mask[0])} if mask else {}
    code.emit(
        "tmem_commit", lanes=ONE_LANE, a=uniform(code, place), extra=2 if "2CTA" in modifiers else 1,
        flags=SPACES["shared::cluster"] | (MULTICAST if mask else 0), **names,
    )  # fmt: skip


def _move(code: Code, instruction: Instruction) -> None:
    """LDTM.STAT also gives the largest of what it loads, NaN aside, in the first register."""
    load = instruction.opcode == "LDTM"
    found = re.fullmatch(r"(STAT\.)?x(\d+)(\.MAX\.F32)?", ".".join(instruction.modifiers) or "x1")
    if found is None or bool(found[1]) != bool(found[3]) or (found[1] and not load):
        raise code.refuse()
    *largest, values, place = instruction.operands if load else instruction.operands[::-1]
    if len(largest) != bool(found[1]):
        raise code.refuse()
    count = int(found[2])
    base = code.source(_described(code, place, "tmem"))
    offset = place.offset if isinstance(place, Descriptor) else 0
    items = code.registers(values, count, results=load)
    board = instruction.control.result
    width = board + 1 if load and board is not None else 0
    code.emit(
        "tmem_load" if load else "tmem_store", d=code.result(largest[0]) if largest else NONE, a=base, imm=offset,
        items=items, extra=count, width=width, flags=_LARGEST if largest else 0,
    )  # fmt: skip


def _columns(code: Code, instruction: Instruction) -> None:
    match instruction.modifiers:
        case ("FIND_AND_SET", "ALIGN") | ("2CTA", "FIND_AND_SET", "ALIGN"):
            found, first, count = instruction.operands
            group = 2 if "2CTA" in instruction.modifiers else 1
            items = (code.result(found),)
            code.emit("tmem_find", lanes=ONE_LANE, d=code.result(first), a=code.source(count), items=items, extra=group)
        case ("AND",):
            old, kept = instruction.operands
            if old != Register(ZERO, True):
                raise code.refuse()
            code.emit("tmem_free", lanes=ONE_LANE, a=code.source(kept))
        case _:
            raise code.refuse()


TENSOR = {
    "UTCHMMA": _multiply, "UTCQMMA": _multiply, "UTCCP": _copy, "UTCBAR": _commit, "LDTM": _move, "STTM": _move,
    "UTCATOMSWS": _columns, "UVIRTCOUNT": _nothing,
}  # fmt: skip
