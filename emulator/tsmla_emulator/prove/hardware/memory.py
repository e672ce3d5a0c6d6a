"""Records on a GPU what shipped kernels leave in memory in the calls of `check`, and compares the emulator with it.

On a machine with a GPU and installed libraries, and then anywhere:

    python -m tsmla_emulator.prove.hardware.memory record DIRECTORY [SYMBOL...] --commit HASH [--at-bounds]
    python -m tsmla_emulator.prove.hardware.memory compare DIRECTORY [SYMBOL...] [--machine-code] [--hardware-sums]
    python -m tsmla_emulator.prove.hardware.memory keep DIRECTORY... --into TARGET [--bytes-of SYMBOL]

Both sides run the same host code on the same emulated memory; only what a kernel does to that memory is the GPU's or
the emulator's. Inputs are drawn by integer arithmetic, and their digests are recorded: where they differ, the two
calls were not the same. `--at-bounds` makes the calls at bounds (see `check`). `keep` joins what several processes
recorded, each of its own symbols, and leaves out all bytes but those of the symbols named: digests are enough to tell
whether memory differs, not where.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import functools
import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tsmla.identity.arch import Arch
from tsmla.identity.call import OPERATORS
from tsmla.identity.variant import Variant
from tsmla.loading import resolve, toolchain
from tsmla.loading.manifest import images_of

from ...run import emulate
from ...run.host.capture import extents, parameters_of
from ...run.host.compile import Compiled, compile_for_emulation
from ...run.host.memory import Extent, merged
from ...run.host.tensor import EmulatedTensor, plain
from ...run.machine import Options
from ...run.sass.image import extracted, kernels
from .. import check

_ALIGNED = 512
"""Bytes of which the address of a tensor on a GPU is a multiple; places within it are those of emulated memory."""


@dataclasses.dataclass
class Ran:
    """What one launch of a variant's kernels met and left.

    given: a digest of each region of memory before. left: the bytes of each region that may be written, afterwards.
    """

    given: dict[str, str]
    left: dict[str, np.ndarray]


def ran(
    variant: Variant,
    kernel: Callable[[emulate.Emulation, Variant], Any],
    options: Options = Options(),  # noqa: B008 -- frozen
    compiled: Callable[[Variant], Compiled] | None = None,
    at_bounds: bool = False,
) -> tuple[list[Ran], str]:
    """Make the calls of `check` with numbers from integer arithmetic. Return them and what was wrong, "" for nothing.

    kernel: gives the function that runs a variant's kernels on emulated tensors.
    at_bounds: see `check`.
    """
    found: list[Ran] = []
    written = {x.name for x in OPERATORS[variant.family].tensors if x.written or x.scratch}

    def observed(emulation: emulate.Emulation, wanted: Variant) -> Any:
        run, names = kernel(emulation, wanted)

        def call(*arguments: Any) -> None:
            regions = merged(extents(arguments, names, written.__contains__))
            given = {region.name: hashlib.sha1(_content(region)).hexdigest() for region in regions}
            run(*arguments)
            left = {r.name: np.frombuffer(_content(r), np.uint8) for r in regions if r.writable}
            found.append(Ran(given, left))

        return call

    with drawn_by_integers(), mock.patch.object(emulate.Emulation, "kernel", observed):
        processors = check.emulated_sms(variant)
        with emulate.emulated(variant.arch.value, options, compiled=compiled, processors=processors):
            sums = options.hardware_sums
            judged = check.make_calls(variant, all_ways=True, at_bounds=at_bounds, hardware_sums=sums)
    return found, "; ".join(error for _, error in judged if error)


def _digest(content: np.ndarray) -> str:
    return hashlib.sha1(content.tobytes()).hexdigest()


def _content(region: Extent) -> bytes:
    return ctypes.string_at(region.start, region.end - region.start)


@contextlib.contextmanager
def drawn_by_integers(seed: int = 0) -> Iterator[None]:
    """Make torch draw numbers, while active, that are the same bits with every torch on every CPU."""
    source = np.random.Generator(np.random.PCG64(seed))

    def made(numbers: np.ndarray, options: dict[str, Any]) -> torch.Tensor:
        result = torch.from_numpy(np.ascontiguousarray(numbers))
        if options.get("dtype") is not None:
            result = result.to(options["dtype"])
        return result.to(options["device"]) if options.get("device") is not None else result

    def shape_of(sizes: Sequence[Any]) -> tuple[int, ...]:
        return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)

    def randn(*sizes: Any, **options: Any) -> torch.Tensor:
        """Sums of four integers of ten bits: roughly normal, and exact in float32 but for one rounded quotient."""
        parts = source.integers(0, 1024, (*shape_of(sizes), 4), np.int32)
        return made((parts.sum(-1).astype(np.float32) - np.float32(2046)) / np.float32(591), options)

    def rand(*sizes: Any, **options: Any) -> torch.Tensor:
        return made(source.integers(0, 1 << 24, shape_of(sizes), np.int32).astype(np.float32) / (1 << 24), options)

    def randint(*bounds: Any, **options: Any) -> torch.Tensor:
        *limits, shape = bounds
        low, high = (0, *limits)[-2:]
        return made(source.integers(low, high, shape_of([shape]), np.int64), options)

    def randperm(count: int, **options: Any) -> torch.Tensor:
        return made(np.argsort(source.integers(0, 1 << 62, count, np.int64), kind="stable"), options)

    with contextlib.ExitStack() as stack:
        for function in (randn, rand, randint, randperm):
            stack.enter_context(mock.patch.object(torch, function.__name__, function))
        yield


def on_gpu(functions: dict[Variant, Any], _: emulate.Emulation, variant: Variant) -> tuple[Any, list[str]]:
    """Return a function that runs a shipped kernel on the GPU with copies of emulated tensors, and its parameters."""
    function = functions[variant]
    names = [*parameters_of(function)]
    written = {x.name for x in OPERATORS[variant.family].tensors if x.written or x.scratch}

    def run(*arguments: Any) -> None:
        regions = merged(extents(arguments, names, written.__contains__))
        with torch._C.DisableTorchFunction():
            copies = [_on_device(region) for region in regions]
            function(*(_moved(x, regions, copies) for x in arguments))
            for region, copy in zip(regions, copies, strict=True):
                if region.writable:
                    content = _part(region, copy).cpu().numpy().tobytes()
                    ctypes.memmove(region.start, content, len(content))

    return run, names


def _on_device(region: Extent) -> torch.Tensor:
    copy = torch.zeros(region.end - region.start + 2 * _ALIGNED, dtype=torch.uint8, device="cuda")
    content = np.frombuffer(_content(region), np.uint8)
    _part(region, copy).copy_(torch.from_numpy(content.copy()))
    return copy


def _part(region: Extent, copy: torch.Tensor) -> torch.Tensor:
    return copy[region.start % _ALIGNED :][: region.end - region.start]


def _moved(argument: Any, regions: list[Extent], copies: list[torch.Tensor]) -> Any:
    if not isinstance(argument, EmulatedTensor):
        return argument
    tensor = plain(argument)
    start = tensor.data_ptr()
    for region, copy in zip(regions, copies, strict=True):
        if region.start <= start < region.end:
            offset = region.start % _ALIGNED + start - region.start
            result = torch.empty(0, dtype=tensor.dtype, device="cuda")
            place = offset // tensor.element_size()
            return result.set_(copy.untyped_storage(), place, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")  # without elements


def in_emulator(emulation: emulate.Emulation, variant: Variant) -> tuple[Any, list[str]]:
    """Return the emulated kernel of a variant, and its parameters."""
    kernel = _KERNEL(emulation, variant)
    return kernel, [*kernel.parameters]


_KERNEL = emulate.Emulation.kernel


def code_digests(variants: Iterable[Variant], libraries: Path) -> dict[str, dict[str, str]]:
    """Return a digest of the machine code of each kernel of these variants in a directory of libraries."""
    held = images_of(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        return {
            variant.symbol(): digests_in(extracted(*held[variant], Path(scratch) / "image")) for variant in variants
        }


def digests_in(library: Path) -> dict[str, str]:
    """Return a digest of the machine code of each kernel in a library or object."""
    return {kernel.entry: hashlib.sha1(kernel.code).hexdigest() for kernel in kernels(library)}


def record(directory: Path, commit: str, symbols: Sequence[str], at_bounds: bool) -> int:
    """Write what the GPU leaves: a file for each family, with bytes, digests of inputs, and what ran where."""
    torch.zeros(1, device="cuda")
    variants = [check.find(symbol) for symbol in symbols] or check.variants([Arch.SM90A])
    functions = {variant: resolve.resolve(variant).function for variant in variants}
    command = "python -m tsmla_emulator.prove.hardware.memory record" + " --at-bounds" * at_bounds
    certificate = (
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {command}; "
        f"{datetime.date.today().isoformat()}; commit {commit}"
    )
    digests = code_digests(variants, toolchain.shipped_libraries())
    arrays: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    notes: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    wrong = 0
    for variant in variants:
        symbol, started = variant.symbol(), time.perf_counter()
        try:
            on_this = functools.partial(on_gpu, functions)
            calls, error = ran(variant, on_this, Options(hardware_sums=True), at_bounds=at_bounds)
        except Exception:
            wrong += 1
            print(f"{symbol}: {traceback.format_exc()}", flush=True)
            continue
        notes[variant.family][symbol] = {
            "code": digests[symbol],
            "given": [call.given for call in calls],
            "left": [{name: _digest(content) for name, content in call.left.items()} for call in calls],
        }
        for call in calls:
            arrays[variant.family] |= {_digest(x): x for name, x in call.left.items() if name not in check.SCRATCH}
        print(f"{symbol}: {len(calls)} calls, {time.perf_counter() - started:.1f} s {error}", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    for family, contents in arrays.items():
        said = json.dumps({"certificate": certificate, "at_bounds": at_bounds, "variants": notes[family]})
        np.savez_compressed(directory / f"{family}.npz", said=said, **contents)
    print(f"{len(variants) - wrong} of {len(variants)} recorded: {certificate}")
    return wrong


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a region differs from the recorded one.

    same_call: whether the call had the recorded inputs. bytes, size: how many differ, of how many.
    """

    call: int
    region: str
    same_call: bool
    bytes: int
    size: int


