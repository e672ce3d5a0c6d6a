"""Lowers what each lane does for itself, and its twins of the uniform path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ptx.simple_ops import number_of
from ..ptx.encoding import first_sass_number
from .code import ALL_LANES, NONE, Code
from .lane_ops import LANE_OPS, lane_number
from .model import ALWAYS, ZERO, Instruction, Integer, Operand, Predicate, Predicates, Register

ALWAYS_TRUE, NEVER = Predicate(ALWAYS), Predicate(ALWAYS, negated=True)
_ZERO = Register(ZERO)
_RELATIONS = {"F": 0, "LT": 1, "EQ": 2, "LE": 3, "GT": 4, "NE": 5, "GE": 6, "T": 7}
_UNORDERED = 8


def lanes_of(instruction: Instruction) -> int:
    """Return ALL_LANES for instructions of the uniform path, whose results all lanes of a warp share."""
    return ALL_LANES if instruction.opcode.startswith("U") else 0


def lane_op(
    code: Code,
    instruction: Instruction,
    name: str,
    results: Sequence[Operand | int],
    sources: Sequence[Operand | int],
    imm: int = 0,
    always: bool = False,
) -> None:
    """Add an operation of `lane_ops`. Operands that are numbers are slots. always: whatever the guard says."""
    op = LANE_OPS[name]
    if len(sources) != len(op.sources):
        raise code.refuse()
    flags, read = 0, []
    for i, (kind, operand) in enumerate(zip(op.sources, sources, strict=True)):
        if isinstance(operand, int):
            slot, sign = operand, 0
        elif kind == "pred":
            slot, inverted = code.predicate(operand)
            flags |= inverted << 8 + i
            sign = 0
        elif kind == "u64":
            slot, sign = code.source(operand, 2), 0
        else:
            slot, sign = code.numeric(operand)
            if sign and (kind not in ("i32", "c32", "f32", "b32") or i > 3):
                raise code.refuse()
            if sign == 3 and kind in ("i32", "c32"):
                raise code.refuse()
        flags |= sign << 2 * i if kind != "pred" else 0
        read.append(slot)
    written = [r if isinstance(r, int) else code.result(r) for r in results]
    written += (len(op.results) - len(written)) * [NONE]
    names = dict(zip("abce", read, strict=False))
    code.emit(
        first_sass_number() + lane_number(name),
        lanes=lanes_of(instruction),
        d=written[0],
        items=(*written[1:], *read[4:]),
        flags=flags,
        imm=imm,
        guard=NONE if always else None,
        **names,
    )


def simple(code: Code, instruction: Instruction, name: str, result: Operand, *sources: Operand, width: int = 1) -> None:
    """Add an operation that PTX has, too."""
    names = {key: code.source(operand, width) for key, operand in zip("abce", sources, strict=False)}
    code.emit(number_of(name), lanes=lanes_of(instruction), d=code.result(result), **names)


def only(code: Code, instruction: Instruction, *known: str) -> set[str]:
    """Return the modifiers. Raises UnknownInstruction for one that is not among those known."""
    given = set(instruction.modifiers)
    if given - set(known):
        raise code.refuse(f"modifier {', '.join(sorted(given - set(known)))}")
    return given


def number(code: Code, operand: Operand) -> int:
    """Return a constant of the instruction."""
    if not isinstance(operand, Integer):
        raise code.refuse()
    return operand.value


def split(instruction: Instruction) -> tuple[list[Predicate], list[Operand]]:
    """Return the predicates between the result and the first other operand, and the other operands but the result."""
    rest = list(instruction.operands[1:])
    outputs = []
    while rest and isinstance(rest[0], Predicate):
        outputs.append(rest.pop(0))
    return outputs, rest


def _is_true(operand: Operand) -> bool:
    return isinstance(operand, Predicate) and operand.number == ALWAYS and not operand.negated


def _is_false(operand: Operand) -> bool:
    return isinstance(operand, Predicate) and operand.number == ALWAYS and operand.negated


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
    carries = rest[3:] or [NEVER, NEVER]
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
        if minus:
            rest[2] = Register(rest[2].number, rest[2].uniform)
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


def plain(operand: Operand) -> Operand:
    return Register(operand.number, operand.uniform) if isinstance(operand, Register) else operand


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
    if ("X" in modifiers and "HI" not in modifiers) or (carries and not name.startswith(("lea_carry", "lea_hi_carries"))):
        raise code.refuse()
    lane_op(code, instruction, name, result if carries else result[:1], [*rest, *carried], shift)


def _lop3(code: Code, instruction: Instruction) -> None:
    only(code, instruction, "LUT")
    operands = list(instruction.operands)
    tested = [operands.pop(0)] if isinstance(operands[0], Predicate) else []
    result, a, b, c, table, also = operands
    if not _is_false(also):
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


def _fsel(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, *sources = instruction.operands
    lane_op(code, instruction, "fsel", [result], sources)


def least(code: Code, operand: Operand) -> str:
    """Whether an instruction takes the least or the largest: a predicate that is constant."""
    if _is_true(operand):
        return "min"
    if _is_false(operand):
        return "max"
    raise code.refuse("which of the two depends on a predicate")


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


def _iset(code: Code, instruction: Instruction) -> None:
    relation, *rest = instruction.modifiers
    kind = "u32" if "U32" in rest else "s32"
    combined = [part for part in rest if part not in ("U32", "EX")]
    if relation not in _RELATIONS or len(combined) != 1 or combined[0] not in ("AND", "OR", "XOR"):
        raise code.refuse()
    first, second, a, b, *predicates = instruction.operands
    combination = combined[0].lower()
    plain = combination == "and" and _is_true(predicates[0]) or combination == "or" and _is_false(predicates[0])
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
    "SEL": _sel, "USEL": _sel, "FSEL": _fsel, "VIMNMX": _vimnmx, "VIMNMX3": _vimnmx, "VIADDMNMX": _vimnmx,
    "ISETP": _iset, "UISETP": _iset, "FSETP": _fset, "PLOP3": _plop3, "UPLOP3": _plop3,
    "P2R": _p2r, "UP2UR": _p2r, "R2P": _r2p,
    "FADD": _float("fadd"), "FMUL": _float("fmul"), "FFMA": _float("ffma"), "FMNMX": _fmnmx, "FMNMX3": _fmnmx,
    "MUFU": _mufu, "FCHK": _fchk, "POPC": _one("popc.b32"), "UPOPC": _one("popc.b32"), "IABS": _one("abs.s32"),
    "UFLO": _leading,
}  # fmt: skip
