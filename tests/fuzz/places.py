"""Where cases run: on an emulated GPU of any architecture, or on the machine's own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tsmla.identity.arch import Arch

from .plain import Plain

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_ENDLESS = 60_000_000
"""Warp instructions of a cluster after which an emulated kernel is given up: thirty times what large cases take."""


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule(Plain):
    """How an emulated kernel's asynchronous work completes and its warps take turns; a real GPU does as it likes.

    completion: "late", "random" or "eager". quantum: warp instructions between two decisions, 0 for any number.
    races: also report unordered conflicting accesses. highest: `elect.sync` picks the highest lane. starved: warps that
    run only when no other can. sums: products are summed as tensor cores do.
    """

    completion: str = "late"
    seed: int = 0
    quantum: int = 0
    races: bool = True
    highest: bool = False
    starved: tuple[int, ...] | None = None
    sums: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """An architecture, emulated or, with `device`, of the machine's GPU."""

    arch: str
    device: bool = False

    def with_sums(self, schedule: Schedule) -> Arch | None:
        """The architecture, where products are summed as its tensor cores do, as on every real GPU."""
        return Arch(self.arch) if self.device or schedule.sums else None

    @contextlib.contextmanager
    def running(self, schedule: Schedule, processors: int | None = None) -> Iterator[Callable[[], int]]:
        """A context in which torch has this GPU; gives the number of calls so far, 0 where nobody counts them.

        processors: SMs that the operators find in emulation; by default as many as the architecture's GPUs have.
        """
        if self.device:
            yield lambda: 0
            return
        from tsmla_emulator.run.emulate import Options, emulated

        options = Options(
            async_mode=schedule.completion,  # type: ignore[arg-type]
            seed=schedule.seed,
            quantum=schedule.quantum,
            starve=schedule.starved,
            happens_before=schedule.races,
            elect_highest=schedule.highest,
            hardware_sums=schedule.sums,
            limit=_ENDLESS,
        )
        with emulated(self.arch, options, compiled=_files(), processors=processors) as gpu:
            yield lambda: len(gpu.calls)


@functools.cache
def _files() -> Callable[[Any], Any]:
    from built_kernels import OBJECTS, files_in

    return files_in(OBJECTS)


def real_gpu() -> Place:
    """The machine's GPU. Raises RuntimeError where there is none."""
    import torch
    from tsmla.operators import checks

    if not torch.cuda.is_available():
        raise RuntimeError("--device needs a CUDA GPU; torch sees none")
    return Place(str(checks.arch_of(torch.device("cuda", torch.cuda.current_device()))), device=True)
