"""Running kernels without their GPU, in the emulator when that is installed: for `tsmla verify --emulated`, `demo` and
`selftest --emulated`.

A development aid. Nothing that serves imports this file, and it imports the emulator only when asked to run something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import ArgumentError, KernelUnavailable
from ..identity.arch import Arch
from ..identity.row_format import ROWS
from ..identity.variant import (
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)
from ..loading import manifest

INSTALL = "`pip install . ./emulator` in a checkout of tsmla"


def examples(arch: Arch) -> list[Variant]:
    """The kernels that the demo calls: one of each operator, whose chosen keys another decode gathers."""
    return [
        PackVariant(arch, Dtype.BF16, Dtype.E4M3, 128, 64, 128),
        PrefillVariant(arch, Dtype.BF16, Dtype.BF16, 192, 128, causal=True, lse=True),
        DecodeVariant(arch, Dtype.BF16, Dtype.BF16, lse=True),
        DecodeVariant(arch, Dtype.BF16, Dtype.BF16, lse=True, gathers=True),
        WriteCacheVariant(arch, Dtype.BF16, ROWS["fp8_ds_mla"]),
        ReadCacheVariant(arch, Dtype.BF16, ROWS["fp8_ds_mla"]),
        QuantizeQVariant(arch, Dtype.BF16, ROWS["snapmla"]),
        KeyMaskVariant(arch),
    ]


def installed() -> bool:
    """Whether the emulator can be imported."""
    return importlib.util.find_spec("tsmla_emulator") is not None


def require() -> None:
    """Raises ArgumentError when the emulator cannot be imported."""
    if not installed():
        raise ArgumentError(f"the emulator is not installed; fix: {INSTALL}")


@contextlib.contextmanager
def emulation(arch: Arch) -> Iterator[None]:
    """A context in which torch's CUDA device is an emulated GPU of this architecture, on which the operators run.

    Raises ArgumentError when the emulator is not installed.
    """
    require()
    from tsmla_emulator.run.emulate import emulated

    with emulated(arch.value):
        yield


def prepare(variants: Sequence[Variant]) -> None:
    """Compile the emulator's core and these kernels, where that was not done before, and print how far it is.

    Raises ArgumentError when the emulator is not installed, KernelUnavailable when something does not compile.
    """
    require()
    from tsmla_emulator.run.core import build
    from tsmla_emulator.run.host.compile import compile_all
    from tsmla_emulator.run.host.link import cache_directory

    started = time.perf_counter()

    def tell(done: int, count: int) -> None:
        if done % 4 == 0 or done == count:
            print(f"compiling the emulator's core: {done} of {count} files  ({_since(started)})", flush=True)

    try:
        build.library(tell)
        print(f"the emulator's core is ready  ({_since(started)})", flush=True)
        started = time.perf_counter()
        print(f"{len(variants)} kernels, compiled once and kept in {cache_directory()}:", flush=True)
        for number, (variant, seconds) in enumerate(compile_all(variants), 1):
            print(f"{number:3} of {len(variants)}  {variant.symbol()}  ({seconds:.1f} s)", flush=True)
    except RuntimeError as error:
        raise KernelUnavailable(f"nothing to emulate: {error}") from error
    print(f"the kernels are ready  ({_since(started)})", flush=True)


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


def verify_emulated(symbols: Iterable[str] = (), libraries: Path | None = None) -> bool:
    """Compile each symbol's kernel (every one that can be built when none is named), run it through its operator in
    the emulator, and print how its result compares with torch. Returns whether all are good.

    libraries: a directory of libraries, whose machine code is run in the place of the PTX; its kernels when no symbol
        is named. The host's half of a call is that of the kernel as it is compiled here.

    Raises ArgumentError when the emulator is not installed, or a symbol does not exist or is in no library there.
    """
    require()
    from tsmla_emulator.prove import check
    from tsmla_emulator.run.host.compile import Compiled, compile_all, compile_for_emulation
    from tsmla_emulator.run.machine import EmulationError, Options
    from tsmla_emulator.run.ptx.model import PtxError
    from tsmla_emulator.run.sass.image import extracted

    held = manifest.images_of(libraries) if libraries else {}
    try:
        chosen = [check.find(symbol) for symbol in symbols] or list(held) or check.variants()
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    if missing := [variant.symbol() for variant in chosen if libraries and variant not in held]:
        raise ArgumentError(f"no library in {libraries} holds {', '.join(missing)}")
    good = True
    with tempfile.TemporaryDirectory() as scratch:

        def files(variant: Variant) -> Compiled:
            made = compile_for_emulation(variant)
            if not libraries:
                return made
            return dataclasses.replace(made, machine_code=extracted(*held[variant], Path(scratch) / variant.symbol()))

        for number, (variant, _) in enumerate(compile_all(chosen), 1):
            started = time.perf_counter()
            try:
                verdict = check.check(variant, Options(machine_code=libraries is not None), compiled=files)
                problem, measured = verdict.error, verdict.measured
            except (EmulationError, PtxError, ValueError) as error:
                problem, measured = str(error), ""
            good = good and problem is None
            told = f"WRONG: {problem}" if problem else measured
            print(f"{number:3} of {len(chosen)}  {variant.symbol()}  {told}  ({time.perf_counter() - started:.1f} s)")
    return good
