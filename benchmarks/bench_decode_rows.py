"""tsmla_decode with caches of different rows in one run: bf16, e4m3, DeepSeek's 656 bytes, and SnapMLA's, with a scale
for each key.

    python -m benchmarks decode-rows [--seconds S] [--quick]

All have the same random keys, pages and queries; those with scales are quantised before. Times are of replayed graphs,
as those of bench_decode.py. `of bf16` is the time divided by that of bf16 rows. Where vLLM is installed, two decodes of
FlashMLA run in turn with tsmla's: its dense one, of the bf16 rows, and its sparse one, of the 656 bytes, which is given
all keys.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tsmla import mla_write_cache
from tsmla.identity.row_format import ROWS

from . import protocol, runner
from .bench_decode import FIXED, LATENT, PAGE, ROPE, Case
from .peers import vllm_wheel
from .protocol import Candidate, Monitor

SHAPES = (
    *((128, 1, keys, 16, FIXED) for keys in (4096, 8192)),
    *((requests, 1, 4096, 16, FIXED) for requests in (1, 4, 8, 32)),
    (1, 1, 1024, 16, FIXED),
    (1, 1, 8192, 128, FIXED),
    (32, 1, 8192, 64, FIXED),
    (128, 1, 4096, 128, FIXED),
)
"""Shapes: batches that memory bounds, small ones, and one that arithmetic bounds."""
MAX_DIFFERENCE = 0.08
"""Relative RMS difference of two row formats' results above which one of them is wrong."""
E4M3 = torch.float8_e4m3fn
OURS = ("bf16", "e4m3", "fp8_ds_mla", "snapmla")
THEIRS = ("FlashMLA", "FlashMLA sparse")


def scaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return SnapMLA's rows of [.., 576] numbers, with scales that are powers of two."""
    outer = rows.shape[:-1]
    latent = torch.empty(*outer, LATENT, dtype=E4M3, device="cuda")
    rope = torch.empty(*outer, ROPE, dtype=torch.bfloat16, device="cuda")
    scales = torch.empty(outer, device="cuda")
    for begin in range(0, len(rows), 4096):
        part, span = rows[begin : begin + 4096].float(), slice(begin, begin + 4096)
        scale = torch.exp2(torch.ceil(torch.log2(part[..., :LATENT].abs().amax(-1) / 448)))
        latent[span], rope[span] = part[..., :LATENT] / scale[..., None], part[..., LATENT:] / scale[..., None]
        scales[span] = scale
    return latent, rope, scales


def snapmla(case: Case) -> Callable[[], torch.Tensor]:
    """Return a launch over the case's keys as SnapMLA's rows."""
    return case.ours(query=scaled(case.whole_query), kv_cache=scaled(case.kv_cache))


def e4m3(case: Case) -> Callable[[], torch.Tensor]:
    return dataclasses.replace(case, query=case.whole_query.to(E4M3), kv_cache=case.kv_cache.to(E4M3)).ours()


def of_deepseek(case: Case) -> Case:
    """Return the case with its keys as DeepSeek's rows, which `mla_write_cache` makes of them."""
    pages, page_size = case.kv_cache.shape[:2]
    cache = torch.empty(pages, page_size, ROWS["fp8_ds_mla"].bytes, dtype=torch.uint8, device="cuda")
    rows = case.kv_cache.view(-1, LATENT + ROPE)
    slots = torch.arange(len(rows), device="cuda")
    mla_write_cache(rows[:, :LATENT], rows[:, LATENT:], slots, cache, format="fp8_ds_mla")
    return dataclasses.replace(case, kv_cache=cache)


def all_launches(case: Case) -> dict[str, Callable[[], torch.Tensor]]:
    """Return launches by the names of `OURS` and, where vLLM is installed, of `THEIRS`."""
    whole = of_deepseek(case)
    launches = {"bf16": case.ours(), "e4m3": e4m3(case), "fp8_ds_mla": whole.ours(), "snapmla": snapmla(case)}
    if not vllm_wheel.installed():
        return launches
    theirs = vllm_wheel.flash_mla(case), vllm_wheel.flash_mla_sparse(whole)
    return launches | {name: launch for name, launch in zip(THEIRS, theirs, strict=True) if launch}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=0.4)
    parser.add_argument("--quick", action="store_true", help="isolated launches only")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for shape in SHAPES:
            case = Case.make(*shape, torch.bfloat16)
            launches = all_launches(case)
            protocol.agree({"tsmla": launches["bf16"], **launches}, MAX_DIFFERENCE)
            candidates = [Candidate(name, launch) for name, launch in launches.items()]
            for regime in protocol.REGIMES[: 1 if options.quick else None]:
                timings = protocol.measure(candidates, regime, monitor, options.seconds, graph=True)
                results.append({"shape": shape, "regime": regime, "timings": timings})
            del case, launches, candidates
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "page": PAGE, "results": results}
    path = runner.write_record(options.results, "rows-decode", record)
    names = (*OURS, *(name for name in THEIRS if name in results[0]["timings"]))
    places = ("requests", "q_len", "keys", "heads", "regime")
    times = *(f"{name} us" for name in names), *(f"{name} of bf16" for name in names[1:])
    header: tuple[str, ...] = (*places, *times, "MHz")
    print(runner.table(header, (_row(result, names) for result in results)))
    print(path)


def _row(result: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    timings = result["timings"]
    micros = [timings[name].median_us for name in names]
    others = [f"{time / micros[0]:.3f}" for time in micros[1:]]
    return *result["shape"][:4], result["regime"], *micros, *others, timings["bf16"].sm_clock_mhz
