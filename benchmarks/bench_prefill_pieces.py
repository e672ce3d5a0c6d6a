"""A chunk of an engine's prefill, from what its projections give: pieces and merge_into, beside joining and merging.

    python -m benchmarks prefill-pieces [--dtype DTYPE] [--commit HASH]

Keys come as an engine has them: k_nope and values are slices of one projection's output [tokens, heads, 256], k_pe is
[tokens, 1, 64]. Each launch attends to a chunk of context and merges it with an earlier result:

- tsmla: both pieces as they are, `merge_into`; one launch;
- copies: k_nope and k_pe are copied into one tensor, as vLLM does it, then `merge_into`;
- copies, merge: joined, attended to, and merged by torch operations;
- joined: attention alone, of keys that are joined already: what pieces and merging should take.

Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from tsmla import tsmla_prefill

from . import protocol, runner
from .bench_prefill import DIMS, DTYPES, MAX_DIFFERENCE
from .protocol import Candidate, Monitor

D_QK, D_NOPE = 192, 128
D_V, HEADS = DIMS[D_QK]
SHAPES = (
    (1, 8192, 8192, True),
    (1, 8192, 16384, False),
    (4, 2048, 4096, False),
    (1, 512, 16384, False),
    (16, 64, 4096, False),
)
"""(sequences, queries, keys, causal): a prompt, chunks of context behind long and short ones, many short ones."""
Launch = Callable[[], torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Case:
    """One shape's tensors."""

    sequences: int
    causal: bool
    query: torch.Tensor
    k_nope: torch.Tensor
    k_pe: torch.Tensor
    value: torch.Tensor
    ends_q: torch.Tensor
    ends_kv: torch.Tensor
    first: Result | None = None
    earlier: list[Result] = dataclasses.field(default_factory=list)

    @classmethod
    def make(cls, sequences: int, queries: int, keys: int, causal: bool, dtype: torch.dtype) -> Case:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(dtype)

        def ends(length: int) -> torch.Tensor:
            return torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length

        projected = randn(sequences * keys, HEADS, D_NOPE + D_V)
        return cls(
            sequences,
            causal,
            randn(sequences * queries, HEADS, D_QK),
            projected[..., :D_NOPE],
            randn(sequences * keys, 1, D_QK - D_NOPE),
            projected[..., D_NOPE:],
            ends(queries),
            ends(keys),
        )

    def launches(self) -> dict[str, Launch]:
        """Return the launches, each into an earlier result of its own; these are all equal at first."""
        tokens = self.query.shape[0]
        dtype = torch.bfloat16 if self.query.dtype.itemsize == 1 else self.query.dtype
        first = torch.randn(tokens, HEADS, D_V, device="cuda").to(dtype), torch.randn(tokens, HEADS, device="cuda") + 8
        joined = self._join(torch.empty(*self.k_nope.shape[:2], D_QK, device="cuda", dtype=self.query.dtype))
        own, copied, merged = self.earlier = [(first[0].clone(), first[1].clone()) for _ in range(3)]
        self.first = first
        out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])

        def pieces() -> torch.Tensor:
            self._call((self.k_nope, self.k_pe), merge_into=own)
            return own[0]

        def copies() -> torch.Tensor:
            self._call(self._join(joined), merge_into=copied)
            return copied[0]

        def copies_and_merge() -> torch.Tensor:
            self._call(self._join(joined), out=out, lse=lse)
            _merge(*merged, out, lse)
            return merged[0]

        def attention() -> torch.Tensor:
            self._call(joined, out=out, lse=lse)
            return out

        return {"tsmla": pieces, "copies": copies, "copies, merge": copies_and_merge, "joined": attention}

    def once(self, launch: Launch) -> torch.Tensor:
        """Return a launch's result with the earlier one as it was at first."""
        assert self.first is not None
        for results in self.earlier:
            for tensor, content in zip(results, self.first, strict=True):
                tensor.copy_(content)
        return launch()

    def _join(self, into: torch.Tensor) -> torch.Tensor:
        into[..., :D_NOPE] = self.k_nope
        into[..., D_NOPE:] = self.k_pe
        return into

    def _call(self, key: Any, **results: Any) -> None:
        tsmla_prefill(
            query=self.query,
            key=key,
            value=self.value,
            seq_lens=None,
            cum_seq_lens=self.ends_kv,
            max_seq_len=0,
            batch_size=self.sequences,
            softmax_scale=D_QK**-0.5,
            is_causal=self.causal,
            cum_seq_lens_q=self.ends_q,
            **results,
        )


def _merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor) -> None:
    """Merge results as `merge_into` does, in place, with torch operations."""
    both = torch.logaddexp(lse, new_lse)
    shares = (torch.exp(x - both)[..., None] for x in (lse, new_lse))
    first, second = shares
    out.copy_(out.float() * first + new.float() * second)
    lse.copy_(both)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for shape in SHAPES:
            case = Case.make(*shape, DTYPES[options.dtype])
            launches = case.launches()
            compared = {name: functools.partial(case.once, x) for name, x in launches.items() if name != "joined"}
            protocol.agree(compared, MAX_DIFFERENCE[case.query.dtype.itemsize])
            candidates = [Candidate(name, launch) for name, launch in launches.items()]
            for regime in protocol.REGIMES:
                timings = protocol.measure(candidates, regime, monitor, options.seconds)
                results.append({"shape": shape, "dtype": options.dtype, "timings": timings})
            del case, launches, compared, candidates
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "results": results}
    path = runner.write_record(options.results, f"prefill-pieces-{options.dtype}", record)
    names = list(results[0]["timings"])
    rows = (_row(result) for result in results)
    print(runner.table(("sequences", "queries", "keys", "mask", "regime", *(f"{n}, us" for n in names)), rows))
    print(path)


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    sequences, queries, keys, causal = result["shape"]
    timings = result["timings"].values()
    regime = result["timings"]["tsmla"].regime
    return sequences, queries, keys, "causal" if causal else "full", regime, *(t.median_us for t in timings)
