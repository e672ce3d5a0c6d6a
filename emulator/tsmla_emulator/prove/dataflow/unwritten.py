"""Finds registers that machine code may read although nothing wrote them, on some way through it."""

from __future__ import annotations

from collections.abc import Sequence

from ...run.sass.model import Instruction
from ...run.sass.uses import Uses
from .flow import PREDICATES, guard_number, successors

_Unwritten = tuple[int, int]
"""A slot, and the guard under which nothing has written it, 0 for any."""


def unwritten(instructions: Sequence[Instruction], uses: Sequence[Uses]) -> set[tuple[int, int]]:
    """Return position and slot of each read that may come before any write.

    What is written and read under one guard counts as written. That two guards never hold together is not known, and
    what calls leave goes behind every call: kernels that are right have some such reads.
    """
    after = successors(instructions)
    before: dict[int, set[_Unwritten]] = {0: {(slot, 0) for used in uses for slot in used.read}}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        left = _left(instructions[at], uses[at], before[at])
        for target in after[at]:
            known = before.get(target)
            if known is None:
                before[target] = set(left)
            elif left <= known:
                continue
            else:
                known |= left
            waiting.append(target)
    found = set()
    for at, slots in before.items():
        guard = guard_number(instructions[at])
        read = uses[at].read
        found |= {(at, slot) for slot, other in slots if slot in read and not (guard and other == guard ^ 1)}
    return found


def _left(instruction: Instruction, used: Uses, before: set[_Unwritten]) -> set[_Unwritten]:
    guard, changed = guard_number(instruction), used.written & PREDICATES
    left = set()
    for slot, other in before:
        if slot in used.written:
            if not guard or other == guard:
                continue
            other = other or guard ^ 1
        left.add((slot, 0 if other >> 1 in changed else other))
    return left
