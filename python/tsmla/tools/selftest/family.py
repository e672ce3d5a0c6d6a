"""Divides the kernels of `tsmla selftest` among child processes with time limits, several side by side.

A hang or a crash is an outcome of the kernel that was running, and a new child goes on with the kernels after it. This
process never touches the GPU. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple

from ...identity.variant import Variant
from ...loading.settings import BACKEND
from ...problems.cases import cases_of, kind_of
from .protocol import Job, Machine, Outcome

_MOST_HANGS = 3
"""Kernels of a child's share that may hang; the rest of the share is then not run."""
_MOST_CHILDREN = 10
"""Most children side by side, however many cores there are: they share one GPU and its memory."""
_NO_INPUTS = {"out_dtype", "causal", "lse"}
"""Fields of variants that the inputs of their calls do not depend on."""
_SECONDS_TO_END = 30
"""Seconds that a child gets to end after it closed its output or was killed."""
_QUOTED = 600
"""Characters that a report quotes of what a child printed."""


class Limits(NamedTuple):
    """Seconds that a child may take to import torch and reach the GPU, and for one case of one kernel."""

    start: float
    case: float


ON_GPU = Limits(start=180, case=120)
EMULATED = Limits(start=180, case=1800)
"""Limits in the emulator, where a kernel's first case includes compiling it."""


def child_command(family: str) -> list[str]:
    """The command line of a child."""
    return [sys.executable, "-m", "tsmla.tools.selftest.child", family]


def run_all(
    variants: Sequence[Variant], job: Job, limits: Limits, tell: Callable[[Outcome], None], processes: int = 0
) -> tuple[list[Outcome], Machine | None]:
    """Run variants in child processes side by side; return their outcomes in the variants' order, and what the children
    ran on.

    job: what is common to all children; its kernels are filled in here.
    tell: gets each outcome as soon as it is known.
    processes: how many at once; 0: one for each core, within reason.

    No child runs any more when this returns or raises.
    """
    processes = processes or min(len(os.sched_getaffinity(0)), _MOST_CHILDREN)
    waiting: queue.SimpleQueue[list[Variant]] = queue.SimpleQueue()
    for share in shares(variants, processes, job.full):
        waiting.put(share)
    # From a thread: an outcome; at its end, what its children ran on, or the error that ended it.
    said: queue.SimpleQueue[Outcome | Machine | None | Exception] = queue.SimpleQueue()
    children = _Children()

    def work() -> None:
        machine = None
        try:
            while True:
                share = waiting.get_nowait()
                machine = run_family(share[0].family, share, job, limits, said.put, children)[1] or machine
        except queue.Empty:
            said.put(machine)
        except Exception as error:
            said.put(error)

    outcomes: dict[str, Outcome] = {}
    machine, working = None, min(processes, waiting.qsize())
    try:
        for _ in range(working):
            threading.Thread(target=work, daemon=True).start()
        while working:
            event = said.get()
            if isinstance(event, Outcome):
                outcomes[event.symbol] = event
                tell(event)
            elif isinstance(event, Exception):
                raise event
            else:
                machine, working = event or machine, working - 1
    finally:
        children.end()
    return [outcomes[variant.symbol()] for variant in variants], machine


def shares(variants: Sequence[Variant], processes: int, full: bool) -> list[list[Variant]]:
    """Divide variants among children so that `processes` are busy: the largest share first, each of one family.

    Variants with the same inputs stay together, because a child makes these, and what they must give, only once.
    """
    families: dict[str, dict[Any, list[Variant]]] = {}
    for variant in variants:
        inputs = tuple(value for name, value in vars(variant).items() if name not in _NO_INPUTS)
        families.setdefault(variant.family, {}).setdefault(inputs, []).append(variant)

    def calls(kernels: Iterable[Variant]) -> int:
        return sum(len(cases_of(kind_of(variant), full=full)) for variant in kernels)

    total, found = calls(variants), []
    for groups in families.values():
        own = sum(map(calls, groups.values()))
        count = min(len(groups), max(1, round(processes * own / total)))
        parts: list[list[Variant]] = [[] for _ in range(count)]
        for group in sorted(groups.values(), key=calls, reverse=True):
            min(parts, key=calls).extend(group)
        found += parts
    return sorted(found, key=calls, reverse=True)


