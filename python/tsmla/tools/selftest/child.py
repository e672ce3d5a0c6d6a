"""A process of `tsmla selftest` that runs kernels of one operator family.

It prints what it begins and what came of it, a line of JSON each, so that its parent knows which kernel and which case
a hang or a crash belongs to. `python -m tsmla.tools.selftest.child FAMILY`, with a `Job` as JSON on its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ...identity.arch import Arch
from ...identity.variant import Variant, variant_from_dict
from ...loading import resolve
from ...problems import cache, chosen, decode, key_mask, pack, prefill, query
from ...problems.cases import (
    CacheCase,
    Case,
    ChosenCase,
    DecodeCase,
    MaskCase,
    MaskedCase,
    PackCase,
    PrefillCase,
    QueryCase,
    cases_of,
    kind_of,
)
from ...problems.memory import Memory, Repetitions
from .protocol import Job, Outcome

Say = Callable[[dict[str, Any]], None]

CALLS: dict[type[Case], Any] = {
    PrefillCase: prefill,
    MaskedCase: prefill,
    DecodeCase: decode,
    ChosenCase: chosen,
    PackCase: pack,
    CacheCase: cache,
    QueryCase: query,
    MaskCase: key_mask,
}
"""Which module runs a case."""


def run_kernel(variant: Variant, job: Job, say: Say) -> Outcome:
    """Run one kernel through every case of the job."""
    problems: list[str] = []
    worst, done, started = 0.0, 0, time.monotonic()
    resolve.forget()  # what is found from here on is this kernel alone
    for case in cases_of(kind_of(variant), full=job.full):
        say({"case": case.name})
        torch.manual_seed(zlib.crc32(repr((case, getattr(variant, "dtype", None))).encode()))
        try:
            error, found = _run_case(variant, case, job.repeats)
        except Exception as raised:
            error, found = worst, [f"{type(raised).__name__}: {_first_lines(raised)}"]
        done += 1
        worst = max(worst, error)
        problems += [f"{case.name}: {problem}" for problem in found]
        if problems and not usable():
            break
    served = {each.symbol(): step for each, step in resolve.served().items()}
    step = served.pop(variant.symbol(), "nothing")
    if step not in job.steps:
        problems.append(f"served by {step}, not by {' or '.join(job.steps)}")
    if served:
        problems.append(f"calls went to {', '.join(served)} as well")
    seconds = round(time.monotonic() - started, 3)
    return Outcome(variant.symbol(), not problems, done, job.repeats, worst, step, "; ".join(problems), seconds)


def _run_case(variant: Variant, case: Case, repeats: int) -> tuple[float, list[str]]:
    """Return the largest error, and what is wrong. Every other repetition is a programmatic dependent launch."""
    calls = CALLS[type(case)]
    memory = Memory()
    first = calls.run(variant, case, memory, pdl=False)
    overrun = memory.overrun()
    again = Repetitions(memory)
    for number, room in enumerate(again.rooms(repeats - 1)):
        calls.run(variant, case, room, pdl=number % 2 == 0)
    torch.cuda.synchronize()
    judged = calls.check(variant, case, first)
    problems = list(judged.problems)
    if overrun or again.overrun():
        problems.append("memory beside a result or the workspace was written")
    if differing := again.differing():
        problems.append(f"{differing} of {repeats - 1} repetitions differ from the first call")
    return judged.error, problems


def usable() -> bool:
    """Whether this process can go on. An illegal access, for one, ends everything that it does on the GPU."""
    try:
        torch.cuda.synchronize()
        return int(torch.zeros(1, device="cuda").sum()) == 0
    except Exception:
        return False


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split("\n")[:3]).strip()


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer

    def say(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=answers, flush=True)

    job = Job(**json.loads(sys.stdin.readline()))
    variants = [variant_from_dict(plain) for plain in job.kernels]
    with contextlib.ExitStack() as stack:
        if job.emulated:
            from ..emulated import emulation

            stack.enter_context(emulation(Arch(job.emulated)))
        say({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__})
        for variant in variants:
            say({"started": variant.symbol()})
            say({"finished": dataclasses.asdict(run_kernel(variant, job, say))})
            if not usable():
                os._exit(1)  # the rest needs a new process, and this one might not even end in peace
    return 0


if __name__ == "__main__":
    sys.exit(main())
