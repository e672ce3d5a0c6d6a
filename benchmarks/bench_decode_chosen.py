"""tsmla_decode of chosen keys (sparse attention), beside FlashMLA's sparse decode and FlashAttention-3 as a gather.

    python -m benchmarks decode-chosen [--seconds S] [--quick] [--heads N ...]

Every query token chooses TOP_K random keys of SLOTS. Times are of replayed graphs, as those of bench_decode.py. Where
vLLM is installed, its FlashMLA (rows of 656 bytes, 64 or 128 heads, fewer filled up) and its FlashAttention-3 (bf16,
pages of one key) run in turn with tsmla's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
import tsmla
from tsmla import mla_write_cache, tsmla_decode
from tsmla.identity.row_format import ROWS

from . import protocol, runner
from .bench_decode import LATENT, PAGE, ROPE
from .peers import vllm_wheel
from .protocol import Candidate, Monitor

SHAPES = (
    *((requests, 1, 16) for requests in (1, 2, 4, 8, 16, 32, 64, 128)),
    (8, 1, 8),
    (8, 1, 128),
    (32, 1, 128),
    (128, 1, 64),
    (128, 1, 128),
    (128, 2, 128),
)
"""(requests, query tokens of each, heads)."""
TOP_K, SLOTS = 2048, 131072
MAX_DIFFERENCE = 0.08
"""Relative RMS difference of two row formats' results above which one of them is wrong."""


@dataclasses.dataclass
class Case:
    """One call: query [tokens, heads, 576], caches of the same rows in two formats, indices [tokens, TOP_K], and how
    many of each list count, [tokens] int32, all of them when None."""

    query: torch.Tensor
    cache: torch.Tensor
    whole: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    scale: float = (LATENT + ROPE) ** -0.5

    @classmethod
    def make(cls, tokens: int, heads: int, slots: int, formats: Collection[str]) -> Case:
        """Make a call whose tokens choose random keys of all `slots`."""
        indices = torch.stack([torch.randperm(slots, device="cuda")[:TOP_K] for _ in range(tokens)]).int()
        return cls.of(indices, None, heads, slots, formats)

    @classmethod
    def of(
        cls, indices: torch.Tensor, lengths: torch.Tensor | None, heads: int, slots: int, formats: Collection[str]
    ) -> Case:
        """Make a call of these lists over random rows."""
        cache = torch.randn(slots // PAGE, PAGE, LATENT + ROPE, device="cuda").bfloat16()
        whole = torch.empty(slots // PAGE, PAGE, ROWS["fp8_ds_mla"].bytes, dtype=torch.uint8, device="cuda")
        rows = cache.view(slots, -1)
        if "fp8_ds_mla" in formats:
            places = torch.arange(slots, device="cuda")
            mla_write_cache(rows[:, :LATENT], rows[:, LATENT:], places, whole, format="fp8_ds_mla")
        query = torch.randn(len(indices), heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        return cls(query, cache, whole, indices, lengths)

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def ours(self, cache: torch.Tensor) -> Callable[[], torch.Tensor]:
        tokens = len(self.query)
        size = tsmla.decode_workspace_size(tokens, 1, self.heads, TOP_K)
        workspace = torch.empty(size, dtype=torch.int8, device="cuda")
        out = torch.empty(tokens, self.heads, LATENT, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(tokens, self.heads, device="cuda")

        def launch() -> torch.Tensor:
            tsmla_decode(
                self.query, cache, workspace, LATENT, ROPE, None, None, None, self.scale, out=out, lse=lse,
                indices=self.indices, topk_length=self.lengths,
            )  # fmt: skip
            return out

        return launch

    def launches(self, formats: list[str]) -> dict[str, Callable[[], torch.Tensor]]:
        """Return launches by name, of ours and, where vLLM is installed, of its kernels."""
        caches = {"bf16": self.cache, "fp8_ds_mla": self.whole}
        found = {name: self.ours(caches[name]) for name in formats}
        if vllm_wheel.installed():
            if "fp8_ds_mla" in formats:
                found["FlashMLA sparse"] = vllm_wheel.flash_mla_chosen(self.query, self.whole, self.indices, self.scale)
            found["FA3 gather"] = vllm_wheel.fa3_chosen(self.query, self.cache, self.indices, self.scale)
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=0.4)
    parser.add_argument("--quick", action="store_true", help="isolated launches only")
    parser.add_argument("--heads", type=int, nargs="+", help="only shapes with so many heads")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_ds_mla"], help="formats of our rows")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for shape in SHAPES:
            requests, q_len, heads = shape
            if options.heads and heads not in options.heads:
                continue
            launches = Case.make(requests * q_len, heads, SLOTS, options.formats).launches(options.formats)
            first = next(iter(launches))
            protocol.agree({"tsmla": launches[first], **launches}, MAX_DIFFERENCE)
            candidates = [Candidate(name, launch) for name, launch in launches.items()]
            for regime in protocol.REGIMES[: 1 if options.quick else None]:
                timings = protocol.measure(candidates, regime, monitor, options.seconds, graph=True)
                results.append({"shape": shape, "regime": regime, "timings": timings})
            del launches, candidates
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "top_k": TOP_K, "slots": SLOTS, "results": results}
    path = runner.write_record(options.results, "chosen-decode", record)
    names = tuple(results[0]["timings"])
    header: tuple[str, ...] = ("requests", "q_len", "heads", "regime", *(f"{name} us" for name in names), "MHz")
    print(runner.table(header, (_row(result, names) for result in results)))
    print(path)


def _row(result: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    timings = result["timings"]
    return *result["shape"], result["regime"], *(timings[x].median_us for x in names), timings[names[0]].sm_clock_mhz