class Recorded:
    """What a directory of records holds."""

    def __init__(self, directory: Path):
        self.files = {path.stem: np.load(path) for path in sorted(directory.glob("*.npz"))}
        self.said = {family: json.loads(str(file["said"])) for family, file in self.files.items()}
        self.certificates = {one["certificate"] for one in self.said.values()}
        self.at_bounds = any(one.get("at_bounds") for one in self.said.values())
        self.variants = {symbol: notes for one in self.said.values() for symbol, notes in one["variants"].items()}

    def content(self, variant: Variant, digest: str) -> np.ndarray | None:
        """Return bytes that one of a variant's calls left, None where only their digest was kept."""
        file = self.files[variant.family]
        return file[digest] if digest in file else None

    def differences(self, variant: Variant, calls: list[Ran]) -> list[Difference]:
        """Compare calls with the recorded ones. Raises ValueError when there were more or fewer."""
        notes = self.variants[variant.symbol()]
        if len(notes["given"]) != len(calls):
            raise ValueError(f"{variant.symbol()}: {len(calls)} calls, {len(notes['given'])} recorded")
        found = []
        for number, call in enumerate(calls):
            for name, content in call.left.items():
                digest = notes["left"][number][name]
                if _digest(content) == digest:
                    continue
                before = self.content(variant, digest)
                differ = -1 if before is None else int((before != content).sum())
                same = call.given == notes["given"][number]
                found.append(Difference(number, name, same, differ, len(content)))
        return found


