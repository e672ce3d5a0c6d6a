"""Messages between the parent and the children of `tsmla selftest`. Standard library only."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child is to do: run these variants (as `Variant.to_dict` gives them) in this order.

    full: all cases instead of the short ones.
    repeats: calls of each case, which must agree bit for bit.
    steps: those that may serve a kernel, as `resolve.served` names them.
    emulated: the architecture to emulate, "" for the GPU.
    """

    kernels: list[dict[str, Any]]
    full: bool
    repeats: int
    steps: tuple[str, ...]
    emulated: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one kernel.

    cases: how many ran.
    worst_error: the largest, as a fraction of what is allowed; for operators compared byte for byte, how many elements
        are wrong.
    served: the step that found the kernel.
    problem: "" when `ok`.
    seconds: that it took. The first of several kernels with the same inputs makes these, and what they must give, for
        the others.
    """

    symbol: str
    ok: bool
    cases: int = 0
    repeats: int = 0
    worst_error: float = 0.0
    served: str = ""
    problem: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a child ran on."""

    gpu: str
    torch: str
