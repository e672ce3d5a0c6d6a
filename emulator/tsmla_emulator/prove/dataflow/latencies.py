"""Clocks that machine code leaves between two instructions, and those that ptxas is known to leave at least.

Results without a scoreboard are there after a fixed time, which stall counts keep to. How long that is nobody says.
latencies.json has the fewest clocks that ptxas leaves between an instruction and one that uses its result, in kernels
of each architecture; fewer are an error. `python -m tsmla_emulator.prove.dataflow.hazards --known FILE` writes such a
file, or lowers what is in it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...run.sass.code import text_of
from ...run.sass.model import ALWAYS_DONE, Instruction
from ...run.sass.uses import Uses
from .flow import PREDICATES, UNIFORM, awaited, guard_number, successors

HORIZON = 48
"""Clocks behind which no result is waited for any more: the longest known latency without a scoreboard is shorter."""
OFTEN, SHARE = 3, 4
"""How often ptxas has to leave the fewest clocks between two opcodes, and of how many such distances one has to be as
short, before they count as what the second needs: where it waits for a result, many are; others happen to be far
apart."""
LONGEST = 16
"""Clocks behind which every result that has no scoreboard is taken to be there. What is further apart in all kernels
seen is so for other reasons."""
LATENCIES = Path(__file__).with_name("latencies.json")
_NEXT, _SCOREBOARD = "next", "scoreboard"


@dataclasses.dataclass(frozen=True)
class Distance:
    """Clocks from one instruction to another, as stall counts make them, on the shortest way.

    kind: what the second does with a result of the first: it reads a "register", "predicate" or "uniform" register, or
        writes it "again"; or it awaits the "scoreboard" that the first frees; or it is the "next" one, whichever.
    """

    first: Instruction
    second: Instruction
    kind: str
    clocks: int

    @property
    def of_second(self) -> str:
        """What latencies are known for: the opcode of the second instruction, if it matters."""
        return "any" if self.kind in (_NEXT, _SCOREBOARD) else self.second.opcode

    def __str__(self) -> str:
        what = f"{self.clocks} clocks behind {text_of(self.first)} ({self.kind})"
        return f"{self.second.address:#x} {text_of(self.second)}: {what}"


Known = dict[str, dict[str, int]]
"""Name of the first instruction, with the kind -> opcode of the second, or "any" -> the fewest clocks between them.
"any" holds for opcodes that are not named."""

_Place = tuple[int, int, int]
"""Slot, or a scoreboard below 0; position of the instruction that writes it; its guard, as `guard_number` gives it."""
_Since = dict[_Place, int]
"""The fewest clocks since each of these instructions."""


class Spacing:
    """The fewest clocks since each instruction's results, before every instruction of a kernel."""

    def __init__(self, instructions: Sequence[Instruction], uses: Sequence[Uses]):
        self.instructions, self.uses = instructions, uses
        self._after = successors(instructions)
        self._before: dict[int, _Since] = {0: {}}
        waiting = [0]
        while waiting:
            at = waiting.pop()
            left = self._behind(at, self._before[at], instructions[at].control.stall)
            waiting += [target for target in self._after[at] if _shortens(self._before, target, left)]

    def distances(self) -> Iterator[Distance]:
        """Yield the distances of the kernel."""
        for at in sorted(self._before):
            yield from self._of(at, self._before[at])
            yield self._next(at, self.instructions[at].control.stall)

    def with_stall(self, at: int, stall: int) -> Iterator[Distance]:
        """Yield the distances that have an instruction in between, or as their first, when it stalls so long."""
        if at not in self._before:
            return
        yield self._next(at, stall)
        states: dict[int, _Since] = {}
        waiting = [(at, self._behind(at, self._before[at], stall))]
        places = waiting[0][1].keys()
        while waiting:
            at, left = waiting.pop()
            for target in self._after[at]:
                if _shortens(states, target, left):
                    yield from self._of(target, left)
                    behind = self._behind(target, left, self.instructions[target].control.stall)
                    waiting.append((target, {place: since for place, since in behind.items() if place in places}))

    def _next(self, at: int, stall: int) -> Distance:
        return Distance(self.instructions[at], self.instructions[at], _NEXT, stall)

    def _of(self, at: int, since: _Since) -> Iterator[Distance]:
        instruction, used = self.instructions[at], self.uses[at]
        guard = guard_number(instruction)
        boards = awaited(instruction)
        for (slot, writer, other), clocks in since.items():
            kind = ""
            if slot < 0:
                kind = _SCOREBOARD if boards >> -1 - slot & 1 else ""
            elif guard and other == guard ^ 1:
                continue
            elif slot in used.read:
                kind = "predicate" if slot in PREDICATES else "uniform" if slot in UNIFORM else "register"
            elif slot in used.written:
                kind = "again"
            if kind:
                yield Distance(self.instructions[writer], instruction, kind, clocks)

    def _behind(self, at: int, since: _Since, stall: int) -> _Since:
        instruction, written = self.instructions[at], self.uses[at].written
        guard, passes = guard_number(instruction), max(1, stall)
        changed = written & PREDICATES
        found: _Since = {}
        for (slot, writer, other), clocks in since.items():
            over = slot in written and (instruction.guard == ALWAYS_DONE or other == guard)
            if not over and clocks + passes <= HORIZON:
                place = slot, writer, 0 if other >> 1 in changed else other
                found[place] = min(clocks + passes, found.get(place, HORIZON))
        control = instruction.control
        boards = [-1 - board for board in (control.result, control.operands) if board is not None]
        found.update({(slot, at, guard): passes for slot in (written if control.result is None else ())})
        found.update({(board, at, 0): passes for board in boards})
        return found


