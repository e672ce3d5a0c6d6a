"""Two builds of the kernels against each other in one process, at the shapes of the other runners.

    python -m benchmarks compare-libraries OLD NEW [--family decode] [--dtypes bf16 fp8_ds_mla] [--quick]

OLD and NEW are directories of libraries. Every call is a replayed CUDA graph from a cold L2; the order of candidates is
drawn anew each round. The same machine code runs up to 2 % faster or slower on short calls wherever else it lies in
memory, so each library is loaded twice, from two copies, with results of its own: `noise` is the ratio of the two
copies of OLD, and `ratio` compares the medians of both builds over their copies. `same` says whether outputs have the
same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tsmla.identity.call import OPERATORS
from tsmla.identity.variant import Variant
from tsmla.loading import loader, manifest, resolve

from . import bench_decode, bench_decode_rows, bench_prefill, protocol, runner

COPIES = 2
MODULES = {"decode": bench_decode, "prefill": bench_prefill}
Launch = Callable[[], torch.Tensor]
ROWS: dict[str, Callable[[Any], Callable[[], Launch]]] = {
    "fp8_ds_mla": lambda case: bench_decode_rows.of_deepseek(case).ours,
    "snapmla": lambda case: functools.partial(bench_decode_rows.snapmla, case),
}
"""Formats of cache rows that are no dtype: a decode's case -> what makes a launch over its keys as such rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=1.0)
    parser.add_argument("old", type=runner.existing)
    parser.add_argument("new", type=runner.existing)
    parser.add_argument("--family", choices=MODULES, nargs="+", default=list(MODULES))
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "e4m3"], help=f"dtypes, or {', '.join(ROWS)}")
    parser.add_argument("--regime", choices=protocol.REGIMES, default=protocol.REGIMES[1])
    parser.add_argument("--quick", action="store_true", help="every third shape only")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, protocol.Monitor() as monitor:
        builds = {
            f"{name} {copy}": Path(shutil.copytree(directory, Path(scratch, f"{name}{copy}")))
            for name, directory in (("old", options.old), ("new", options.new))
            for copy in range(COPIES)
        }
        for family, shape, dtype, make in _cases(options):
            started = time.monotonic()
            found: dict[str, Any] = {"family": family, "shape": shape, "dtype": dtype}
            try:
                found |= _compared(make, builds, monitor, options)
            except NotImplementedError as error:
                print(f"{' x '.join(map(str, shape))} {dtype}: left out, {error}")
                continue
            found["sm_clock_mhz"], found["power_w"] = monitor.since(started)
            results.append(found)
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "results": results}
    path = runner.write_record(options.results, "compare-libraries", record)
    header = ("family", "shape", "dtype", "rounds", "old us", "new us", "ratio", "noise", "same", "MHz")
    print(runner.table(header, (_row(result) for result in results)))
    print(path)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, tuple, str, Callable[[], Launch]]]:
    """Yield family, shape, dtype or format of rows, and what makes a launch, for every case that was asked for."""
    step = 3 if options.quick else 1
    for family in options.family:
        module = MODULES[family]
        for dtype in options.dtypes:
            rows = ROWS.get(dtype) if family == "decode" else None
            if not rows and dtype not in module.DTYPES:
                continue
            for shape in (bench_decode_rows if rows else module).SHAPES[::step]:
                case = module.Case.make(*shape, module.DTYPES["bf16" if rows else dtype])
                yield family, shape, dtype, rows(case) if rows else case.ours


def _compared(
    make: Callable[[], Launch], builds: dict[str, Path], monitor: protocol.Monitor, options: argparse.Namespace
) -> dict[str, Any]:
    """Return medians in microseconds of every copy, and whether all gave the same bytes."""
    replays: dict[str, Callable[[], None]] = {}
    launches, outputs = [make() for _ in builds], []  # what they hold must outlive the graphs
    for launch, (name, directory) in zip(launches, builds.items(), strict=True):
        with served_from(directory):
            outputs.append(launch())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
        replays[name] = graph.replay
    candidates = [protocol.Candidate(name, replay) for name, replay in replays.items()]
    timings = protocol.measure(candidates, options.regime, monitor, options.seconds)
    micros = {name: timing.median_us for name, timing in timings.items()}
    same = all(torch.equal(outputs[0].view(torch.uint8), other.view(torch.uint8)) for other in outputs)
    return {"rounds": timings["old 0"].launches, "us": micros, "same": same}


@contextlib.contextmanager
def served_from(directory: Path) -> Iterator[None]:
    """Make operators run from the libraries of a directory, inside this context."""

    def found(variant: Variant) -> resolve.Resolved:
        return resolve.Resolved(_kernel(directory, variant), "shipped")

    resolve.forget()
    try:
        with mock.patch.object(resolve, "_search", found):
            yield
    finally:
        resolve.forget()


def _kernel(directory: Path, variant: Variant) -> Callable[..., None]:
    """Return the kernel of a variant, called with today's arguments: one of an older build is not given those that it
    does not know.

    A manifest of an older schema is read, too: what has changed since then is not used here.
    """
    (path,) = directory.glob(f"tsmla_{variant.family}_{variant.arch}_*.so")
    schema = json.loads((directory / "manifest.json").read_text())["schema"]
    with mock.patch.object(manifest, "SCHEMA", schema):
        library = loader.open_library(path)
    function = library.function(variant, check_signature=False)
    (signature,) = (kernel.signature for kernel in library.manifest.kernels if kernel.variant == variant)
    table = OPERATORS[variant.family].arguments
    known = [f"{argument.name}: " in signature for argument in table]

    def launch(*arguments: Any) -> None:
        for argument, value, knows in zip(table, arguments, known, strict=True):
            if not knows and isinstance(value, torch.Tensor) and value.numel():
                raise NotImplementedError(f"{directory} does not know {argument.name}")
        function(*itertools.compress(arguments, known))

    return launch


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    micros = result["us"]
    old, new = (statistics.mean(us for name, us in micros.items() if name.startswith(kind)) for kind in ("old", "new"))
    noise = micros["old 1"] / micros["old 0"]
    shape = " x ".join(map(str, result["shape"]))
    ratios = (f"{new / old:.4f}", f"{noise:.4f}")
    return (
        result["family"], shape, result["dtype"], result["rounds"], old, new, *ratios, result["same"],
        result["sm_clock_mhz"],
    )  # fmt: skip