def run_family(
    family: str,
    variants: Sequence[Variant],
    job: Job,
    limits: Limits,
    tell: Callable[[Outcome], None],
    children: _Children | None = None,
) -> tuple[list[Outcome], Machine | None]:
    """Run variants of one family, one child at a time; return their outcomes, and what the last child that started ran
    on.

    job: what is common to all children; its kernels are filled in here.
    tell: gets each outcome as soon as it is known.
    """
    children = children or _Children()
    outcomes: list[Outcome] = []
    machine, hangs = None, 0

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    while waiting := variants[len(outcomes) :]:
        before = len(outcomes)
        child = _Child(family, dataclasses.replace(job, kernels=[variant.to_dict() for variant in waiting]), children)
        with child:
            child.follow([variant.symbol() for variant in waiting], limits, add)
        machine = child.machine or machine
        hangs += child.hung
        if len(outcomes) == before or hangs == _MOST_HANGS:
            why = f"{hangs} kernels before it hung" if hangs == _MOST_HANGS else child.end
            for variant in variants[len(outcomes) :]:
                add(Outcome(variant.symbol(), False, problem=f"not run: {why}"))
    return outcomes, machine


class _Children:
    """Processes that may run, until `end` kills them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] | None = set()

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process. Raises RuntimeError after `end`."""
        with self._lock:
            if self._running is None:
                raise RuntimeError("the selftest has ended")
            process = subprocess.Popen(command, text=True, errors="replace", **options)
            self._running.add(process)
        return process

    def forget(self, process: subprocess.Popen[str]) -> None:
        """Drop a process that has ended."""
        with self._lock:
            if self._running is not None:
                self._running.discard(process)

    def end(self) -> None:
        """Kill all processes, and start no more."""
        with self._lock:
            for process in self._running or ():
                process.kill()
            self._running = None


class _Child:
    """A process that runs kernels.

    After `follow`, `machine` is what it said it runs on, `end` how it ended, and `hung` whether the time limit ended
    it.
    """

    def __init__(self, family: str, job: Job, children: _Children) -> None:
        self.machine: Machine | None = None
        self.end = ""
        self.hung = False
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")
        self._garbage = ""
        # "binary": a kernel that was compiled just now is not one that ships. The path: tsmla need not be installed.
        environment = {BACKEND.name: "binary", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._children = children
        self._process = children.start(
            child_command(family),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin
        with contextlib.suppress(OSError), self._process.stdin as stream:  # one that died at once says why elsewhere
            stream.write(json.dumps(dataclasses.asdict(job)) + "\n")

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._children.forget(self._process)
        self._errors.close()

    def follow(self, symbols: list[str], limits: Limits, add: Callable[[Outcome], None]) -> None:
        """Add the outcome of each kernel that the child begins, in order, until it ends or is given up."""
        done = 0
        begun = case = ""
        while done < len(symbols):
            event = self._event(limits.case if begun else limits.start)
            if event is None:
                break
            outcome = _outcome(event, symbols[done])
            if "gpu" in event:
                self.machine = Machine(str(event["gpu"]), str(event.get("torch")))
            elif event.get("started") == symbols[done]:
                begun, case, self._garbage = symbols[done], "", ""
            elif "case" in event:
                case = str(event["case"])
            elif outcome is not None:
                add(outcome)
                done, begun = done + 1, ""
            else:
                self._garbage += json.dumps(event)
        if begun:
            add(Outcome(begun, False, problem=f"{case}: {self.end}" if case else self.end))

    def _event(self, seconds: float) -> dict[str, Any] | None:
        """Return what the child says next; None when it ended or was silent for `seconds`, and `end` says which."""
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except queue.Empty:
                self.hung = True
                self.end = f"hung: nothing happened for {seconds:g} s{self._said()}"
                return None
            if line is None:
                self.end = f"{self._how_it_ended()}{self._said()}"
                return None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    return event
            self._garbage += line

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return "its process closed its output and went on"
        if status < 0:
            return f"its process was ended by signal {-status} ({signal.strsignal(-status)})"
        return f"its process ended with status {status}"

    def _said(self) -> str:
        """Return the end of what the child printed that was no event."""
        self._errors.seek(0)
        text = " ".join((self._garbage + self._errors.read()).split())
        return f" (it printed: {text[-_QUOTED:]})" if text else ""


def _outcome(event: dict[str, Any], symbol: str) -> Outcome | None:
    """Return the outcome that an event tells of a kernel; None when it tells none."""
    said = event.get("finished")
    try:
        outcome = Outcome(**said) if isinstance(said, dict) else None
    except TypeError:
        return None
    return outcome if outcome is not None and outcome.symbol == symbol else None
