"""`tsmla selftest`: runs every shipped kernel of this machine's GPU, or kernels of any architecture in the emulator.

Each runs edge cases that are compared with float64, between poisoned memory, and repetitions that must agree bit for
bit. This process never touches the GPU; kernels run in child processes. Standard library only.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...errors import ArgumentError, LibraryError
from ...identity.arch import Arch
from ...identity.variant import FAMILIES, Variant
from ...loading import gpu, manifest, records, toolchain
from .. import emulated
from .family import EMULATED, ON_GPU, run_all
from .protocol import Job, Machine, Outcome

_REPEATS_FULL, _REPEATS, _REPEATS_EMULATED = 100, 10, 2
_UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a selftest is asked to do.

    full: every case and 100 repetitions, instead of the short ones.
    as_json: print JSON instead of text.
    emulated: the architecture to emulate; None for this machine's GPU.
    families: operator families to run, all where empty.
    symbols: kernels of these families to run, all where empty.
    """

    full: bool = False
    as_json: bool = False
    emulated: str | None = None
    families: Sequence[str] = ()
    symbols: Sequence[str] = ()


def selftest(asked: Asked) -> int:
    """Run a selftest and print its report. Returns the exit status: 0 all good, 1 something wrong or nothing to test.

    Raises ArgumentError for what cannot be asked, ManifestError and LibraryError for unusable libraries.
    """
    if asked.emulated:
        emulated.require()
        arch = Arch(asked.emulated)
    else:
        found, text = gpu.current_arch()
        if found is None:
            print(f"tsmla: selftest has nothing to run on: {text}; --emulated ARCH needs no GPU", file=sys.stderr)
            return 1
        arch = found
    libraries = _libraries(arch)
    variants = _chosen([k.variant for library in libraries for k in library.manifest.kernels], asked)
    if not variants:
        raise LibraryError(f"selftest: {toolchain.shipped_libraries()} has no such kernels for {arch}")
    progress = sys.stderr if asked.as_json else sys.stdout

    def tell(outcome: Outcome) -> None:
        print(_line(outcome), file=progress, flush=True)

    print(f"{arch}: {len(variants)} kernels of {toolchain.shipped_libraries()}", file=progress, flush=True)
    started = time.monotonic()
    outcomes, machine = _run(variants, asked, tell)
    report = _record(arch, asked, libraries, outcomes, machine)
    if asked.as_json:
        print(json.dumps(report, indent=1))
    wrong = sum(not outcome.ok for outcome in outcomes)
    print(
        f"{report['gpu']}: {len(outcomes)} kernels, {wrong} wrong ({time.monotonic() - started:.0f} s)", file=progress
    )
    if not wrong and not asked.emulated:
        print(f"on record for {arch}: {records.verified(arch, report['source_digest'])}", file=progress)
    return 1 if wrong else 0


def _libraries(arch: Arch) -> list[manifest.LibraryRecord]:
    """Return the installed libraries of an architecture, after checking that their bytes are those recorded."""
    directory = toolchain.shipped_libraries()
    held = manifest.read_directory(directory)
    libraries = [library for library in held.libraries if library.manifest.arch == arch]
    if not libraries:
        raise LibraryError(f"selftest: {directory} has no library for {arch}; it holds: {held.names}")
    if len({library.manifest.source_digest for library in libraries}) > 1:
        raise LibraryError(f"{directory} has libraries for {arch} of different kernel sources; install again")
    for library in libraries:
        manifest.verify_file(directory, library)
    return libraries


def _chosen(variants: list[Variant], asked: Asked) -> list[Variant]:
    """Return the variants that are asked for, in the order of their symbols."""
    known = {v.symbol(): v for v in variants if v.family in (asked.families or FAMILIES)}
    if unknown := [symbol for symbol in asked.symbols if symbol not in known]:
        raise ArgumentError(
            f"selftest: the libraries have no {', '.join(unknown)}; `tsmla list --resources` names what they have"
        )
    return [known[symbol] for symbol in sorted(asked.symbols or known)]


def _run(variants: list[Variant], asked: Asked, tell) -> tuple[list[Outcome], Machine | None]:
    if asked.emulated:
        job, limits = Job([], asked.full, _REPEATS_EMULATED, ("emulated",), asked.emulated), EMULATED
    else:
        job = Job([], asked.full, _REPEATS_FULL if asked.full else _REPEATS, ("shipped", "override"))
        limits = ON_GPU
    return run_all(variants, job, limits, tell)


def _line(outcome: Outcome) -> str:
    if not outcome.ok:
        return f"{outcome.symbol}: WRONG: {outcome.problem}"
    error = f"error at most {outcome.worst_error:.2f} of what is allowed"
    return f"{outcome.symbol}: ok, {outcome.cases} cases, {error}, {outcome.repeats} repetitions agree"


def _record(
    arch: Arch,
    asked: Asked,
    libraries: list[manifest.LibraryRecord],
    outcomes: list[Outcome],
    machine: Machine | None,
) -> dict[str, Any]:
    """Return what `--json` prints and `records` reads.

    complete: nothing was left out, and it was the installed libraries that ran.
    """
    tested = {outcome.symbol for outcome in outcomes if asked.emulated or outcome.served == "shipped"}
    shipped = {kernel.variant.symbol() for library in libraries for kernel in library.manifest.kernels}
    families = {library.manifest.family for library in libraries}
    return {
        "schema": records.SCHEMA,
        "tsmla": _version(),
        "arch": arch.value,
        "gpu": machine.gpu if machine else _UNKNOWN,
        "driver": _UNKNOWN if asked.emulated else _driver(),
        "torch": machine.torch if machine else _UNKNOWN,
        "source_digest": libraries[0].manifest.source_digest,
        "libraries": {library.file: library.sha256 for library in libraries},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "full": asked.full,
        "complete": tested == shipped and families == set(FAMILIES),
        "emulated": bool(asked.emulated),
        "ok": all(outcome.ok for outcome in outcomes),
        "kernels": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("tsmla")
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN  # run from its sources


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return done.stdout.partition("\n")[0].strip() or _UNKNOWN
