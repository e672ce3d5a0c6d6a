"""Lowers comparisons and what is done with predicates."""

from __future__ import annotations

from .code import NONE, Code
from .lane_steps import is_false, is_true, lane_op, number, only, plain, simple
from .model import Instruction, Predicate, Predicates, Register

_RELATIONS = {"F": 0, "LT": 1, "EQ": 2, "LE": 3, "GT": 4, "NE": 5, "GE": 6, "T": 7}
_UNORDERED = 8


def _iset(code: Code, instruction: Instruction) -> None:
    relation, *rest = instruction.modifiers
    kind = "u32" if "U32" in rest else "s32"
    combined = [part for part in rest if part not in ("U32", "EX")]
    if relation not in _RELATIONS or len(combined) != 1 or combined[0] not in ("AND", "OR", "XOR"):
        raise code.refuse()
    first, second, a, b, *predicates = instruction.operands
    combination = combined[0].lower()
    plain = combination == "and" and is_true(predicates[0]) or combination == "or" and is_false(predicates[0])
    if plain and code.result(second) == NONE and "EX" not in rest and relation not in ("F", "T"):
        simple(code, instruction, f"setp.{relation.lower()}.{kind}", first, a, b)
        return
    extended = "ex_" if "EX" in rest else ""
    lane_op(
        code, instruction, f"set_{extended}{kind}_{combination}", [first, second], [a, b, *predicates],
        _RELATIONS[relation],
    )  # fmt: skip


def _fset(code: Code, instruction: Instruction) -> None:
    relation, *rest = instruction.modifiers
    combined = [part for part in rest if part != "FTZ"]
    ordered, unordered = relation, 0
    if relation == "NAN":
        ordered, unordered = "F", _UNORDERED
    elif relation == "NUM":
        ordered = "T"
    elif relation.endswith("U"):
        ordered, unordered = relation[:-1], _UNORDERED
    if ordered not in _RELATIONS or len(combined) != 1 or combined[0] not in ("AND", "OR", "XOR"):
        raise code.refuse()
    first, second, *sources = instruction.operands
    name = f"set_f32{'_ftz' if 'FTZ' in rest else ''}_{combined[0].lower()}"
    lane_op(code, instruction, name, [first, second], sources, _RELATIONS[ordered] | unordered)


def _plop3(code: Code, instruction: Instruction) -> None:
    only(code, instruction, "LUT")
    first, second, a, b, c, table, table_of_second = instruction.operands
    lane_op(code, instruction, "lut_of_predicates", [first], [a, b, c], number(code, table))
    if code.result(second) != NONE:
        if first in (a, b, c):
            raise code.refuse()
        lane_op(code, instruction, "lut_of_predicates", [second], [a, b, c], number(code, table_of_second))


def _p2r(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, group, kept, mask = instruction.operands
    if not isinstance(group, Predicates):
        raise code.refuse()
    predicates = [Predicate(i, group.uniform) for i in range(7)]
    lane_op(code, instruction, "predicates_to_bits", [result], [kept, *predicates], number(code, mask))


def _r2p(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    group, source, mask = instruction.operands
    if not isinstance(group, Predicates) or not isinstance(source, Register):
        raise code.refuse()
    shift = {(): 0, ("B0",): 0, ("B1",): 8, ("B2",): 16, ("B3",): 24}.get(source.suffixes)
    if shift is None or number(code, mask) >> 7:
        raise code.refuse()
    for i in range(7):
        if number(code, mask) >> i & 1:
            lane_op(code, instruction, "read_bit", [Predicate(i, group.uniform)], [plain(source)], shift + i)


PREDICATES = {
    "ISETP": _iset, "UISETP": _iset, "FSETP": _fset, "PLOP3": _plop3, "UPLOP3": _plop3, "P2R": _p2r, "UP2UR": _p2r,
    "R2P": _r2p,
}  # fmt: skip
