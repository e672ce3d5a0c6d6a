"""python -m tests.fuzz: random calls of the operators for as long as asked, emulated or on this machine's GPU."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for directory in (ROOT, ROOT / "tests", ROOT / "emulator"):
    if str(directory) not in sys.path:
        sys.path.append(str(directory))

from .places import ARCHS, Place, real_gpu  # noqa: E402
from .properties import PROPERTIES, case_of  # noqa: E402
from .search import Found, UnusableGpu, failure_of, search  # noqa: E402

_ROUND = 10.0
"""Seconds for a property of weight 1 on an architecture before the next comes."""


def main() -> int:
    options = _options()
    try:
        places = [real_gpu()] if options.device else [Place(arch) for arch in options.arch or ARCHS]
        case = case_of(options.case) if options.case else None
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if case is not None:
        errors = [failure_of(case, place) for place in places]
        for place, error in zip(places, errors, strict=True):
            print(f"{place.arch}: {error or 'right'}")
        return 1 if any(errors) else 0
    print(f"seed {options.seed}", flush=True)
    names = [name for name in PROPERTIES if not options.operator or name.split()[0] in options.operator]
    found, end, turn = Found(), time.monotonic() + 60 * options.minutes, 0
    with contextlib.suppress(UnusableGpu):
        while time.monotonic() < end:
            for name in names:
                for place in places:
                    left = end - time.monotonic()
                    seconds = min(left, _ROUND * PROPERTIES[name].weight)
                    search(name, place, seconds, options.seed + turn, found, hostile=not options.tame, report=_say)
            turn += 1
    return _summary(found, options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to search (default: %(default)s)")
    operators = sorted({name.split()[0] for name in PROPERTIES})
    parser.add_argument("--operator", action="append", choices=operators, help="default: all")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="emulated architectures; default: all")
    parser.add_argument("--device", action="store_true", help="on this machine's GPU instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="default: a new one")
    parser.add_argument("--tame", action="store_true", help="no absurd lengths or page numbers in device tensors")
    parser.add_argument("--case", help="run this case, as a failure prints it, and nothing else")
    options = parser.parse_args()
    if options.device and options.arch:
        parser.error("--arch is of emulated GPUs: --device runs on this machine's")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _summary(found: Found, seed: int) -> int:
    print(f"seed {seed}: {found.cases.total()} cases")
    for (name, arch), count in sorted(found.cases.items()):
        print(f"  {name} on {arch}: {count}")
    for kind, failure in found.failures.items():
        print(f"FAILED, and {found.repeats[kind]} more like it: {failure}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
