"""The search for failing cases within a time, and what it found."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import torch
from tsmla.identity.variant import Variant
from tsmla.tools.selftest.child import usable

from build_aot.matrix import shipped

from .places import Place
from .properties import PROPERTIES, Case, check

_TOLD = 600
"""Characters of an error that are reported; kernels have long names."""
_SHORTEST = 1.0
"""Seconds that a kernel gets, at least."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case that fails, as small as it could be made, and how."""

    name: str
    place: Place
    case: Case
    error: str

    def __str__(self) -> str:
        where = "--device" if self.place.device else f"--arch {self.place.arch}"
        return (
            f"{self.name} on {self.place.arch}: {self.error}\n"
            f'    again: python -m tests.fuzz {where} --case "{self.case!r}"\n'
            f"    to keep, as an example in tests/fuzz/test_found.py: {self.case!r},"
        )


@dataclasses.dataclass
class Found:
    """Cases that ran, by property and architecture; failures, each kind of them once; and how often each came."""

    cases: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    failures: dict[str, Failure] = dataclasses.field(default_factory=dict)
    repeats: Counter[str] = dataclasses.field(default_factory=Counter)


class UnusableGpu(BaseException):
    """Ends a search whose process can use the GPU no more: whatever came after would fail, too. It passes through
    hypothesis, which would go on with smaller cases."""


class _Failed(Exception):
    """What tells hypothesis that a case fails; always raised in one place, so that all failures look alike to it."""


def kernels_of(name: str, arch: str) -> list[Variant]:
    """Return the kernels of an architecture that a property is about."""
    return [kernel for kernel in shipped() if str(kernel.arch) == arch and PROPERTIES[name].is_about(kernel)]


def search(
    name: str,
    place: Place,
    seconds: float,
    seed: int,
    found: Found,
    *,
    kernels: Sequence[Variant] = (),
    hostile: bool = True,
    least: int = 0,
    shrinking: float = 30.0,
    report: Callable[[str], None] = print,
) -> None:
    """Run random cases of one property for so long, but at least `least` of them, and add to `found`. Each new kind of
    failure is made smaller, for `shrinking` seconds, and reported. Equal seeds draw equal cases.

    kernels: whose cases; by default all that ship for the architecture. Where it has none, nothing runs.
    """
    chance = random.Random(f"{seed} {name} {place.arch}")
    kernels = kernels or kernels_of(name, place.arch)
    if not kernels:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # cases are small, and CPUs often busy with other things
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end or found.cases[name, place.arch] < least:
            kernel, limit = chance.choice(kernels), max(end, time.monotonic() + _SHORTEST)
            _search_kernel(name, place, kernel, limit, chance.getrandbits(64), found, hostile, shrinking, report)
    finally:
        torch.set_num_threads(threads)


def _search_kernel(
    name: str,
    place: Place,
    kernel: Variant,
    end: float,
    seed: int,
    found: Found,
    hostile: bool,
    shrinking: float,
    report: Callable[[str], None],
) -> None:
    """A few cases of one kernel."""
    failed: dict[str, str | None] = {}
    smallest: list[tuple[Case, str]] = []
    limit = end

    def attempt(case: Case) -> str | None:
        """How the case fails, or None, for those that hypothesis should know of: one kind of failure, and a new one."""
        nonlocal limit
        if repr(case) not in failed:
            if time.monotonic() > limit:
                return None
            found.cases[name, place.arch] += 1
            error = failure_of(case, place)
            kind = error and _kind(name, place, error)
            if error and kind and place.device and not usable():
                found.failures[kind] = Failure(name, place, case, error)
                report(f"the GPU is lost to this process: {found.failures[kind]}")
                raise UnusableGpu(error)
            if kind and not smallest and kind in found.failures:
                found.repeats[kind] += 1
            elif kind and not smallest:
                limit = time.monotonic() + shrinking
            sought = _kind(name, place, smallest[0][1]) if smallest else kind
            failed[repr(case)] = error if kind == sought and kind not in found.failures else None
        return failed[repr(case)]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=PROPERTIES[name].each,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(PROPERTIES[name].cases(kernel, hostile))
    def run(case: Any) -> None:
        assert case.variant(place.arch) == kernel
        if error := attempt(case):
            smallest.append((case, error))
            raise _Failed(error)

    try:
        run()
    except _Failed:
        case, error = smallest[-1]
        failure = Failure(name, place, case, error)
        found.failures[_kind(name, place, error)] = failure
        report(str(failure))


def failure_of(case: Case, place: Place) -> str | None:
    """How a case fails, in a line, or None."""
    try:
        check(case, place)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:_TOLD]
    return None


def _kind(name: str, place: Place, error: str) -> str:
    """What failures of one cause have in common, as far as their text tells."""
    return f"{name} on {place.arch}: {re.sub(r'0x[0-9a-f]+|[-+]?[0-9.]+(e[-+]?[0-9]+)?', '#', error)[:70]}"
