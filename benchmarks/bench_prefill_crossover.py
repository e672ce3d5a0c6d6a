"""A prompt's tokens that chose their keys, by a mask over all keys and by a list for each token: from where lists win.

    python -m benchmarks prefill-crossover [--heads N ...] [--seconds S]

Each query chooses TOP_K random keys of those that it sees; the same lists go to all candidates. Masked: tsmla_key_mask
turns the lists into a mask, and tsmla_prefill reads all keys, expanded, in two head dims and two dtypes. Lists:
tsmla_sparse_prefill gathers rows of the latent cache, in three formats, as does FlashMLA's sparse prefill (bf16, 64 or
128 heads, fewer filled up) where vLLM is installed. What lies before and behind attention is not timed: a mask needs
keys and values expanded from the latent rows, lists need queries and outputs projected to and from them.

SHAPES are whole prompts, and the last queries of longer ones. Launches are replayed graphs, without pauses.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tsmla import tsmla_key_mask

from . import bench_prefill_chosen, protocol, runner
from .bench_decode_chosen import MAX_DIFFERENCE, TOP_K
from .bench_decode_chosen import Case as ChosenCase
from .bench_prefill import DIMS, DTYPES
from .bench_prefill import Case as DenseCase
from .bench_prefill_chosen import FORMATS
from .bench_prefill_masked import masked, random_lists
from .protocol import Candidate, Monitor

HEADS = (8, 16, 32, 64, 128)
PROMPTS = (2048, 4096, 8192, 16384)
LAST, CONTEXTS = 2048, (4096, 8192, 16384, 32768, 65536, 131072)
SHAPES = (*((keys, keys) for keys in PROMPTS), *((LAST, keys) for keys in CONTEXTS))
"""(queries, keys)."""
MASKED = tuple((dims, dtype) for dims in DIMS for dtype in ("bf16", "e4m3"))
"""(columns of a query, dtype)."""


def by_masks(
    lists: torch.Tensor, lengths: torch.Tensor, keys: int, heads: int, dims: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return launches by dtype, which make a mask of the lists and attend to what it shows; their keys are the same but
    for rounding."""
    first = DenseCase.make(1, len(lists), keys, True, torch.bfloat16, dims, heads)
    found = {}
    for dtype in (dtype for of_dims, dtype in MASKED if of_dims == dims):
        query, key, value = (pack.to(DTYPES[dtype]) for pack in (first.query, first.key, first.value))
        found[dtype] = _masked(dataclasses.replace(first, query=query, key=key, value=value), lists, lengths)
    return found


def _masked(case: DenseCase, lists: torch.Tensor, lengths: torch.Tensor) -> Callable[[], torch.Tensor]:
    mask = torch.empty(case.queries, case.keys // 32, dtype=torch.int32, device="cuda")
    attend = masked(case, mask)

    def launch() -> torch.Tensor:
        tsmla_key_mask(lists, case.keys, topk_length=lengths, out=mask)
        return attend()

    return launch


def candidates(lists: torch.Tensor, lengths: torch.Tensor, keys: int, heads: int) -> list[Candidate]:
    """Return all ways to compute a shape. Ends the process where two of those that have the same keys differ."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for dims in DIMS:
        same = by_masks(lists, lengths, keys, heads, dims)
        protocol.agree({"tsmla": same["bf16"], **same}, MAX_DIFFERENCE)
        found |= {f"masked {dims} {dtype}": launch for dtype, launch in same.items()}
    same = bench_prefill_chosen.launches(ChosenCase.of(lists, lengths, heads, keys, FORMATS), FORMATS)
    protocol.agree({"tsmla": same["bf16"], **same}, MAX_DIFFERENCE)
    found |= {f"lists {name}" if name in FORMATS else name: launch for name, launch in same.items()}
    return [Candidate(name, launch) for name, launch in found.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=0.1)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS, help="heads of a query (%(default)s)")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for queries, keys in SHAPES:
            lists, lengths = random_lists(queries, keys, causal=True)
            for heads in options.heads:
                ways = candidates(lists, lengths, keys, heads)
                timings = protocol.measure(ways, "back to back", monitor, options.seconds, graph=True)
                results.append({"shape": (queries, keys), "heads": heads, "timings": timings})
                del ways
                torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "top_k": TOP_K, "results": results}
    path = runner.write_record(options.results, "prefill-crossover", record)
    names = tuple(results[0]["timings"])
    header = ("queries", "keys", "heads", *(f"{name} us" for name in names), "MHz")
    print(runner.table(header, (_row(result, names) for result in results)))
    print(path)


def _row(result: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    timings = result["timings"]
    return *result["shape"], result["heads"], *(timings[x].median_us for x in names), timings[names[0]].sm_clock_mhz
