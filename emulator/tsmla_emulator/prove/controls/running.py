"""Runs one control: its call, emulated, and then its recorded launches under other schedules and with the race
check."""

from __future__ import annotations

import collections
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...run import machine
from ...run.emulate import emulated
from ...run.machine import EmulationError, Options
from ...run.record import Record
from ..check import SCRATCH
from .control import Control, Seen
from .naming import name_of

SCHEDULES: dict[str, dict[str, Any]] = {
    "late": {"async_mode": "late"},
    "random": {"async_mode": "random", "seed": 3, "quantum": 0},
}
"""Schedules beside that of the call, in which work completes at issue."""
MOST_FINDINGS = 10_000
LENIENT = Options(happens_before=True, lenient_tensor=True, lockstep=True, findings=MOST_FINDINGS)
STRICT = Options(happens_before=True, findings=MOST_FINDINGS)


def run(control: Control, seed: int, machine_code: bool = False) -> Seen:
    """Run a control on inputs from `seed`, and return everything that can be seen of it.

    machine_code: run what ptxas made of the kernels, once, and without the race check.

    To be called in a process of its own: packages keep what they compiled.
    """
    seen, started = Seen(), time.perf_counter()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        _call(control, Path(directory), seen, machine_code)
        if not seen.refused and not machine_code:
            for launches in sorted(Path(directory).glob("*.npz")):
                _again(control, launches, seen)
    seen.seconds = time.perf_counter() - started
    return seen


def _call(control: Control, directory: Path, seen: Seen, machine_code: bool) -> None:
    with emulated(
        control.arch,
        _options(control, machine_code=machine_code),
        adopt_compiles=True,
        record_to=None if machine_code else directory,
        processors=control.processors,
    ) as gpu:
        try:
            seen.values = control.call()
        except EmulationError as error:
            if not error.findings:
                seen.refused = f"{type(error).__name__}: {error}"
            else:
                seen.failed = name_of(error.findings[0])
        except Exception as error:  # whatever a package raises is what to report
            seen.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        seen.kernels = sum(len(call.launches) for call in gpu.calls)
        seen.unwritten = sum(
            count for call in gpu.calls for name, count in call.unwritten.items() if name not in SCRATCH
        )


def _options(control: Control, **given: Any) -> Options:
    return Options(lenient_tensor=control.lenient_tensor, **given)


def _again(control: Control, launches: Path, seen: Seen) -> None:
    module = machine.parse(launches.with_suffix(".ptx").read_text("utf-8"))
    record = Record(launches)
    try:
        _, expected = record.run(module, _options(control))
    except EmulationError:
        return  # as in the call, which says so
    for schedule, changed in SCHEDULES.items():
        try:
            _, results = record.run(module, _options(control, **changed))
        except EmulationError as error:
            seen.ended[schedule] = name_of(error.findings[0])
        else:
            if not all(np.array_equal(results[name], expected[name]) for name in expected):
                seen.differ.append(schedule)
    for found, options in ((seen.lenient, LENIENT), (seen.strict, STRICT)):
        for position in range(len(record.launches)):
            try:
                record.run(module, options, only=position)
            except EmulationError as error:
                names = collections.Counter(name_of(finding) for finding in error.findings)
                for name, count in names.items():
                    found[name] = found.get(name, 0) + count
