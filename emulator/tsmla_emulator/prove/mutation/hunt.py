"""Tries out every mutant of a kernel on many processes. What they find is kept, so that a hunt goes on where it
stopped.

Each mutant is tried alone under the first few schedules only, and those that are left in groups under all
(`groups.py`): most of the time would go to what no schedule catches. For the same reason, mutants that are said
to survive are tried alone under the first two schedules only, which do not look for races.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .groups import FIRST, find_covers, settle
from .mutate import Findings, Result, Run, Schedule, Subject
from .sites import MASKS, Site

_FORK = multiprocessing.get_context("fork")
_FIRST_OF_EXPECTED = 2


class TimeIsUp(RuntimeError):
    """A hunt is to end before it is done."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """What hunts beside each other share: how many processes run at a time, and a time (`time.time`) from which none
    runs."""

    processes: int
    gate: Any
    until: float

    @classmethod
    def of(cls, processes: int = 1, seconds: float | None = None) -> Pace:
        until = float("inf") if seconds is None else time.time() + seconds
        return cls(processes, _FORK.BoundedSemaphore(processes), until)


class Kept:
    """What was found, by name: a line of JSON each, written as it comes. A file about something else is overwritten."""

    def __init__(self, path: Path | None = None, of: str = ""):
        self._found: dict[str, Any] = {}
        self._file = None
        if path is None:
            return
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole and whole[0] == of:
            self._found.update(whole[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        self._file = new.open("w", encoding="utf-8")
        for entry in (of, *self._found.items()):
            self._write(entry)
        new.replace(path)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __setitem__(self, name: str, found: Any) -> None:
        self._found[name] = found
        self._write((name, found))

    def _write(self, entry: Any) -> None:
        if self._file:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


def hunt(
    subject: Subject,
    pace: Pace | None = None,
    progress: Callable[[str], None] = print,
    survives: Callable[[Site], bool] = lambda site: False,
    kept: Kept | None = None,
) -> Findings:
    """Try out every mutant in `subject.sites`.

    survives: whether somebody has said that a mutant survives; that may be wrong. Raises NotClean, TimeIsUp, and what
    `Subject.of_files` does.
    """
    if not subject.sites:
        return Findings([])
    pace, kept = pace or Pace.of(), kept or Kept()
    count = len(subject.sites)
    round_of_runs = _FORK.Value("Q", 0)
    given = (subject, pace, round_of_runs)
    with concurrent.futures.ProcessPoolExecutor(pace.processes, _FORK, _inherit, given) as pool:
        subject.judge = others = _Others(subject, pool, round_of_runs, kept)
        try:
            subject.require_clean()
            how = f", leniently: {subject.lenient}" if subject.lenient else ""
            progress(f"{subject.name}: passes {len(subject.schedules)} schedules{how}; {count} mutants")
            results = {}
            for result in _alone(subject, pool, survives, kept):
                results[result.site] = result
                verdict = f"caught: {result.kind} ({result.schedule})" if result.kind else "passes"
                verdict = verdict if result.executed else "not executed"
                progress(f"[{len(results)}/{count}] {result.site.label}: {verdict}")
            for result in settle(subject, [site for site in subject.sites if results[site].survived]):
                results[result.site] = result
                verdict = f"caught: {result.kind} ({result.schedule})" if result.kind else "SURVIVED"
                progress(f"{subject.name}: {result.site.label}: {verdict}")
            left = [results[site] for site in subject.sites if results[site].survived]
            for result in find_covers(subject, left):
                results[result.site] = result
        finally:
            subject.judge = None
            others.end()
            pool.shutdown(cancel_futures=True)
    return Findings([results[site] for site in subject.sites], subject.lenient)


def _alone(
    subject: Subject, pool: concurrent.futures.Executor, survives: Callable[[Site], bool], kept: Kept
) -> Iterator[Result]:
    """Yield what becomes of each mutant under the first schedules, in the order in which they are done; those that are
    said to survive go last."""
    asked = {}
    said = [survives(site) for site in subject.sites]
    for number in sorted(range(len(said)), key=said.__getitem__):
        site = subject.sites[number]
        schedules = subject.schedules[: _FIRST_OF_EXPECTED if said[number] and site.family != MASKS else FIRST]
        name = f"{subject.lenient} {len(schedules)} {site.label}"
        if name in kept:
            yield Result(site, *kept[name])
        else:
            asked[pool.submit(_try_out, number, schedules)] = name, site
    late = None
    for future in concurrent.futures.as_completed(asked):
        name, site = asked[future]
        if late := future.exception() or late:
            continue
        kept[name] = found = future.result()
        yield Result(site, *found)
    if late:
        raise late


class _Others:
    """Has other processes do the runs that are expected, and remembers what they find."""

    def __init__(self, subject: Subject, pool: concurrent.futures.Executor, round_of_runs: Any, kept: Kept):
        self._numbers = {site: number for number, site in enumerate(subject.sites)}
        self._pool = pool
        self._round = round_of_runs
        self._kept = kept
        self._asked: dict[str, concurrent.futures.Future[Any]] = {}

    def expect(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if (name := _name(run)) not in self._asked and name not in self._kept:
                numbers = tuple(self._numbers[site] for site in run.changes)
                self._asked[name] = self._pool.submit(
                    _run, self._round.value, numbers, dataclasses.replace(run, changes=())
                )

    def wrong(self, run: Run) -> tuple[str, str] | None:
        name = _name(run)
        if name not in self._kept:
            self.expect([run])
            self._kept[name] = self._asked.pop(name).result()
        if wrong := self._kept[name]:  # what else was expected of these changes is of no use
            self.end()
        return (wrong[0], wrong[1]) if wrong else None

    def end(self) -> None:
        """Expect nothing more; what is known is kept."""
        for name, future in self._asked.items():
            if future.done() and not future.exception():
                self._kept[name] = future.result()
        self._round.value += 1
        self._asked.clear()


def _name(run: Run) -> str:
    labels = sorted(site.label for site in run.changes)
    return hashlib.sha256(repr((labels, run.call, run.options)).encode()).hexdigest()[:24]


_subject: Subject
_pace: Pace
_round: Any


def _inherit(subject: Subject, pace: Pace, round_of_runs: Any) -> None:
    global _subject, _pace, _round
    _subject, _pace, _round = subject, pace, round_of_runs
    _subject.judge = None


def _try_out(number: int, schedules: list[Schedule]) -> tuple[bool, str, str, str]:
    with _pace.gate:
        _in_time()
        _subject.schedules = schedules
        result = _subject.try_out(_subject.sites[number])
    return result.executed, result.kind, result.schedule, result.message


def _run(of_round: int, numbers: Sequence[int], run: Run) -> tuple[str, str] | None:
    """Return what a check says of a run; None also where nobody waits for it any more."""
    if of_round != _round.value:
        return None
    with _pace.gate:
        _in_time()
        if of_round != _round.value:
            return None
        changes = tuple(_subject.sites[number] for number in numbers)
        return _subject.wrong(dataclasses.replace(run, changes=changes))


def _in_time() -> None:
    if time.time() > _pace.until:
        raise TimeIsUp("the time is up; what was found is kept")
