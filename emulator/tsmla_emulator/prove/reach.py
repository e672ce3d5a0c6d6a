"""Tells which instructions of a variant's kernels no call of `check` executes: no mutant of these is ever tried.

Instructions are named as mutants are, by the function of the kernel's sources and what that calls there. Those of
machine code have the names of the PTX that they were made of.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Collection
from pathlib import Path

from tsmla.identity.variant import Variant

from ..run.emulate import Call
from ..run.machine import EmulationError, Module, Options
from ..run.ptx.calls import place_of
from ..run.ptx.model import Entry
from ..run.sass.program import MachineProgram, with_sources
from . import check
from .dataflow.flow import successors

REASONS = Path(__file__).parents[2] / "docs" / "reach-reasons.json"
_JUMPS = ("bra", "brx", "ret", "exit")


@dataclasses.dataclass(frozen=True)
class Unreached:
    """Instructions of one place that no lane executes.

    kernel: the entry. place: the function and what it calls; of instructions that the compiler gives none, that of the
    next one which runs with them, or else of the one before. line: of the first in the PTX text, or its address. count:
    how many they are. whole: whether they are all of the place.
    """

    kernel: str
    place: str
    line: int
    count: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why no call reaches some places.

    places: a pattern of their names. whole: whether it also holds where nothing of a place is reached. machine_code:
    whether it holds for what ptxas made alone.
    """

    places: str
    reason: str
    whole: bool = False
    machine_code: bool = False

    def holds(self, one: Unreached) -> bool:
        return (self.whole or not one.whole) and re.fullmatch(self.places, one.place) is not None


def reach(variant: Variant, machine_code: bool = False) -> tuple[list[Unreached], int]:
    """Return what no call of `check` executes of a variant's kernels, and how many instructions these have.

    Calls are those at bounds; mutants are tried with longer ones, too. Their asynchronous work completes as late as it
    may, so that waits are in vain, too; then, in a few calls, at once. Raises EmulationError when results are wrong.

    machine_code: run what ptxas made, and return what is not executed of that.
    """
    options = Options(count=True, machine_code=machine_code)
    late = check.check(variant, dataclasses.replace(options, async_mode="late"), all_ways=True, at_bounds=True)
    eager = check.check(variant, options)
    for verdict in (late, eager):
        if verdict.error:
            raise EmulationError(f"{variant.symbol()}: {verdict.error}")
    return unreached(late.calls[0].module, executed([*late.calls, *eager.calls]))


def executed(calls: Collection[Call]) -> frozenset[tuple[str, int]]:
    """Return entry and position of the instructions that some lane executed in these calls."""
    return frozenset((entry, at) for call in calls for entry, _, at in call.report.lanes)


def unreached(module: Module, reached: Collection[tuple[str, int]]) -> tuple[list[Unreached], int]:
    """Return what is not among the instructions that were reached, by place, and how many instructions there are.

    Machine code to which no way leads, such as what fills up its last line, is none.
    """
    found, count = [], 0
    for name, entry in module.entries.items():
        code = [[at] for at in range(len(entry.instructions))]
        if entry.machine_code:
            program = module.programs[name]
            assert isinstance(program, MachineProgram)
            entry, code = with_sources(program, module.text), _led_to(program)
        named = _places(entry)
        sizes = collections.Counter(named[at[0]] for at in code)
        places: dict[str, list[int]] = {}
        for at in code:
            if not any((name, one) in reached for one in at):
                places.setdefault(named[at[0]], []).append(entry.instructions[at[0]].line)
        count += len(code)
        found += [
            Unreached(name, place, left[0], len(left), len(left) == sizes[place]) for place, left in places.items()
        ]
    return found, count


def _led_to(program: MachineProgram) -> list[list[int]]:
    """Return, for each instruction of machine code that some way leads to, where its operations are. The detour that
    BRA.DIV asks for is no way: it is not taken here."""
    operations: dict[int, list[int]] = {}
    for at, one in enumerate(program.entry.instructions):
        operations.setdefault(one.line, []).append(at)
    after, known, waiting = successors(program.instructions), {0}, [0]
    while waiting:
        last = waiting.pop()
        new = {last + 1} if "DIV" in program.instructions[last].modifiers else {*after[last]}
        new -= known
        known.update(new)
        waiting += new
    return [operations[program.instructions[at].address] for at in sorted(known)]


def _places(entry: Entry) -> list[str]:
    """Return the place of each instruction."""
    said = [_place(entry, at) for at in range(len(entry.instructions))]
    starts, behind = {*entry.labels.values()}, ""
    for at, one in reversed([*enumerate(entry.instructions)]):
        behind = said[at] = said[at] or ("" if one.opcode.lower().startswith(_JUMPS) else behind)
        behind = "" if at in starts else behind
    before = "entry"
    for at, place in enumerate(said):
        before = said[at] = place or before
    return said


def _place(entry: Entry, at: int) -> str:
    """Return the place of an instruction that the compiler says; where it says no calls, the file alone."""
    source = entry.instructions[at].source
    if source is None or source.calls:
        return ": ".join(part for part in place_of(entry, at)[:2] if part)
    file = re.search(r"/tsmla_kernels/(\w+/.*)\.py$", source.file)
    return file[1] if file and source.line else ""


def reasons() -> list[Reason]:
    """Return what docs/reach-reasons.json says."""
    return [Reason(**one) for one in json.loads(REASONS.read_text("utf-8"))]


def told(variant: Variant, given: Collection[Reason], machine_code: bool = False) -> tuple[list[str], int]:
    """Return lines that say what no call reaches, without a reason first, and how many places have none."""
    found, count = reach(variant, machine_code)
    where = "at 0x{:x}" if machine_code else "PTX line {}"
    holding = [reason for reason in given if machine_code or not reason.machine_code]
    why = {one: next((reason.reason for reason in holding if reason.holds(one)), "") for one in found}
    lines = [f"{variant.symbol()}: {sum(one.count for one in found)} of {count} instructions are reached by no call"]
    for one in sorted(found, key=lambda one: bool(why[one])):
        part = "all" if one.whole else "some"
        said = f"{one.count} ({part}), {where.format(one.line)}: {why[one] or 'no reason is given'}"
        lines.append(f"    {one.place}: {said}")
    return lines, sum(not reason for reason in why.values())
