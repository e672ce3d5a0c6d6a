"""Finds registers that machine code reads or overwrites before it may: before a scoreboard was awaited, or too soon.

    python -m tsmla_emulator.prove.dataflow.hazards LIBRARY... [--known FILE]

Results of loads, of special functions and the like come when they come: the instruction frees a scoreboard, and others
await it. Stores and the like free one when they have read their operands. Some instructions free none: those of one
unit go through it in their order, and so a later one's scoreboard says that they have ended, too. What is found holds
on some way through the code, whether or not the kernel takes it.

Registers of Hopper's products of matrices, which free no scoreboard: `multiplied`. Other results are there after a
fixed time, which stall counts keep to: `latencies`. `--known` writes the fewest clocks that these libraries leave as
what is known, and goes on from what the file says, where it exists.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import operator
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...run.sass.code import text_of
from ...run.sass.decode import decoded
from ...run.sass.image import kernels
from ...run.sass.model import ALWAYS_DONE, Instruction
from ...run.sass.uses import Uses, uses_of
from .flow import PREDICATES, UNIFORM, awaited, guard_number, successors
from .latencies import Seen, Spacing, known_latencies, lowered, read, seen, too_soon, written
from .multiplied import multiplied

_SCOREBOARDS = 6
"""Bits above stand for units: a result that no scoreboard says anything of yet, or operands that it reads."""
_SHARED_UNIT = {"I2F": "MUFU", "F2I": "MUFU"}
"""Opcode -> another that goes through the same unit; others have theirs alone, for all that is known here."""
Pending = dict[int, frozenset[int]]
"""Slot -> what has to be awaited first: one bit of each of these masks of scoreboards. Above _OWN a mask has the bit of
the unit that is at work, and above _GUARDED the guard under which that holds, as `guard_number` gives it."""
_OWN, _GUARDED = 32, 64


@dataclasses.dataclass(frozen=True)
class Hazard:
    """An instruction that does not wait for what one before it does with a register.

    kind: "read" of a result that may not be there, "overwritten" result or operand.
    slot: the register. boards: scoreboards that it has to await; higher bits for a result without one.
    """

    instruction: Instruction
    kind: str
    slot: int
    boards: int

    def __str__(self) -> str:
        known = [f"SB{i}" for i in range(_SCOREBOARDS) if self.boards >> i & 1]
        boards = ", ".join(known + ["no scoreboard"] * (self.boards >> _SCOREBOARDS > 0))
        return f"{self.instruction.address:#x} {text_of(self.instruction)}: slot {self.slot} {self.kind}, {boards}"


State = tuple[Pending, Pending]
"""What is pending before an instruction: results, and operands that are still to be read."""


class Analysis:
    """What may be pending before each instruction of a kernel, whichever way leads there.

    timed: opcodes whose results come when they come; see `timed_by_scoreboards`.
    """

    def __init__(self, instructions: Sequence[Instruction], uses: Sequence[Uses], timed: Sequence[str]):
        self.instructions, self.uses, self.timed = instructions, uses, timed
        self._after = successors(instructions)
        self._before: dict[int, State] = {0: ({}, {})}
        self._spread([0], self._before, {})

    def hazards(self) -> list[Hazard]:
        """Return the hazards of the kernel."""
        return [hazard for at in sorted(self._before) for hazard in self._of(at, self._before[at], {})]

    def hazards_with(self, at: int, instead: Instruction) -> list[Hazard]:
        """Return the hazards of instructions that differ when one, with the same operands, takes another's place."""
        if at not in self._before:
            return []
        changed = {at: self._before[at]}
        self._spread([at], changed, {at: instead})
        return [hazard for place in sorted(changed) for hazard in self._of(place, changed[place], {at: instead})]

    def _of(self, at: int, state: State, instead: dict[int, Instruction]) -> Iterator[Hazard]:
        return _of(instead.get(at, self.instructions[at]), self.uses[at], state, self.timed)

    def _spread(self, waiting: list[int], states: dict[int, State], instead: dict[int, Instruction]) -> None:
        """Follow the code from some instructions on, as long as more is pending than was known before."""
        while waiting:
            at = waiting.pop()
            left = _behind(instead.get(at, self.instructions[at]), self.uses[at], states[at], self.timed)
            for target in self._after[at]:
                known = states.get(target) or self._before.get(target)
                if known is None:
                    states[target] = dict(left[0]), dict(left[1])
                    waiting.append(target)
                elif any(_adds(into, new) for into, new in zip(known, left, strict=True)):
                    states[target] = _joined(known[0], left[0]), _joined(known[1], left[1])
                    waiting.append(target)


