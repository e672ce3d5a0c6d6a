"""SM clocks that whole calls take, to compare the emulator's timing model with.

    python -m benchmarks clocks [--predictions FILE] [--variants DIRECTORY ...] [--commit HASH]
    python -m benchmarks clocks --peer flash-attn-4=flash_attn.cute:flash_attn_func [--predictions FILE]

Before and after a call a small kernel notes every SM's clock; what the two take alone is measured and taken off, so
that the numbers hold at whatever clock the GPU runs, launches included. Each launch stands alone, from a cold L2.

--variants: directories of libraries with changed prefill kernels (`build_aot`); those of a dtype are timed in turn at
    one shape.
--predictions: prints the errors of these predictions.
--peer: times another package's kernels instead of tsmla's. The function takes query, key and value [sequences, tokens,
    heads, dim] and `causal`; results are compared with float32 before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tsmla import tsmla_prefill
from tsmla.operators.checks import TORCH_DTYPE_OF

from . import bench_decode, bench_prefill, protocol, runner
from .clock_cases import CASES, LATER_CASES, PEER_CASES, VARIANT_SHAPE, ClockCase, PeerCase, variant_of
from .compare_libraries import served_from

SPIN_CYCLES = 2_000_000
GAP_SECONDS = 0.02


class Marks:
    """Notes clock and time of every SM, before and after what is queued between."""

    def __init__(self, scratch: Path):
        library = scratch / "mark.so"
        source = Path(__file__).parent / "microbench" / "mark.cu"
        target = "-gencode=arch=compute_90a,code=sm_90a"
        subprocess.run(
            ["nvcc", "-O3", "-std=c++17", target, "-shared", "-Xcompiler", "-fPIC", "-o", library, source], check=True
        )
        self._mark = ctypes.CDLL(str(library)).mark
        self._sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._flush = protocol.Flush()
        self._before, self._after = (torch.zeros(256, 2, dtype=torch.int64, device="cuda") for _ in range(2))

    def between(self, launch: Callable[[], Any]) -> tuple[float, float]:
        """Return clocks and nanoseconds of the median SM between the two notes."""
        time.sleep(GAP_SECONDS)
        torch.cuda._sleep(SPIN_CYCLES)
        self._flush()
        self._before.zero_()
        self._after.zero_()
        self._note(self._before)
        launch()
        self._note(self._after)
        torch.cuda.synchronize()
        passed = (self._after - self._before)[(self._before[:, 0] > 0) & (self._after[:, 0] > 0)].cpu()
        clocks, ns = passed.double().median(dim=0).values.tolist()
        return clocks, ns

    def _note(self, out: torch.Tensor) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self._mark(ctypes.c_void_p(out.data_ptr()), 4 * self._sms, stream):
            raise RuntimeError("the kernel that notes clocks did not start")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    parser.add_argument("--predictions", type=runner.existing, metavar="FILE")
    parser.add_argument("--variants", type=runner.existing, nargs="*", default=[], metavar="DIRECTORY")
    parser.add_argument("--peer", metavar="NAME=MODULE:FUNCTION", type=runner.other)
    parser.add_argument("--rounds", type=int, default=11)


def run(options: argparse.Namespace) -> None:
    predicted = json.loads(options.predictions.read_text()) if options.predictions else {"cases": {}, "variants": {}}
    results: dict[str, Any] = {}
    variants: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, protocol.Monitor() as monitor:
        marks = Marks(Path(scratch))
        cases: Any = (*CASES, *LATER_CASES)
        if options.peer:
            cases = [case for case in PEER_CASES if case.package == options.peer[0]]
        for case in cases:
            try:
                launch = _launch_peer(case, options.peer[1]) if isinstance(case, PeerCase) else _launch(case)
                results[case.name] = _measured(marks, {case.name: launch}, options.rounds)[case.name]
            except (RuntimeError, NotImplementedError, ValueError) as error:  # the others are worth having
                print(f"{case.name}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
        if options.variants:
            for dtype in dict.fromkeys(variant_of(directory).dtype for directory in options.variants):
                own = [directory for directory in options.variants if variant_of(directory).dtype is dtype]
                case, launches = _variants(own)
                variants |= _measured(marks, launches, options.rounds)
                del case  # graphs do not keep the tensors that they read
        clocks = [clock for _, clock, _ in monitor.samples]
    record = {
        "certificate": runner.certificate(options.commit),
        "sm_clock_mhz": [min(clocks), max(clocks)] if clocks else None,
        "cases": results,
        "variants": variants,
    }
    name = f"clocks-{options.peer[0]}" if options.peer else "clocks"
    path = runner.write_record(options.results, name, record)
    for measured, kind in ((results, "cases"), (variants, "variants")):
        rows = [
            (
                name,
                got["clocks"],
                got["ghz"],
                modelled := predicted[kind].get(name, {}).get("clocks"),
                modelled and 100 * (modelled / got["clocks"] - 1),
            )
            for name, got in measured.items()
        ]
        print(runner.table(("call", "clk", "GHz", "predicted", "error %"), rows))
    print(path)


def _measured(marks: Marks, launches: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Return medians; launches are in an order drawn anew each round. `between` is what the two notes take alone, which
    is taken off."""
    for launch in launches.values():
        launch()
    torch.cuda.synchronize()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in launches}
    alone = []
    for _ in range(rounds):
        alone.append(marks.between(lambda: None)[0])
        for name in random.sample(sorted(launches), len(launches)):
            taken[name].append(marks.between(launches[name]))
    off = statistics.median(alone)
    found = {}
    for name, pairs in taken.items():
        clocks = sorted(clock for clock, _ in pairs)
        ghz = statistics.median(clock / ns for clock, ns in pairs)
        found[name] = {
            "clocks": statistics.median(clocks) - off,
            "least": clocks[0] - off,
            "most": clocks[-1] - off,
            "ghz": ghz,
            "between": off,
        }
    return found