def compare(
    directory: Path,
    symbols: Sequence[str],
    options: Options,
    compiled: Callable[[Variant], Compiled] | None = None,
) -> int:
    """Run recorded calls in the emulator and print where memory differs; return how many variants differ.

    A variant whose machine code is no longer what was recorded is marked: its last bits may differ rightly.
    """
    recorded = Recorded(directory)
    print(*sorted(recorded.certificates), sep="\n")
    differing = 0
    for symbol in symbols or recorded.variants:
        variant, started = check.find(symbol), time.perf_counter()
        calls, _ = ran(variant, in_emulator, options, compiled, recorded.at_bounds)
        try:
            found = recorded.differences(variant, calls)
        except ValueError as error:
            differing += 1
            print(error, flush=True)
            continue
        differing += bool(found)
        told = "; ".join(
            f"call {d.call}: {d.bytes} of {d.size} bytes of {d.region}" + ("" if d.same_call else " (other inputs)")
            for d in found
        )
        code = digests_in((compiled or compile_for_emulation)(variant).library)
        newer = "" if code == recorded.variants[symbol]["code"] else "; recorded of other machine code"
        print(f"{symbol}: {told or 'equal'}{newer} ({time.perf_counter() - started:.1f} s)", flush=True)
    return differing


def keep(directories: Sequence[Path], target: Path, bytes_of: Sequence[str]) -> int:
    """Write one record of several, with the digests of all their variants, and the bytes of these only. Raises
    ValueError where they were not made alike, or two hold the same variant."""
    said: dict[str, dict[str, Any]] = {}
    contents: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for directory in directories:
        recorded = Recorded(directory)
        for family, own in recorded.said.items():
            into = said.setdefault(family, own | {"variants": {}})
            if into | {"variants": {}} != own | {"variants": {}}:
                raise ValueError(f"{directory} was made by other means than {directories[0]}: {own['certificate']}")
            if both := into["variants"].keys() & own["variants"].keys():
                raise ValueError(f"{directory} has variants that another one has, too: {', '.join(sorted(both))}")
            into["variants"] |= own["variants"]
            named = [own["variants"][symbol] for symbol in bytes_of if symbol in own["variants"]]
            kept = {digest for notes in named for left in notes["left"] for digest in left.values()}
            file = recorded.files[family]
            contents[family] |= {name: file[name] for name in file.files if name in kept}
    target.mkdir(parents=True, exist_ok=True)
    for family, of_family in said.items():
        np.savez_compressed(target / f"{family}.npz", said=json.dumps(of_family), **contents[family])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    for name in ("record", "compare"):
        way = ways.add_parser(name)
        way.add_argument("directory", type=Path)
        way.add_argument("symbols", nargs="*")
    ways.choices["record"].add_argument("--commit", required=True)
    ways.choices["record"].add_argument("--at-bounds", action="store_true")
    ways.choices["compare"].add_argument("--machine-code", action="store_true")
    ways.choices["compare"].add_argument("--hardware-sums", action="store_true")
    joining = ways.add_parser("keep")
    joining.add_argument("directories", nargs="+", type=Path, metavar="directory")
    joining.add_argument("--into", type=Path, required=True)
    joining.add_argument("--bytes-of", action="append", default=[], metavar="SYMBOL")
    given = parser.parse_args()
    if given.way == "keep":
        return keep(given.directories, given.into, given.bytes_of)
    if given.way == "record":
        return record(given.directory, given.commit, given.symbols, given.at_bounds)
    options = Options(machine_code=given.machine_code, hardware_sums=given.hardware_sums)
    return compare(given.directory, given.symbols, options)


if __name__ == "__main__":
    sys.exit(main())
