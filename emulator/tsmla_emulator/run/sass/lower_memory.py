"""Lowers loads and stores: constant banks, global and shared memory, matrices between shared memory and registers."""

from __future__ import annotations

from ..ptx.encoding import SIGNED, SPACES, WIDE_ADDRESS
from ..ptx.simple_ops import number_of
from .code import Code
from .lane_steps import lanes_of, only
from .lower_flow import _nothing
from .model import ZERO, Address, Constant, Descriptor, Instruction, Integer, Operand, Predicate, Register, Scoreboard

PARAM_SLOT = 4
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_HINTS = ("CONSTANT", "EF", "EL", "EU", "LU", "NA", "EFL2", "ENL2", "LTC64B", "LTC128B", "LTC256B")
"""What caches are told."""
_ATOMICS = {"AND": 3, "OR": 4, "XOR": 5}


def _size(modifiers: set[str]) -> int:
    found = [size for name, size in _SIZES.items() if name in modifiers or name == "128" and "256" in modifiers]
    return found[0] if found else 4


def _constant(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "U8", "64", "128")
    result, place = instruction.operands
    if not isinstance(place, Constant) or place.bank not in (0, 2) or place.suffixes or place.negated:
        raise code.refuse()
    width = _size(modifiers)
    items = code.registers(result, max(1, width // 4), results=True)
    first = 0 if place.bank == 0 else code.second_bank
    if place.index is None or place.index.number == ZERO:
        code.emit("load_constant", lanes=_lanes(instruction), items=items, imm=first + place.offset, width=width)
        return
    code.emit(
        number_of("add.s64"), lanes=_lanes(instruction), d=code.scratch(), a=PARAM_SLOT, b=code.constant(first, 2)
    )
    code.emit(number_of("cvt.u64.u32"), lanes=_lanes(instruction), d=code.scratch(1), a=code.source(place.index))
    code.emit(number_of("add.s64"), lanes=_lanes(instruction), d=code.scratch(), a=code.scratch(), b=code.scratch(1))
    flags = SPACES["param"] | WIDE_ADDRESS
    element = min(width, 4)
    code.emit(
        "load",
        lanes=_lanes(instruction),
        a=code.scratch(),
        imm=place.offset,
        flags=flags,
        width=element,
        items=items,
        extra=4,
    )


def _lanes(instruction: Instruction) -> int:
    return lanes_of(instruction) or (8 if instruction.opcode == "LDCU" else 0)


def shared_address(code: Code, operand: Operand, scratch: int = 6) -> tuple[int, int]:
    """The slot and the offset of an address of shared memory: [R], [UR], [R+UR], each with an offset."""
    if not isinstance(operand, Address):
        raise code.refuse()
    parts = [part for part in (operand.base, operand.uniform) if part is not None and part.number != ZERO]
    if any(part.suffixes for part in parts):
        raise code.refuse()
    if len(parts) == 2:
        a, b = map(code.source, parts)
        code.emit(number_of("add.s32"), d=code.scratch(scratch), a=a, b=b)
        return code.scratch(scratch), operand.offset
    return code.source(parts[0]) if parts else code.constant(0), operand.offset


def global_address(code: Code, operand: Operand) -> tuple[int, int]:
    """The slot and the offset of an address of global memory: desc[UR][R.64], desc[UR][R.64+offset]."""
    if not isinstance(operand, Descriptor) or operand.kind != "desc" or operand.address is None or operand.suffixes:
        raise code.refuse()
    where = operand.address
    if where.uniform is not None or where.base is None or where.base.suffixes != ("64",):
        raise code.refuse()
    return code.source(Register(where.base.number), 2), where.offset


def _move(code: Code, instruction: Instruction, load: bool, space: str) -> None:
    known = ("E", "256", *_HINTS, *_SIZES) if space == "global" else tuple(_SIZES)
    modifiers = only(code, instruction, *known)
    width = _size(modifiers)
    *values, place = instruction.operands if load else instruction.operands[::-1]
    if space == "global":
        base, offset = global_address(code, place)
        flags = SPACES[space] | WIDE_ADDRESS
    else:
        base, offset = shared_address(code, place)
        flags = SPACES[space]
    flags |= SIGNED if modifiers & {"S8", "S16"} else 0
    items: tuple[int, ...] = ()
    for value in values[::-1]:  # of two, the one that is printed next to the place is the lower half
        items += code.registers(value, max(1, width // 4), results=load)
    element = min(width, 4)
    code.emit("load" if load else "store", a=base, imm=offset, flags=flags, width=element, items=items, extra=4)


def _matrix(code: Code, instruction: Instruction) -> None:
    load = instruction.opcode == "LDSM"
    kind, layout, count = instruction.modifiers
    if kind != "16" or layout not in ("M88", "MT88") or count not in ("1", "2", "4"):
        raise code.refuse()
    value, place = instruction.operands if load else instruction.operands[::-1]
    base, offset = shared_address(code, place)
    items = code.registers(value, int(count), results=load)
    name = "ldmatrix" if load else "stmatrix"
    code.emit(name, a=base, imm=offset, flags=SPACES["shared"], items=items, extra=int(layout == "MT88"))


def _product(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "16816", "F32", "BF16")
    if not {"16816", "F32"} <= modifiers:
        raise code.refuse()
    d, a, b, c = instruction.operands
    items = (
        *code.registers(d, 4, results=True), *code.registers(a, 4), *code.registers(b, 2), *code.registers(c, 4)
    )  # fmt: skip
    code.emit("mma", items=items, imm=int("BF16" in modifiers))


def _copy(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "E", "BYPASS", "LTC128B", "64", "128")
    to, source, *condition = instruction.operands
    base, offset = shared_address(code, to)
    origin, origin_offset = global_address(code, source)
    size = _size(modifiers)
    limit = {}
    if condition:  # zeros where it does not hold
        (predicate,) = condition
        if not isinstance(predicate, Predicate):
            raise code.refuse()
        slot, inverted = code.predicate(predicate)
        given, none = code.constant(size), code.constant(0)
        a, b = (none, given) if inverted else (given, none)
        code.emit(number_of("selp.b32"), d=code.scratch(5), a=a, b=b, c=slot)
        limit["c"] = code.scratch(5)
    code.emit(
        "cp_async", a=base, imm=offset, b=origin, extra=size, flags=SPACES["shared"],
        e=code.constant(origin_offset), **limit,
    )  # fmt: skip


def _wait_for_copies(code: Code, instruction: Instruction) -> None:
    """A scoreboard counts groups of copies, or of bulk stores that read shared memory, as the kernel uses it."""
    board, allowed = instruction.operands
    if instruction.modifiers != ("LE",) or not isinstance(allowed, Integer) or not isinstance(board, Scoreboard):
        raise code.refuse()
    kinds = code.groups.get(board.number, set())
    if len(kinds) > 1 and allowed.value:
        raise code.refuse("groups of two kinds")
    if not kinds:
        code.emit("nop")
    if "LDGDEPBAR" in kinds:
        code.emit("cp_async_wait", imm=allowed.value)
    if "UTMACMDFLUSH" in kinds:
        code.emit("bulk_wait", imm=allowed.value, extra=1)


def _atomic(code: Code, instruction: Instruction) -> None:
    (kind,) = instruction.modifiers
    result, place, value = instruction.operands
    if kind not in _ATOMICS:
        raise code.refuse()
    base, offset = shared_address(code, place)
    code.emit(
        "atomic", d=code.result(result), a=base, imm=offset, b=code.source(value), flags=SPACES["shared"], width=4,
        extra=_ATOMICS[kind],
    )  # fmt: skip


MEMORY = {
    "LDC": _constant, "ULDC": _constant, "LDCU": _constant,
    "LDG": lambda code, instruction: _move(code, instruction, True, "global"),
    "STG": lambda code, instruction: _move(code, instruction, False, "global"),
    "LDS": lambda code, instruction: _move(code, instruction, True, "shared"),
    "STS": lambda code, instruction: _move(code, instruction, False, "shared"),
    "LDSM": _matrix, "STSM": _matrix, "HMMA": _product, "LDGSTS": _copy,
    "LDGDEPBAR": lambda code, instruction: code.emit("cp_async_commit"),
    "ATOMS": _atomic, "DEPBAR": _wait_for_copies, "CCTL": _nothing,
}  # fmt: skip