def timed_by_scoreboards(code: Sequence[Sequence[Instruction]]) -> list[str]:
    """Return the opcodes that free a scoreboard with their result anywhere in these kernels."""
    return sorted({i.opcode for one in code for i in one if i.control.result is not None})


def _of(instruction: Instruction, used: Uses, state: State, timed: Sequence[str]) -> Iterator[Hazard]:
    results, operands = state
    boards = awaited(instruction)
    for kind, slots, states in (("read", used.read, [results]), ("overwritten", used.written, [results, operands])):
        for slot in sorted(slots):
            left = [mask for one in states for mask in one.get(slot, ()) if not mask & boards]
            if kind == "overwritten":  # by the same unit, which reads and writes in its order
                left = [mask for mask in left if not mask & _unit(instruction, timed) << _OWN]
            other = guard_number(instruction) ^ 1 if instruction.guard != ALWAYS_DONE else -1
            left = [mask & (1 << _OWN) - 1 for mask in left if mask >> _GUARDED != other]
            if left:
                yield Hazard(instruction, kind, slot, functools.reduce(operator.or_, left))


def _behind(instruction: Instruction, used: Uses, state: State, timed: Sequence[str]) -> State:
    control, boards = instruction.control, awaited(instruction)
    results, operands = ({slot: left for slot, masks in one.items() if (left := _left(masks, boards))} for one in state)
    mark = unknown = 0
    if instruction.opcode in timed:
        unknown = mark = _unit(instruction, timed)
        if control.result is not None:
            mark = 1 << control.result
            for one in (results, operands):
                for slot, masks in one.items():
                    if any(mask & unknown for mask in masks):
                        one[slot] = frozenset(mask | mark if mask & unknown else mask for mask in masks)
    for one in results, operands:
        _forget_guards(one, used.written & PREDICATES)
    said = guard_number(instruction) << _GUARDED | _unit(instruction, timed) << _OWN
    for slot in used.written:
        if instruction.guard == ALWAYS_DONE:
            results.pop(slot, None)
        if mark:
            results[slot] = results.get(slot, frozenset()) | {mark | said}
    if control.operands is not None:
        for slot in used.read - PREDICATES:
            if slot not in UNIFORM or instruction.opcode.startswith("U"):
                freed = 1 << control.operands
                operands[slot] = operands.get(slot, frozenset()) | {unknown | mark | freed | said}
    return results, operands


def _unit(instruction: Instruction, timed: Sequence[str]) -> int:
    """Return the bit of an instruction's unit, 0 if its results come after a fixed time."""
    opcode = _SHARED_UNIT.get(instruction.opcode, instruction.opcode)
    return 1 << _SCOREBOARDS + timed.index(opcode) if instruction.opcode in timed else 0


def _forget_guards(pending: Pending, written: frozenset[int]) -> None:
    """Take what depends on a predicate that changes for what always holds."""
    for slot, masks in pending.items() if written else ():
        if any(mask >> _GUARDED + 1 in written for mask in masks):
            pending[slot] = frozenset(
                mask & (1 << _GUARDED) - 1 if mask >> _GUARDED + 1 in written else mask for mask in masks
            )


def _left(masks: frozenset[int], boards: int) -> frozenset[int]:
    return frozenset(mask for mask in masks if not mask & boards)


def _adds(into: Pending, new: Pending) -> bool:
    return any(masks - into.get(slot, frozenset()) for slot, masks in new.items())


def _joined(one: Pending, other: Pending) -> Pending:
    return one | {slot: masks | one.get(slot, frozenset()) for slot, masks in other.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--known", type=Path, help="add the fewest clocks between instructions of these libraries")
    given = parser.parse_args()
    different = {(x.architecture, x.code): (library.name, x) for library in given.libraries for x in kernels(library)}
    found = [(name, kernel, decoded(kernel.code, kernel.architecture)) for name, kernel in different.values()]
    timed = timed_by_scoreboards([code for _, _, code in found])
    every: dict[str, Seen] = collections.defaultdict(collections.Counter)
    count = 0
    for library, kernel, code in found:
        uses = uses_of(kernel.architecture, code)
        between = Spacing(code, uses).distances()
        soon = []
        if given.known:
            every[kernel.architecture] += seen(between)
        else:
            soon = too_soon(between, known_latencies(kernel.architecture))
        for problem in (*Analysis(code, uses, timed).hazards(), *multiplied(code, uses), *soon):
            count += 1
            print(f"{library} {kernel.entry}: {problem}")
    if given.known:
        known = read(given.known) if given.known.exists() else {}
        known |= {architecture: lowered(known.get(architecture, {}), one) for architecture, one in every.items()}
        given.known.write_text(written(known), "utf-8")
    print(f"{count} hazards in {len(found)} kernels; those with the same code count as one")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
