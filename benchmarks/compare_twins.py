"""Kernels that take PDL at run time against an older build's twins, one with PDL and one without, in one process.

    python -m benchmarks.compare_twins OLD NEW [--regime isolated] [--seconds 2]

OLD and NEW are directories of libraries; each is loaded from two copies, as in `compare_libraries`. Candidates are
OLD's two twins and NEW launched in both ways, as replayed CUDA graphs of one call and of a chain of eight. A chain's
calls follow each other at once, so that launches with PDL overlap. `ratio` is NEW's time over that of OLD's twin which
is launched alike; `better` is the faster of NEW's two times over the faster of OLD's twins.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tvm_ffi
from tsmla import loader, mla_kv_pack_quantize_fp8, resolve, tsmla_prefill
from tsmla.variant import Variant

from . import bench_decode, bench_pack, bench_prefill, protocol, runner

COPIES, CHAIN = 2, 8
FIXED, PACKED, MIXED = bench_decode.FIXED, bench_decode.PACKED, bench_decode.MIXED
DECODES = (
    (128, 1, 4096, 16, FIXED), (128, 1, 4096, 64, FIXED), (128, 1, 4096, 128, FIXED), (128, 2, 4096, 16, FIXED),
    (4, 4, 81920, 16, FIXED), (4, 4, 81920, 128, FIXED), (1, 1, 1024, 16, FIXED), (1, 1, 1024, 128, FIXED),
    (1, 1, 8192, 16, FIXED), (1, 1, 8192, 128, FIXED), (128, 1, 4096, 16, PACKED), (32, 64, 4096, 16, MIXED),
)  # fmt: skip
PREFILLS = (
    (1, 1024, 1024, True, 192), (1, 2048, 2048, True, 192), (16, 512, 512, True, 192), (1, 8192, 8192, True, 192),
    (1, 8192, 8192, False, 192), (4, 512, 81920, True, 192), (1, 2048, 2048, True, 128), (1, 2048, 2048, True, 256),
)  # fmt: skip
PACKS = ((64, 16), (1024, 128), (8192, 128))
Launch = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runner.add_arguments(parser, seconds=1.0)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--regime", choices=protocol.REGIMES, default=protocol.REGIMES[1])
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth case from I")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, protocol.Monitor() as monitor:
        builds = {
            f"{name} {copy}": Path(shutil.copytree(directory, Path(scratch, f"{name}{copy}")))
            for name, directory in (("old", options.old), ("new", options.new))
            for copy in range(COPIES)
        }
        for said, make in itertools.islice(_cases(), options.part[0], None, options.part[1]):
            launches = {
                f"{name} {'pdl' if pdl else 'plain'}": (directory, pdl, make(pdl))
                for name, directory in builds.items()
                for pdl in (False, True)
            }
            for calls in (1, CHAIN):
                started = time.monotonic()
                micros, same = _compared(launches, calls, monitor, options)
                clock, _ = monitor.since(started)
                results.append({**said, "calls": calls, "us": micros, "same": same, "sm_clock_mhz": clock})
                print(*_row(results[-1]), flush=True)
            del launches
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "results": results}
    print(runner.table(HEADER, (_row(result) for result in results)))
    print(runner.write_record(options.results, f"pdl-twins-{options.regime.replace(' ', '-')}", record))


def _cases() -> Iterator[tuple[dict[str, Any], Callable[[bool], Launch]]]:
    """What a case is, and what makes its launch, which returns its outputs."""
    for dtype in ("bf16", "e4m3"):
        for shape in DECODES:
            decode = bench_decode.Case.make(*shape, bench_decode.DTYPES[dtype])
            yield {"family": "decode", "shape": shape, "dtype": dtype}, lambda pdl, decode=decode: decode.ours(
                enable_pdl=pdl
            )
        for *shape, dims in PREFILLS:
            case = bench_prefill.Case.make(*shape, bench_prefill.DTYPES[dtype], dims)

            def make(pdl: bool, case: bench_prefill.Case = case) -> Launch:
                out = case.output()
                return lambda: tsmla_prefill(
                    case.query, case.key, case.value, None, case.ends_kv, case.keys, case.sequences, case.scale,
                    is_causal=case.causal, return_lse=True, cum_seq_lens_q=case.ends_q, out=out, enable_pdl=pdl,
                )[0]  # fmt: skip

            yield {"family": "prefill", "shape": (*shape, dims), "dtype": dtype}, make
    for shape in PACKS:
        pack = bench_pack.Case.make(*shape)
        yield {"family": "pack", "shape": shape, "dtype": "bf16"}, lambda pdl, pack=pack: lambda: (
            mla_kv_pack_quantize_fp8(
                pack.k_nope, pack.k_pe, pack.v, k_out=pack.k_out, v_out=pack.v_out, enable_pdl=pdl
            )[0]
        )


def _compared(launches: dict, calls: int, monitor: protocol.Monitor, options: argparse.Namespace) -> tuple[dict, bool]:
    """Medians in microseconds of one call of each candidate, and whether all gave the same bytes."""
    candidates, outputs = [], []
    for name, (directory, pdl, launch) in launches.items():
        with served_from(directory, name.startswith("old"), pdl):
            outputs.append(launch())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    launch()
        candidates.append(protocol.Candidate(name, graph.replay))
    timings = protocol.measure(candidates, options.regime, monitor, options.seconds)
    same = all(torch.equal(outputs[0].view(torch.uint8), other.view(torch.uint8)) for other in outputs)
    return {name: timing.median_us / calls for name, timing in timings.items()}, same


@contextlib.contextmanager
def served_from(directory: Path, twins: bool, pdl: bool) -> Iterator[None]:
    """A context in which operators run from the libraries of a directory, whose kernels are twins or take PDL."""

    def found(variant: Variant) -> resolve.Resolved:
        (path,) = directory.glob(f"tsmla_{variant.family}_{variant.arch}_*.so")
        loader._map_runtime()
        module = tvm_ffi.load_module(str(path))
        if not twins:
            return resolve.Resolved(module.get_function(variant.symbol()), "shipped")
        function = module.get_function(f"{variant.symbol()}_{'pdl' if pdl else 'nopdl'}")
        return resolve.Resolved(lambda *arguments: function(*arguments[:-1]), "shipped")

    resolve.forget()
    try:
        with mock.patch.object(resolve, "_search", found):
            yield
    finally:
        resolve.forget()


HEADER = ("family", "shape", "dtype", "calls", "old plain us", "old pdl", "new plain", "new pdl", "plain", "pdl",
          "better", "noise", "same", "MHz")  # fmt: skip


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    us = result["us"]
    old_plain, old_pdl, plain, pdl = (
        statistics.mean(us[f"{kind} {copy} {how}"] for copy in range(COPIES))
        for kind in ("old", "new") for how in ("plain", "pdl")
    )  # fmt: skip
    noise = us["old 1 plain"] / us["old 0 plain"]
    ratios = (plain / old_plain, pdl / old_pdl, min(plain, pdl) / min(old_plain, old_pdl), noise)
    return (
        result["family"], " x ".join(map(str, result["shape"])), result["dtype"], result["calls"], old_plain, old_pdl,
        plain, pdl, *(f"{ratio:.4f}" for ratio in ratios), result["same"], result["sm_clock_mhz"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
