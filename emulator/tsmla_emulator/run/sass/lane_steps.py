"""What lowering of lane-wise instructions shares: how an operation is added, and what operands and modifiers may be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..ptx.encoding import first_sass_number
from ..ptx.simple_ops import number_of
from .code import ALL_LANES, NONE, Code
from .lane_ops import LANE_OPS, lane_number
from .model import ALWAYS, Instruction, Integer, Operand, Predicate, Register


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
    outputs = list(itertools.takewhile(lambda operand: isinstance(operand, Predicate), rest))
    return [p for p in outputs if isinstance(p, Predicate)], rest[len(outputs) :]


def plain(operand: Operand) -> Operand:
    return Register(operand.number, operand.uniform) if isinstance(operand, Register) else operand


def is_true(operand: Operand) -> bool:
    return isinstance(operand, Predicate) and operand.number == ALWAYS and not operand.negated


def is_false(operand: Operand) -> bool:
    return isinstance(operand, Predicate) and operand.number == ALWAYS and operand.negated


def least(code: Code, operand: Operand) -> str:
    """Whether an instruction takes the least or the largest: a predicate that is constant."""
    if is_true(operand):
        return "min"
    if is_false(operand):
        return "max"
    raise code.refuse("which of the two depends on a predicate")
