"""tsmla_sparse_prefill, prompts by chosen keys (sparse attention), beside FlashMLA's sparse prefill.

    python -m benchmarks prefill-chosen [--seconds S] [--quick] [--heads N ...] [--formats F ...]

Each of QUERIES query tokens chooses TOP_K random keys of 8,192 or of 65,536, without causality. Rows are of bf16, of
656 bytes for a bf16 query, or of e4m3 for an e4m3 query. Times are of replayed graphs, as those of bench_decode.py.
Where vLLM is installed, its FlashMLA (bf16, 64 or 128 heads, fewer filled up) runs in turn with tsmla's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
import tsmla

from . import protocol, runner
from .bench_decode import LATENT
from .bench_decode_chosen import MAX_DIFFERENCE, TOP_K, Case
from .peers import vllm_wheel
from .protocol import Candidate, Monitor

QUERIES = 4096
SHAPES = tuple((keys, heads) for keys in (8192, 65536) for heads in (128, 64, 16))
"""(keys, heads)."""
FORMATS = ("bf16", "fp8_ds_mla", "e4m3")


def ours(case: Case, kv: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a launch of tsmla_sparse_prefill."""
    tokens, heads, _ = case.query.shape
    size = tsmla.decode_workspace_size(tokens, 1, heads, TOP_K)
    workspace = torch.empty(size, dtype=torch.int8, device="cuda")
    out = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(tokens, heads, device="cuda")

    def launch() -> torch.Tensor:
        tsmla.tsmla_sparse_prefill(
            case.query, kv, case.indices, case.scale, topk_length=case.lengths, out=out, lse=lse,
            workspace_buffer=workspace,
        )  # fmt: skip
        return out

    return launch


def launches(case: Case, formats: Collection[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return launches by name, of ours and, where vLLM is installed, of its FlashMLA."""
    rows = case.cache.flatten(0, 1)
    found = {}
    if "bf16" in formats:
        found["bf16"] = ours(case, rows)
    if "fp8_ds_mla" in formats:
        found["fp8_ds_mla"] = ours(case, case.whole)
    if "e4m3" in formats:
        rounded = dataclasses.replace(case, query=case.query.to(torch.float8_e4m3fn))
        found["e4m3"] = ours(rounded, rows.to(torch.float8_e4m3fn))
    if vllm_wheel.installed():
        found["FlashMLA sparse"] = vllm_wheel.flash_mla_chosen_prefill(
            case.query, rows, case.indices, case.scale, case.lengths
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=1.0)
    parser.add_argument("--quick", action="store_true", help="isolated launches only")
    parser.add_argument("--heads", type=int, nargs="+", help="only shapes with so many heads")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS, help="formats of our rows")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for keys, heads in SHAPES:
            if options.heads and heads not in options.heads:
                continue
            timed = launches(Case.make(QUERIES, heads, keys, options.formats), options.formats)
            protocol.agree({"tsmla": timed[next(iter(timed))], **timed}, MAX_DIFFERENCE)
            candidates = [Candidate(name, launch) for name, launch in timed.items()]
            for regime in protocol.REGIMES[: 1 if options.quick else None]:
                timings = protocol.measure(candidates, regime, monitor, options.seconds, graph=True)
                results.append({"shape": (keys, heads), "regime": regime, "timings": timings})
            del timed, candidates
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "queries": QUERIES, "top_k": TOP_K, "results": results}
    path = runner.write_record(options.results, "chosen-prefill", record)
    names = tuple(results[0]["timings"])
    header = ("keys", "heads", "regime", *(f"{name} us" for name in names), "MHz")
    print(runner.table(header, (_row(result, names) for result in results)))
    print(path)


def _row(result: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    timings = result["timings"]
    return *result["shape"], result["regime"], *(timings[x].median_us for x in names), timings[names[0]].sm_clock_mhz
