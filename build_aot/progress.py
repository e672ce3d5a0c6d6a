"""Tells what a build is doing and how much longer it takes.

pip hides what a build prints, so each line also goes to a file that a second terminal can follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from tsmla.identity.arch import Arch
from tsmla.identity.variant import Variant

FILE = "progress.txt"
"""The file of progress, in the directory where a build keeps its results."""
_SECONDS = {
    ("prefill", True): 4.5,
    ("decode", True): 17.0,
    ("prefill", False): 3.8,
    ("decode", False): 14.0,
}
"""(operator family, whether it is Hopper's kernel) -> seconds of a core that compiling one takes: means over the
shipped matrix, measured on a virtual core of an AMD EPYC on 2026-11-27."""
_OTHERS_SECONDS = 0.5


class Progress:
    """The lines of one build: handed to `report`, and written to a file, which the next build begins anew."""

    def __init__(self, directory: Path, report: Callable[[str], None]):
        self._report = report
        self._file: IO[str] = open(directory / FILE, "w", encoding="utf-8", buffering=1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __call__(self, line: str) -> None:
        self._report(line)
        print(line, file=self._file)


class Estimate:
    """Estimates how long variants take to compile with so many processes, corrected by what was seen."""

    def __init__(self, variants: Sequence[Variant], jobs: int):
        self._whole, self._done, self._start = _seconds(variants), 0.0, time.monotonic()
        archs, processes = ", ".join(dict.fromkeys(variant.arch for variant in variants)), min(jobs, len(variants))
        self.announcement = (
            f"compiling {len(variants)} kernels for {archs} in {processes} processes: "
            f"about {_minutes(self._whole / processes)}"
        )

    def left_after(self, variant: Variant) -> str:
        """Return words for the time that is left, now that this variant has been compiled, too."""
        self._done += _seconds([variant])
        elapsed = time.monotonic() - self._start
        return f"about {_minutes(elapsed * (self._whole - self._done) / self._done)} left"


def _seconds(variants: Iterable[Variant]) -> float:
    """Return the seconds of a core that compiling these takes."""
    return sum(_SECONDS.get((variant.family, variant.arch is Arch.SM90A), _OTHERS_SECONDS) for variant in variants)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes > 1 else "1 minute" if seconds >= 45 else f"{round(seconds)} seconds"
