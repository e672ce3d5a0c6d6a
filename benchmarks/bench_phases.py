"""Phases of the KV tiles of one CTA of a prefill, on the GPU and in the timing model.

    python -m benchmarks phases DIRECTORY ... [--commit HASH]       on the GPU: kernels that leave stamps
    python -m benchmarks phases DIRECTORY ... --model RECORD        anywhere: the model's phases beside them

The kernels in DIRECTORIES (`build_aot`, prefill without mask and with LSE) are changed: in place of the LSE, row 4 n +
p of a warpgroup's 64 rows holds the SM's clock (32 bits) at phase p of tile n:

- 0: before it waits for the tile's keys;
- 1: after its score product;
- 2: after its softmax as written;
- 3: after the value product of the tile before.

Tiles 1 to 15 of 16 have stamps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from . import runner

PHASES = ("issue, scores ready", "softmax", "values ready", "the rest")
TILES, ROWS = 16, 64
QUERIES, HEADS = 8192, 128
SETTLED = range(6, 14)
"""Tiles whose medians are compared: neither at the start nor at the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", type=runner.existing, nargs="+", metavar="DIRECTORY")
    parser.add_argument("--model", type=runner.existing, metavar="RECORD")
    parser.add_argument("--commit")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "current")


def run(options: argparse.Namespace) -> None:
    if options.model:
        measured = json.loads(options.model.read_text())["phases"]
        for dtype, phases in map(modelled, options.directories):
            print(dtype, *PHASES, "a tile: measured", measured[dtype]["medians"], "modelled", phases)
        return
    runner.require_gpu()
    record = {"certificate": runner.certificate(options.commit), "phases": dict(map(_measured, options.directories))}
    print(runner.write_record(options.results, "phases", record))


def _measured(directory: Path) -> tuple[str, dict[str, Any]]:
    import torch
    from tsmla import tsmla_prefill
    from tsmla.operators.checks import TORCH_DTYPE_OF
    from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry

    from . import bench_prefill
    from .clock_cases import variant_of
    from .compare_libraries import served_from

    variant = variant_of(directory)
    geometry = PrefillGeometry.of(variant)
    keys = TILES * geometry.tile_kv
    case = bench_prefill.Case.make(1, QUERIES, keys, False, TORCH_DTYPE_OF[variant.dtype])
    with served_from(directory):
        for _ in range(3):
            _, lse = tsmla_prefill(
                case.query,
                case.key,
                case.value,
                None,
                case.ends_kv,
                case.keys,
                1,
                case.scale,
                is_causal=False,
                return_lse=True,
                cum_seq_lens_q=case.ends_q,
                out=case.output(),
            )
        torch.cuda.synchronize()
    whole = QUERIES // geometry.tile_q * geometry.tile_q
    stamps = lse.view(torch.int32)[:whole].reshape(-1, geometry.tile_q // ROWS, TILES, 4, HEADS).cpu()
    ctas = [stamps[tile, ..., head].tolist() for tile in range(0, stamps.shape[0], 8) for head in range(0, HEADS, 16)]
    each = [statistics_of(cta) for cta in ctas]
    medians = [statistics.median(one[phase] for one in each) for phase in range(5)]
    return variant.dtype.value, {"medians": medians, "ctas": len(ctas), "one": ctas[len(ctas) // 2]}


def statistics_of(cta: list[list[list[int]]]) -> list[float]:
    """Return median clocks of the phases of PHASES and of a tile, from one CTA's stamps by warpgroup, tile and
    phase."""

    def between(a: int, b: int) -> int:
        return (b - a) % 2**32

    found: list[list[int]] = [[] for _ in range(5)]
    for group in cta:
        for tile in SETTLED:
            start, scores, softmax, values = group[tile]
            following = group[tile + 1][0]
            pairs = ((start, scores), (scores, softmax), (softmax, values), (values, following), (start, following))
            for phase, (a, b) in enumerate(pairs):
                found[phase].append(between(a, b))
    return [float(statistics.median(phase)) for phase in found]


def modelled(directory: Path) -> tuple[str, list[float]]:
    """Return the dtype of a kernel in such a directory, with its object and PTX, and its phases in the timing model:
    from the waits that lie beside its stamps."""
    from tsmla_emulator.time.machines import H100
    from tsmla_emulator.time.problem import Shape, Traced, _call_prefill
    from tsmla_emulator.time.replay import Memory, replay
    from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry

    from .clock_cases import variant_of
    from .predict_clocks import _compiled

    variant = variant_of(directory)
    geometry = PrefillGeometry.of(variant)
    shape = Shape(1, QUERIES, TILES * geometry.tile_kv, HEADS)
    found = Traced(variant, shape, H100.processors, lambda v: _compiled(directory, v.symbol()))
    call = found.run(lambda: _call_prefill(variant, 2 * geometry.tile_q, shape.keys), (0,))
    prepared = found.prepared(call, 0, H100)
    shown = replay(prepared, call.report.traces, Memory(H100.copy_latency.value, H100.l2.value))
    cta = []
    for group in range(geometry.tile_q // ROWS):
        own = [one for one in shown.waits if one.warp == 4 * (1 + group)]
        keys = [one for one in own if prepared.costs[one.position].kind == "wait"]
        done = [one for one in own if prepared.costs[one.position].kind == "wgmma_wait"]
        # waits: Q, K of tile 0, then K and V of each tile, V; products: the first scores, then scores and values each
        tiles = [[keys[2 * n].start, done[2 * n - 1].end, done[2 * n].start, done[2 * n].end] for n in range(1, TILES)]
        cta.append([[0] * 4, *tiles])
    return variant.dtype.value, statistics_of(cta)
