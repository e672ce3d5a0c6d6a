"""Lowers conversions between kinds of numbers, and arithmetic of pairs of 16-bit floats."""

from __future__ import annotations

from ..ptx.simple_ops import number_of
from .code import Code
from .lane_steps import lane_op, lanes_of, least, only
from .model import ZERO, Float, Instruction, Operand, Register

_HALVES = {(): 0, ("H1_H0",): 0, ("H0_H0",): 1, ("H1_H1",): 2}
_PARTS: dict[tuple[str, ...], int] = {(): 0, ("H0",): 0, ("H1",): 16}
_NEGATED, _ABSOLUTE = 4, 8


def _f2fp(code: Code, instruction: Instruction) -> None:
    result, *sources = instruction.operands
    match instruction.modifiers:
        case ("BF16" | "F16" as half, "F32", "PACK_AB"):
            if len(sources) != 2:
                raise code.refuse()
            lane_op(code, instruction, f"pack_{half.lower()}", [result], sources)
        case ("SATFINITE", "E4M3" | "E5M2" as small, "F32", "PACK_AB_MERGE_C"):
            lane_op(code, instruction, f"pack_{small.lower()}", [result], sources)
        case ("F16", "E4M3" | "E5M2" as small, "UNPACK_B"):
            (source,) = sources
            if not isinstance(source, Register) or source.suffixes not in _PARTS:
                raise code.refuse()
            lane_op(code, instruction, f"unpack_{small.lower()}", [result], [_bare(source)], _PARTS[source.suffixes])
        case _:
            raise code.refuse()


def _bare(register: Register) -> Register:
    return Register(register.number, register.uniform)


def _i2f(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "F32", "S32", "U32", "U16", "RP", "RZ")
    result, source = instruction.operands
    if "U16" in modifiers:
        code.emit(
            number_of("and.b32"),
            lanes=lanes_of(instruction),
            d=code.scratch(),
            a=code.source(source),
            b=code.constant(0xFFFF),
        )
    kind = "u32" if modifiers & {"U32", "U16"} else "s32"
    rounding = "_rp" if "RP" in modifiers else "_rz" if "RZ" in modifiers else ""
    value = code.scratch() if "U16" in modifiers else source
    lane_op(code, instruction, f"to_float_{kind}{rounding}", [result], [value])


def _f2i(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "FTZ", "U32", "TRUNC", "NTZ")
    if not {"TRUNC", "NTZ"} <= modifiers:
        raise code.refuse()
    name = f"to_integer_{'u32' if 'U32' in modifiers else 's32'}{'_ftz' if 'FTZ' in modifiers else ''}"
    lane_op(code, instruction, name, instruction.operands[:1], instruction.operands[1:])


def _hadd2(code: Code, instruction: Instruction) -> None:
    """HADD2.F32 of -0 and a half: how a half becomes a float."""
    result, zero, source = instruction.operands
    halves = {("H0_H0",): 0, ("H1_H1",): 16}
    if (
        instruction.modifiers != ("F32",) or zero != Register(ZERO, negated=True) or not isinstance(source, Register)
        or source.suffixes not in halves or source.negated or source.absolute
    ):  # fmt: skip
        raise code.refuse()
    lane_op(code, instruction, "half_to_float", [result], [_bare(source)], halves[source.suffixes])


def _half_operand(code: Code, instruction: Instruction, operand: Operand, scratch: int) -> int:
    """The slot of two halves, made ahead where an instruction takes one of them twice or changes signs."""
    if not isinstance(operand, Register):
        return code.source(operand)
    how = _HALVES.get(operand.suffixes)
    if how is None or operand.inverted:
        raise code.refuse()
    how |= _NEGATED * operand.negated | _ABSOLUTE * operand.absolute
    if not how:
        return code.source(operand)
    lane_op(code, instruction, "half_operand", [code.scratch(scratch)], [_bare(operand)], how)
    return code.scratch(scratch)


def _hfma2(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "MMA", "BF16_V2")
    result, *sources = instruction.operands
    if len(sources) == 4:  # the last two are the halves of a number: the high one first
        high, low = sources[2:]
        if not isinstance(high, Float) or not isinstance(low, Float) or {high.width, low.width} != {16}:
            raise code.refuse()
        last = code.constant(high.bits << 16 | low.bits)
        slots = [_half_operand(code, instruction, operand, i) for i, operand in enumerate(sources[:2])]
        slots.append(last)
    else:
        slots = [_half_operand(code, instruction, operand, i) for i, operand in enumerate(sources)]
    kind = "bf16" if "BF16_V2" in modifiers else "f16"
    lane_op(code, instruction, f"hfma_{kind}", [result], slots)


def _hmnmx2(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "BF16_V2")
    result, *sources, which = instruction.operands
    name = f"h{least(code, which)}_{'bf16' if 'BF16_V2' in modifiers else 'f16'}"
    slots = [_half_operand(code, instruction, operand, i) for i, operand in enumerate(sources)]
    if len(slots) == 3:
        lane_op(code, instruction, name, [code.scratch(3)], slots[:2])
        slots = [code.scratch(3), slots[2]]
    lane_op(code, instruction, name, [result], slots)


NUMBERS = {
    "F2FP": _f2fp, "I2F": _i2f, "I2FP": _i2f, "F2I": _f2i, "HADD2": _hadd2, "HFMA2": _hfma2, "HMNMX2": _hmnmx2,
    "VHMNMX": _hmnmx2,
}  # fmt: skip