def _shortens(states: dict[int, _Since], at: int, since: _Since) -> bool:
    """Note what is known before an instruction, and return whether anything is nearer than was known."""
    if at not in states:
        states[at] = dict(since)
        return True
    known = states[at]
    nearer = {place: clocks for place, clocks in since.items() if clocks < known.get(place, HORIZON + 1)}
    known.update(nearer)
    return bool(nearer)


Seen = collections.Counter[tuple[str, str, int]]
"""First instruction with kind, `Distance.of_second`, and clocks -> how often."""


def seen(found: Iterable[Distance]) -> Seen:
    """Return how often each distance occurs."""
    return collections.Counter((f"{x.first.name} {x.kind}", x.of_second, x.clocks) for x in found)


def known_of(found: Seen) -> Known:
    """Return the latencies that these distances show."""
    known: Known = {}
    counts: dict[tuple[str, str], dict[int, int]] = collections.defaultdict(dict)
    for (first, second, clocks), count in found.items():
        counts[first, second][clocks] = count
    for (first, second), of_clocks in sorted(counts.items()):
        fewest = min(of_clocks)
        of_first = known.setdefault(first, {"any": LONGEST})
        of_first["any"] = min(fewest, of_first["any"])
        often = max(OFTEN, sum(of_clocks.values()) / SHARE)
        if second != "any" and of_clocks[fewest] >= often and fewest <= LONGEST:
            of_first[second] = fewest
    return _of_use(known)


def lowered(known: Known, found: Seen) -> Known:
    """Return what is known, lowered to the distances that are shorter, with what they show of other instructions. What
    was known to take one clock is not kept, and so is as if unknown."""
    result = known_of(found) | {first: dict(of_first) for first, of_first in known.items()}
    for first, second, clocks in found:
        of_first = result.get(first, {})
        for name in of_first.keys() & {second, "any"} if first in known else ():
            of_first[name] = min(clocks, of_first[name])
    return _of_use(result)


def _of_use(known: Known) -> Known:
    """Return what is known without what says nothing: no more than of any, or than one clock."""
    return {
        first: {second: clocks for second, clocks in of_first.items() if second == "any" or clocks > of_first["any"]}
        for first, of_first in known.items()
        if max(of_first.values()) > 1
    }


@functools.cache
def known_latencies(architecture: str, file: Path = LATENCIES) -> Known:
    """Return what a file says of an architecture."""
    return read(file)[architecture]


def read(file: Path) -> dict[str, Known]:
    """Return what a file says of each architecture."""
    return json.loads(file.read_text("utf-8"))


def written(known: dict[str, Known]) -> str:
    """Return the text of a file for `known_latencies`, a line for each first instruction."""
    parts = []
    for architecture, of_one in sorted(known.items()):
        lines = ",\n".join(
            f"  {json.dumps(first)}: {json.dumps(of_one[first], sort_keys=True)}" for first in sorted(of_one)
        )
        parts.append(f" {json.dumps(architecture)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def too_soon(found: Iterable[Distance], known: Known) -> list[Distance]:
    """Return the distances that are shorter than any known one."""
    listed = []
    for one in found:
        of_first = known.get(f"{one.first.name} {one.kind}", {})
        if one.clocks < of_first.get(one.of_second, of_first.get("any", 0)):
            listed.append(one)
    return listed
