"""tsmla_prefill whose queries see keys by a mask, beside the same call without one.

    python -m benchmarks prefill-masked [--dims 256] [--dtype DTYPE] [--heads N ...] [--quick]

`dense` has no mask; `all set` has one that hides nothing, which is what reading a mask costs; `chosen` has a mask of
TOP_K random keys of those that a query sees, and `near` one of the TOP_K keys before it, most of whose tiles are
skipped whole.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tsmla import tsmla_key_mask, tsmla_prefill
from tsmla.problems.prefill import mask_words

from . import protocol, runner
from .bench_prefill import DIMS, DTYPES, Case
from .protocol import Candidate, Monitor

TOP_K = 2048
SHAPES = (
    (1, 2048, 2048, True),
    (1, 4096, 4096, True),
    (1, 8192, 8192, True),
    (1, 16384, 16384, True),
    (1, 2048, 16384, True),
    (1, 8192, 8192, False),
)
"""(sequences, queries, keys, causal)."""
ROWS_AT_ONCE = 512


@dataclasses.dataclass
class Masks:
    """Key masks of one call, [queries, words], by name."""

    queries: int
    keys: int
    causal: bool

    def of(self, name: str) -> torch.Tensor:
        if name == "chosen":
            lists, lengths = random_lists(self.queries, self.keys, self.causal)
            return tsmla_key_mask(lists, self.keys, topk_length=lengths)
        rows = []
        for last in _last_keys(self.queries, self.keys, self.causal):
            key = torch.arange(self.keys, device="cuda")
            seen = (key <= last) & (key > last - TOP_K) if name == "near" else torch.ones_like(key > last)
            rows.append(mask_words(seen))
        return torch.cat(rows)


def random_lists(queries: int, keys: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each query of one sequence, TOP_K random keys of those that it sees, [queries, TOP_K] int32, and how
    many they are, [queries] int32: all that it sees where it sees fewer, and -1 behind them."""
    lists, lengths = [], []
    for last in _last_keys(queries, keys, causal):
        order = torch.rand(len(last), keys, device="cuda").masked_fill(torch.arange(keys, device="cuda") > last, 2.0)
        chosen = order.topk(TOP_K, largest=False).indices
        lists.append(chosen.masked_fill(chosen > last, -1).int())
        lengths.append((last + 1).clamp(max=TOP_K).flatten().int())
    return torch.cat(lists), torch.cat(lengths)


def _last_keys(queries: int, keys: int, causal: bool) -> Iterator[torch.Tensor]:
    """Yield the last key that each query sees, [rows, 1], for ROWS_AT_ONCE queries at a time."""
    for first in range(0, queries, ROWS_AT_ONCE):
        query = torch.arange(first, min(first + ROWS_AT_ONCE, queries), device="cuda")[:, None]
        yield query + keys - queries if causal else torch.full_like(query, keys - 1)


def masked(case: Case, mask: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a launch with a mask into one output tensor, which it returns."""
    out = case.output()

    def launch() -> torch.Tensor:
        tsmla_prefill(
            case.query,
            case.key,
            case.value,
            None,
            case.ends_kv,
            case.keys,
            case.sequences,
            case.scale,
            is_causal=case.causal,
            return_lse=True,
            cum_seq_lens_q=case.ends_q,
            out=out,
            key_mask=mask,
        )
        return out

    return launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=1.0)
    parser.add_argument("--dims", choices=DIMS, default=192, type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--heads", type=int, help="heads of a query (default: those of the dims' models)")
    parser.add_argument("--quick", action="store_true", help="isolated launches only")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for shape in SHAPES:
            case = Case.make(*shape, DTYPES[options.dtype], options.dims, options.heads)
            masks = Masks(*shape[1:])
            launches = {"dense": case.ours()}
            launches |= {name: masked(case, masks.of(name)) for name in ("all set", "chosen", "near")}
            protocol.agree({"tsmla": launches["dense"], "all set": launches["all set"]}, 0.01)
            candidates = [Candidate(name, launch) for name, launch in launches.items()]
            for regime in protocol.REGIMES[: 1 if options.quick else None]:
                timings = protocol.measure(candidates, regime, monitor, options.seconds)
                said = {"shape": shape, "heads": case.query.shape[1], "dims": options.dims, "dtype": options.dtype}
                results.append({**said, "regime": regime, "timings": timings})
            del case, launches, candidates, masks
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "top_k": TOP_K, "results": results}
    heads = f"-{options.heads}-heads" if options.heads else ""
    path = runner.write_record(options.results, f"prefill-masked-{options.dims}-{options.dtype}{heads}", record)
    names = tuple(results[0]["timings"])
    header = ("queries", "keys", "mask", "heads", "regime", *(f"{name} us" for name in names), "all set", "MHz")
    print(runner.table(header, (_row(result, names) for result in results)))
    print(path)


def _row(result: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    _, queries, keys, causal = result["shape"]
    timings = result["timings"]
    times = [timings[name].median_us for name in names]
    said = queries, keys, "causal" if causal else "full", result["heads"], result["regime"]
    return *said, *times, f"{times[1] / times[0]:.3f}", timings[names[0]].sm_clock_mhz
