"""Lowers integer arithmetic, logic, shifts, selection and moves of each lane, and its twins of the uniform path."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx.simple_ops import number_of
from .code import ALL_LANES, Code
from .lane_steps import is_false, lane_op, lanes_of, least, number, only, plain, simple, split
from .model import ALWAYS, ZERO, Instruction, Integer, Predicate, Register

_NEVER = Predicate(ALWAYS, negated=True)
_ZERO = Register(ZERO)


def _mov(code: Code, instruction: Instruction) -> None:
    """MOV.SPILL keeps a uniform register: all lanes take it, whoever is there."""
    spills = "SPILL" in only(code, instruction, "SPILL")
    if len(instruction.operands) != 2:
        raise code.refuse()
    result, source = instruction.operands
    lanes = ALL_LANES if spills else lanes_of(instruction)
    code.emit(number_of("mov.b32"), lanes=lanes, d=code.result(result), a=code.source(source))


def _cs2r(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    for half in code.registers(instruction.operands[0], 2, results=True):
        if getattr(instruction.operands[1], "name", "") != "SRZ":
            raise code.refuse()
        code.emit(number_of("mov.b32"), d=half, a=code.constant(0))


def _add3(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "X", "64")
    outputs, rest = split(instruction)
    carries = rest[3:] or [_NEVER, _NEVER]
    if "64" in modifiers:
        if any(p.number != ALWAYS for p in outputs) or len(rest) != 3:
            raise code.refuse()
        negated = isinstance(rest[1], Register) and rest[1].negated
        name, values = ("sub_64", [rest[0], plain(rest[1]), rest[2]]) if negated else ("add_64", rest)
    elif all(p.number == ALWAYS for p in outputs) and not rest[3:]:
        name, values, outputs = "add3", rest, []
    else:
        name, values = "add3_carry", [*rest[:3], *carries]
    used = [] if "64" in modifiers else outputs
    lane_op(code, instruction, name, [instruction.operands[0], *used], values)


def _mad(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "MOV", "IADD", "SHL", "U32", "HI", "WIDE", "X")
    outputs, rest = split(instruction)
    if any(p.number != ALWAYS for p in outputs):
        raise code.refuse()
    sign = "u32" if "U32" in modifiers else "s32"
    result = instruction.operands[0]
    if "WIDE" in modifiers and "X" not in modifiers:
        minus = isinstance(rest[2], Register) and rest[2].negated
        rest[2] = plain(rest[2]) if minus else rest[2]
        lane_op(code, instruction, f"mad_wide_{'minus_' if minus else ''}{sign}", [result], rest)
    elif "HI" in modifiers and "X" not in modifiers:
        lane_op(code, instruction, f"mad_hi_{sign}", [result], rest)
    elif "X" in modifiers and not modifiers & {"HI", "WIDE"}:
        lane_op(code, instruction, "mad_carry", [result], rest)
    elif modifiers & {"X"}:
        raise code.refuse()
    elif "MOV" in modifiers and rest[2] == plain(rest[2]):
        simple(code, instruction, "mov.b32", result, rest[2])
    else:
        lane_op(code, instruction, "mad", [result], rest)


def _lea(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "HI", "X", "SX32")
    outputs, rest = split(instruction)
    result = [instruction.operands[0], *outputs]
    carries = bool(outputs) and outputs[0].number != ALWAYS
    carried = [rest.pop()] if "X" in modifiers else []
    shift = number(code, rest.pop())
    if "HI" not in modifiers:
        name = "lea_carry" if carries else "lea"
    elif "SX32" in modifiers:
        name = "lea_hi_sx_carry" if carried else "lea_hi_sx"
    else:
        name = "lea_hi_carry" if carried else "lea_hi_carries" if carries else "lea_hi"
    if ("X" in modifiers and "HI" not in modifiers) or (
        carries and not name.startswith(("lea_carry", "lea_hi_carries"))
    ):
        raise code.refuse()
    lane_op(code, instruction, name, result if carries else result[:1], [*rest, *carried], shift)


def _lop3(code: Code, instruction: Instruction) -> None:
    only(code, instruction, "LUT")
    operands = list(instruction.operands)
    tested = [operands.pop(0)] if isinstance(operands[0], Predicate) else []
    result, a, b, c, table, also = operands
    if not is_false(also):
        raise code.refuse()
    lut = number(code, table)
    names = {0xC0: "and.b32", 0xFC: "or.b32", 0x3C: "xor.b32"}
    if not tested and lut in names and a == plain(a) and b == plain(b):
        simple(code, instruction, names[lut], result, a, b)
    elif not tested and lut == 0x33 and b == plain(b):
        simple(code, instruction, "not.b32", result, b)
    else:
        lane_op(code, instruction, "lop3_test" if tested else "lop3", [result, *tested], [a, b, c], lut)


def _shf(code: Code, instruction: Instruction) -> None:
    direction, *kinds = instruction.modifiers
    result, a, b, c = instruction.operands
    match (direction, *kinds):
        case ("L", "U32"):
            simple(code, instruction, "shl.b32", result, a, b)
        case ("R", "U32", "HI"):
            simple(code, instruction, "shr.u32", result, c, b)
        case ("R", "S32", "HI"):
            simple(code, instruction, "shr.s32", result, c, b)
        case ("L", "U64", "HI"):
            lane_op(code, instruction, "shift_left_high", [result], [a, b, c])
        case ("L", "W", "U32", "HI"):
            lane_op(code, instruction, "funnel_left_wrap", [result], [a, b, c])
        case ("L", "W", "U32"):
            lane_op(code, instruction, "shift_left_wrap", [result], [a, b])
        case ("R", "W", "U32", "HI"):
            lane_op(code, instruction, "shift_right_wrap", [result], [c, b])
        case ("R", "U64"):
            lane_op(code, instruction, "shift_right_low", [result], [a, b, c])
        case ("R", "S64"):
            lane_op(code, instruction, "shift_right_low_s64", [result], [a, b, c])
        case _:
            raise code.refuse()


def _prmt(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, a, selector, c = instruction.operands
    simple(code, instruction, "prmt.b32", result, a, c, selector)


def _sel(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, a, b, chosen = instruction.operands
    slot, inverted = code.predicate(chosen)
    first, second = (b, a) if inverted else (a, b)
    code.emit(
        number_of("selp.b32"), lanes=lanes_of(instruction), d=code.result(result),
        a=code.source(first), b=code.source(second), c=slot,
    )  # fmt: skip


def _vimnmx(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "U32", "RELU")
    outputs, (*sources, which) = split(instruction)
    if any(p.number != ALWAYS for p in outputs) or {"U32", "RELU"} <= modifiers:
        raise code.refuse()
    kind, name, result = "u32" if "U32" in modifiers else "s32", least(code, which), instruction.operands[0]
    if instruction.opcode == "VIADDMNMX":
        lane_op(code, instruction, f"add_{name}_{kind}", [result], sources)
    elif len(sources) == 3:
        lane_op(code, instruction, f"{name}3_{kind}", [result], sources)
    else:
        simple(code, instruction, f"{name}.{kind}", result, *sources)
    if "RELU" in modifiers:
        simple(code, instruction, "max.s32", result, result, Integer(0))


def _viadd(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, *sources = instruction.operands
    lane_op(code, instruction, "add3", [result], [*sources, _ZERO])


def _one(name: str) -> Callable[[Code, Instruction], None]:
    def lowered(code: Code, instruction: Instruction) -> None:
        only(code, instruction)
        simple(code, instruction, name, *instruction.operands)

    return lowered


def _leading(code: Code, instruction: Instruction) -> None:
    if instruction.modifiers != ("U32",):
        raise code.refuse()
    simple(code, instruction, "bfind.u32", *instruction.operands)


LANES = {
    "MOV": _mov, "UMOV": _mov, "CS2R": _cs2r,
    "IADD3": _add3, "UIADD3": _add3, "IMAD": _mad, "UIMAD": _mad, "LEA": _lea, "ULEA": _lea, "VIADD": _viadd,
    "LOP3": _lop3, "ULOP3": _lop3, "SHF": _shf, "USHF": _shf, "PRMT": _prmt, "UPRMT": _prmt,
    "SEL": _sel, "USEL": _sel, "VIMNMX": _vimnmx, "VIMNMX3": _vimnmx, "VIADDMNMX": _vimnmx,
    "POPC": _one("popc.b32"), "UPOPC": _one("popc.b32"), "IABS": _one("abs.s32"), "FLO": _leading,
    "UFLO": _leading,
}  # fmt: skip
