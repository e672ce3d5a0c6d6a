"""Which instructions of machine code may follow each other, and what guards and waits mean for what is between them."""

from __future__ import annotations

from collections.abc import Sequence

from ...run.sass.code import predicate_slot, register_slot
from ...run.sass.model import ALWAYS_DONE, BYTES, Instruction, Integer, Predicate, Register, Scoreboard, Target

_ENDS = {"EXIT", "BRX", "RET", "BRA", "CALL"}
_LEADS_AWAY = _ENDS | {"BSYNC", "WARPSYNC"}
PREDICATES = frozenset(predicate_slot(Predicate(i, uniform)) for i in range(7) for uniform in (False, True))
"""Slots of predicates, which are read when an instruction is issued."""
UNIFORM = range(register_slot(Register(0, uniform=True)), min(PREDICATES))
"""Slots of uniform registers, which only bulk copies and the like, of the uniform path, read later."""


def successors(instructions: Sequence[Instruction]) -> list[list[int]]:
    """Return the positions that may follow each instruction. Returns go behind any call; a jump by a table (BRX) to any
    place that nothing else leads to."""
    calls = [i + 1 for i, one in enumerate(instructions) if one.opcode == "CALL"]
    targets = [[o.address // BYTES for o in one.operands if isinstance(o, Target)] for one in instructions]
    ends = [one.opcode in _ENDS and not _is_conditional(one) for one in instructions]
    named = {
        target for one, of_one in zip(instructions, targets, strict=True) if one.opcode != "BRX" for target in of_one
    }
    of_tables = [i + 1 for i, over in enumerate(ends[:-1]) if over and i + 1 not in named]
    found = []
    for position, one in enumerate(instructions):
        match one.opcode:
            case "BRA" | "CALL":
                after = targets[position]
            case "RET":
                after = calls
            case "BRX":
                after = of_tables
            case _:
                after = []
        if not ends[position]:
            after = [*after, position + 1]
        found.append([target for target in after if target < len(instructions)])
    return found


def _is_conditional(one: Instruction) -> bool:
    return one.guard != ALWAYS_DONE or one.opcode == "BRA" and len(one.operands) > 1


def passed(instructions: Sequence[Instruction], executed: frozenset[int]) -> frozenset[int]:
    """Return the positions that a warp comes by that executes some: with those whose guard holds in no lane."""
    targets = {o.address // BYTES for one in instructions for o in one.operands if isinstance(o, Target)}
    found = set(executed)
    for at in range(len(instructions) - 1):
        if at in found and instructions[at].opcode not in _LEADS_AWAY:
            found.add(at + 1)
    for at in reversed(range(1, len(instructions))):
        before = instructions[at - 1]
        if at in found and at not in targets and (before.opcode not in _ENDS or _is_conditional(before)):
            found.add(at - 1)
    return frozenset(found)


def guard_number(instruction: Instruction) -> int:
    """Return a number for a guard, 0 for none; of opposite guards they differ in bit 0."""
    guard = instruction.guard
    return 0 if guard == ALWAYS_DONE else predicate_slot(guard) << 1 | guard.negated


def awaited(instruction: Instruction) -> int:
    """Return the scoreboards that are free when an instruction is done, bit i for scoreboard i."""
    boards = instruction.control.awaits
    match instruction.operands:
        case (Scoreboard(kind="SB") as board, Integer(0)) if instruction.opcode == "DEPBAR":
            boards |= 1 << board.number
    return boards
