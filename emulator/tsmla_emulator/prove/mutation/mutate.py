"""Proves the checks: a kernel with one wrong instruction among those that synchronise, place or mask must be caught.

>>> subject = Subject.of_files("mine", Path("k.ptx"), [Path("k.npz")])   # as `emulated(..., record_to=...)` left them
>>> subject.require_clean()
>>> [site.label for site in subject.sites if subject.try_out(site).survived]

A mutant is the encoded kernel with one instruction replaced. It runs under schedules that become ever harsher until
something is wrong: a fault, changed guard zones, or results that are not those of the unchanged kernel. These are the
same bytes under every schedule, and the caller has compared them with a reference.

`mutation_hunt` tries every mutant of a kernel, on as many processes as there are cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...run import machine
from ...run.core.binding import program_of
from ...run.host.memory import GuardError
from ...run.machine import EmulationError, Module, Options
from ...run.ptx.model import Entry
from ...run.ptx.program import Program
from ...run.record import Record
from .actions import MOVES, changed
from .sites import MASKS, Site, sites

Schedule = tuple[str, Options]


class NotClean(RuntimeError):
    """The unchanged kernel fails a check, so nothing can be said about mutants; the text holds what failed."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a mutant.

    kind: which check caught it ("values", "guard" or a kind of EmulationError); "" for a survivor.
    schedule, message: under which schedule, and in which words; "" for a survivor.
    cover: the label of another survivor, or of several, whose change beside this one's is caught: one makes up for the
        other.
    """

    site: Site
    executed: bool
    kind: str = ""
    schedule: str = ""
    message: str = ""
    cover: str = ""

    @property
    def survived(self) -> bool:
        return self.executed and not self.kind


@dataclasses.dataclass(frozen=True)
class Run:
    """One call, by number, with some instructions changed, under a schedule."""

    changes: tuple[Site, ...]
    call: int
    schedule: str
    options: Options


class Judge(Protocol):
    """Answers what a check says of a run, kind and message, or None when it passes: the subject, or somebody for it."""

    def expect(self, runs: Sequence[Run]) -> None:
        """Announce runs that will be asked for, in this order, unless one is caught."""

    def wrong(self, run: Run) -> tuple[str, str] | None: ...


@dataclasses.dataclass(frozen=True)
class Findings:
    """What became of every mutant of a kernel.

    lenient: options that the unchanged kernel needs because it relies on more than PTX promises, "" for none:
    `Options.lenient_tensor`, `lockstep` or both. Its mutants are then judged with these.
    """

    results: list[Result]
    lenient: str = ""


def schedules(warps: int) -> Iterator[tuple[str, Options]]:
    """Yield ways to run a kernel of so many warps, the quickest first; all but the first two look for races."""
    yield "eager", Options()
    yield "late", Options(async_mode="late")
    race = Options(async_mode="late", happens_before=True, findings=1)
    yield "late", race
    yield "eager", dataclasses.replace(race, async_mode="eager")
    for seed in (1, 2, 3, 4):
        yield f"random, seed {seed}", dataclasses.replace(race, async_mode="random", seed=seed, quantum=0)
    yield "late, warps run far ahead", dataclasses.replace(race, quantum=20000)
    yield "late, highest lane elected", dataclasses.replace(race, elect_highest=True)
    roles = [tuple(range(first, min(first + 4, warps))) for first in range(0, warps, 4)]
    for role in roles:
        named = " ".join(map(str, role))
        yield f"late, warps {named} starved", dataclasses.replace(race, starve=role)
        ahead = dataclasses.replace(race, starve=role, async_mode="eager", quantum=20000)
        yield f"eager, warps {named} starved, others run far ahead", ahead
        yield f"eager, warps {named} starved and interrupted", dataclasses.replace(ahead, quantum=0)
    for warp in range(warps):
        yield f"late, warp {warp} starved", dataclasses.replace(race, starve=(warp,))
        # Late, whatever is asynchronous waits for the starved warp, too: others never get far ahead of it. It is
        # interrupted behind every instruction, so that others come as far as they can before each.
        interrupted = dataclasses.replace(race, starve=(warp,), async_mode="eager", quantum=1)
        yield f"eager, warp {warp} starved and interrupted", interrupted


class Subject:
    """A kernel with recorded calls of it, the smallest first; each shows what the others may not reach.

    of_masks: calls for mutants of masks, which are tried under one schedule only: a mask decides values, not who waits
    for whom.
    """

    def __init__(self, name: str, module: Module, records: Sequence[Record], of_masks: Sequence[Record] = ()):
        self.name = name
        self.module = module
        launches = [launch for record in (*records, *of_masks) for launch in record.launches]
        of_launches = sites(module, {launch.entry for launch in launches})
        self.sites = [site for site in of_launches if changed(self._program(site), site.position, site.action)]
        warps = max(-(-launch.block[0] * launch.block[1] * launch.block[2] // 32) for launch in launches)
        self.schedules = list(schedules(warps))
        self.lenient = ""
        self.judge: Judge | None = None
        self._records = records
        self._calls = [_Call.of(module, record) for record in (*records, *of_masks)]
        self._last: tuple[tuple[Site, ...], Module] = ((), module)

    @classmethod
    def of_files(cls, name: str, ptx: Path, records: Sequence[Path], of_masks: Sequence[Path] = ()) -> Subject:
        """Read a subject from files. Raises PtxError, RecordError, and EmulationError when the unchanged kernel fails
        at once."""
        module = machine.parse(ptx.read_text("utf-8"))
        return cls(name, module, [Record(path) for path in records], [Record(path) for path in of_masks])

    def require_clean(self) -> None:
        """Check that the unchanged kernel passes every schedule with the same results. Raises NotClean.

        One that fails for want of a tcgen05 fence or wait, or of a synchronisation of lanes, may pass leniently, see
        `Findings`.
        """
        kind, name, message = self.caught([])
        for _ in range(2):
            if kind != "race":
                break
            finding = message.splitlines()[0]
            option: dict[str, Any] = {"lenient_tensor" if "tcgen05." in finding else "lockstep": True}
            self.lenient = f"{self.lenient}; {finding}" if self.lenient else finding
            self.schedules = [(name, dataclasses.replace(o, **option)) for name, o in self.schedules]
            kind, name, message = self.caught([])
        if kind:
            raise NotClean(f"{self.name} itself fails, schedule {name}: {kind}: {message}")

    def try_out(self, site: Site, schedules: Sequence[Schedule] | None = None) -> Result:
        """Run the mutant until a check catches it, under all schedules or some."""
        executed = bool(self._calls_for([site]))
        return Result(site, executed, *(self.caught([site], schedules) if executed else ()))

    def caught(self, changes: Sequence[Site], schedules: Sequence[Schedule] | None = None) -> tuple[str, str, str]:
        """Return kind, schedule and message of what catches the kernel with all these changes; empty when nothing does.
        schedules: by default all."""
        runs = self._runs(changes, schedules)
        judge = self.judge or self
        judge.expect(runs)
        for run in runs:
            if wrong := judge.wrong(run):
                return wrong[0], run.schedule, wrong[1]
        return "", "", ""

    def announce(self, changes: Sequence[Site], schedules: Sequence[Schedule]) -> None:
        """Announce that `caught` will be asked for this under one schedule after the other."""
        if self.judge:
            self.judge.expect([run for schedule in schedules for run in self._runs(changes, [schedule])])

    def expect(self, runs: Sequence[Run]) -> None:
        """Do nothing: every run is done when it is asked for."""

    def wrong(self, run: Run) -> tuple[str, str] | None:
        """Run it here and now, and return what a check says."""
        if run.changes != self._last[0]:
            self._last = run.changes, self._mutant(run.changes)
        return self._calls[run.call].wrong(self._last[1], run.options)

    def _mutant(self, changes: Sequence[Site]) -> Module:
        mutant = self.module
        for site in sorted(changes, key=lambda site: site.action in MOVES):  # a move changes where others are
            entry = mutant.entries[site.entry]
            program = program_of(mutant, entry)
            mutant = _with_program(mutant, entry, changed(program, site.position, site.action) or program)
        return mutant

    def _runs(self, changes: Sequence[Site], schedules: Sequence[Schedule] | None) -> list[Run]:
        if changes and all(site.family == MASKS for site in changes):
            schedules = self.schedules[:1]
        elif schedules is None:
            schedules = self.schedules
        if changes and all(site.orders_only for site in changes):
            schedules = [(name, options) for name, options in schedules if options.happens_before]
        return [Run(tuple(changes), call, *schedule) for call in self._calls_for(changes) for schedule in schedules]

    def _calls_for(self, changes: Sequence[Site]) -> list[int]:
        """Return the numbers of calls that get to one of the changes, which in others change nothing; all for the
        unchanged kernel."""
        first, *others = range(len(self._records))
        of_masks = any(site.family == MASKS for site in changes)
        calls = [first, *range(len(self._records), len(self._calls)), *others] if of_masks else [first, *others]
        return [call for call in calls if not changes or any(self._calls[call].reaches(site) for site in changes)]

    def _program(self, site: Site) -> Program:
        return program_of(self.module, self.module.entries[site.entry])


@dataclasses.dataclass(frozen=True)
class _Call:
    """A recorded call of the unchanged kernel.

    expected: what it writes.
    limit: how many instructions a mutant may take.
    reached: entry and position of the instructions that it executes with any lane.
    """

    record: Record
    expected: dict[str, np.ndarray]
    limit: int
    reached: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, module: Module, record: Record) -> _Call:
        report, expected = record.run(module, Options(count=True))
        late, _ = record.run(module, Options(async_mode="late", count=True))
        reached = frozenset((entry, position) for entry, _, position in report.lanes.keys() | late.lanes.keys())
        return cls(record, expected, 4 * report.warp_instructions + 1_000_000, reached)

    def reaches(self, site: Site) -> bool:
        return (site.entry, site.position) in self.reached

    def wrong(self, module: Module, options: Options) -> tuple[str, str] | None:
        """Return kind and message of what a check says of a changed kernel; None when all pass."""
        try:
            _, results = self.record.run(module, dataclasses.replace(options, limit=self.limit))
        except EmulationError as error:
            return error.kind, str(error)
        except GuardError as error:
            return "guard", str(error)
        for name, expected in self.expected.items():
            if different := int((results[name] != expected).sum()):
                return "values", f"{different} of {expected.size} bytes of {name} differ"
        return None


def _with_program(module: Module, entry: Entry, program: Program) -> Module:
    changed = dataclasses.replace(module)
    changed.programs.update(module.programs)
    changed.programs[entry.name] = program
    return changed