def _launch(case: ClockCase) -> Callable[[], Any]:
    sequences, queries, keys, heads = case.shape
    if case.family == "prefill":
        assert heads == bench_prefill.DIMS[192][1]
        dtype = bench_prefill.DTYPES[case.dtype]
        return bench_prefill.Case.make(sequences, queries, keys, case.mask == "causal", dtype).ours()
    made = bench_decode.Case.make(sequences, queries, keys, heads, bench_decode.FIXED, bench_decode.DTYPES[case.dtype])
    return made.ours()


def _launch_peer(case: PeerCase, function: Callable[..., Any]) -> Callable[[], Any]:
    """Return a launch of a peer's function. Raises RuntimeError where results are not attention's."""
    sequences, queries, keys, heads = case.shape
    d_qk, d_v = case.dims
    query, key, value = (
        torch.randn(sequences, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        for tokens, dim in ((queries, d_qk), (keys, d_qk), (keys, d_v))
    )

    def launch() -> torch.Tensor:
        made = function(query, key, value, causal=case.causal)
        return made[0] if isinstance(made, tuple) else made

    rows, of = 64, (sequences - 1, heads - 1)  # the last rows of the last head
    scores = query[of[0], -rows:, of[1]].float() @ key[of[0], :, of[1]].float().T * d_qk**-0.5
    if case.causal:
        scores += torch.full_like(scores, -torch.inf).triu(1 + keys - rows)
    expected = scores.softmax(-1) @ value[of[0], :, of[1]].float()
    got = launch()[of[0], -rows:, of[1]].float()
    difference = float((got - expected).norm() / expected.norm())
    if not difference < bench_prefill.MAX_DIFFERENCE[2]:
        raise RuntimeError(f"results differ from float32 by {difference:.2e} (relative RMS)")
    return launch


def _variants(directories: list[Path]) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Return what must outlive the launches, and the launches, which are replayed graphs. All directories are of one
    dtype."""
    sequences, queries, keys, _ = VARIANT_SHAPE
    case = bench_prefill.Case.make(sequences, queries, keys, False, TORCH_DTYPE_OF[variant_of(directories[0]).dtype])
    launches, kept, first = {}, [], None
    for directory in directories:
        out = case.output()
        kept.append(out)

        def launch(out: torch.Tensor = out) -> None:
            tsmla_prefill(
                case.query,
                case.key,
                case.value,
                None,
                case.ends_kv,
                case.keys,
                case.sequences,
                case.scale,
                is_causal=False,
                return_lse=False,
                cum_seq_lens_q=case.ends_q,
                out=out,
            )

        with served_from(directory):
            launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
        result = out.float()
        first = result if first is None else first
        difference = float((result - first).norm() / first.norm())
        if not difference < 0.03:  # 8-bit tiles of other sizes round other probabilities
            print(f"{directory.name} differs from the first by {difference:.2e}; left out", file=sys.stderr)
            continue
        launches[directory.name] = graph.replay
    return (case, kept), launches
