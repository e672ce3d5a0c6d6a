"""Lowers arithmetic of floats, and of two of them side by side."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx.encoding import first_sass_number
from ..ptx.simple_ops import number_of
from .code import Code
from .lane_ops import LANE_OPS, lane_number
from .lane_steps import lane_op, least, only, plain
from .model import ZERO, Float, Instruction, Operand, Register


def _fsel(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, *sources = instruction.operands
    lane_op(code, instruction, "fsel", [result], sources)


def _float(name: str) -> Callable[[Code, Instruction], None]:
    def lowered(code: Code, instruction: Instruction) -> None:
        modifiers = only(code, instruction, "FTZ", "RM", "RP", "RZ")
        kind = "_".join((name, *sorted(part.lower() for part in modifiers)))
        if kind not in LANE_OPS:
            raise code.refuse()
        result, *sources = instruction.operands
        lane_op(code, instruction, kind, [result], sources)

    return lowered


def _fmnmx(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "NAN", "FTZ")
    result, *sources, which = instruction.operands
    count = "3" if len(sources) == 3 else ""
    endings = ("_nan" if "NAN" in modifiers else "") + ("_ftz" if "FTZ" in modifiers else "")
    lane_op(code, instruction, f"f{least(code, which)}{count}{endings}", [result], sources)


def _mufu(code: Code, instruction: Instruction) -> None:
    (kind,) = instruction.modifiers
    if f"mufu_{kind.lower()}" not in LANE_OPS:
        raise code.refuse()
    lane_op(code, instruction, f"mufu_{kind.lower()}", instruction.operands[:1], instruction.operands[1:])


def _fchk(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    lane_op(code, instruction, "division_is_hard", instruction.operands[:1], instruction.operands[1:])


def _pair(name: str):
    """Arithmetic of two floats side by side. A source is a pair of registers or one number for both."""

    def lowered(code: Code, instruction: Instruction) -> None:
        only(code, instruction)
        result, *sources = instruction.operands
        low, high = code.registers(result, 2, results=True)
        halves = [_pair_source(code, operand) for operand in sources]
        first = [half for half, _, _ in halves]
        second = [half for _, half, _ in halves]
        signs = sum(sign << 2 * i for i, (_, _, sign) in enumerate(halves))
        operation = first_sass_number() + lane_number(name)

        def emit(to: int, slots: list[int]) -> None:
            code.emit(operation, d=to, flags=signs, **dict(zip("abc", slots, strict=False)))

        if low not in second:
            emit(low, first)
            emit(high, second)
        elif high not in first:
            emit(high, second)
            emit(low, first)
        else:
            emit(code.scratch(), first)
            emit(high, second)
            code.emit(number_of("mov.b32"), d=low, a=code.scratch())

    return lowered


def _pair_source(code: Code, operand: Operand) -> tuple[int, int, int]:
    """The slots of both halves, and their sign."""
    if isinstance(operand, Float):
        return code.source(operand), code.source(operand), 0
    if not isinstance(operand, Register) or operand.inverted:
        raise code.refuse()
    bare, sign = plain(operand), int(operand.negated) | 2 * operand.absolute
    if operand.suffixes == ("F32",):
        return code.source(bare), code.source(bare), sign
    if operand.suffixes == ("F32x2", "HI_LO"):
        low = code.source(bare)
        return low, code.constant(0) if operand.number == ZERO else low + 1, sign
    raise code.refuse()


FLOATS = {
    "FADD": _float("fadd"), "FMUL": _float("fmul"), "FFMA": _float("ffma"), "FMNMX": _fmnmx, "FMNMX3": _fmnmx,
    "FADD2": _pair("fadd"), "FMUL2": _pair("fmul"), "FFMA2": _pair("ffma"), "FSEL": _fsel, "MUFU": _mufu, "FCHK": _fchk,
}  # fmt: skip
