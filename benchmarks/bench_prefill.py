"""tsmla_prefill at serving shapes, alone or next to other implementations in the same run.

    python -m benchmarks prefill [--dims 256] [--dtype DTYPE] [--against NAME=MODULE:FUNCTION ...] [--commit HASH]

--dims: columns of a query, 192 (values of 128, 128 heads) or 256 (values of 256, 64 heads). TFLOP/s count
2 * (d_qk + d_v) * heads * attended (query, key) pairs. FUNCTION takes a Case and returns a callable that launches the
other implementation on its tensors, or None; it is imported from wherever Python finds MODULE. Every candidate's result
is compared with ours before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tsmla import tsmla_prefill

from . import protocol, runner
from .protocol import Candidate, Monitor

DIMS = {192: (128, 128), 256: (256, 64)}
"""Columns of a query or key -> columns of a value, and heads."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
SHAPES = (
    (1, 8192, 8192, True),
    (1, 8192, 32768, True),
    (1, 8192, 65536, True),
    (4, 512, 81920, True),
    (4, 1024, 81920, True),
    (1, 8192, 8192, False),
    (1, 8192, 32768, False),
    (1, 1024, 1024, True),
    (1, 2048, 2048, True),
    (16, 512, 512, True),
)
"""(sequences, queries, keys, causal): a first chunk, later chunks of a long context, context chunks, and prompts."""
MAX_DIFFERENCE = {2: 0.02, 1: 0.06}
"""Bytes of an element -> relative RMS difference from tsmla's result above which another candidate does not compute the
same thing: 8-bit kernels round probabilities to 4 digits."""


@dataclasses.dataclass
class Case:
    """One shape's tensors: packs [sequences * length, heads, dim] and their cumulative lengths."""

    sequences: int
    queries: int
    keys: int
    causal: bool
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    ends_q: torch.Tensor
    ends_kv: torch.Tensor
    scale: float

    @classmethod
    def make(
        cls,
        sequences: int,
        queries: int,
        keys: int,
        causal: bool,
        dtype: torch.dtype,
        d_qk: int = 192,
        heads: int | None = None,
    ) -> Case:
        d_v, usual_heads = DIMS[d_qk]
        heads = heads or usual_heads

        def pack(length: int, dim: int) -> torch.Tensor:
            return torch.randn(sequences * length, heads, dim, device="cuda", dtype=torch.bfloat16).to(dtype)

        def ends(length: int) -> torch.Tensor:
            return torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length

        packs = pack(queries, d_qk), pack(keys, d_qk), pack(keys, d_v)
        return cls(sequences, queries, keys, causal, *packs, ends(queries), ends(keys), d_qk**-0.5)

    @property
    def tflop(self) -> float:
        pairs = self.queries * self.keys
        if self.causal:
            pairs -= self.queries * (self.queries - 1) // 2
        _, heads, d_qk = self.query.shape
        return 2 * (d_qk + self.value.shape[2]) * heads * self.sequences * pairs / 1e12

    def output(self) -> torch.Tensor:
        dtype = torch.bfloat16 if self.query.dtype.itemsize == 1 else self.query.dtype
        return torch.empty(*self.query.shape[:2], self.value.shape[2], device="cuda", dtype=dtype)

    def ours(self) -> Callable[[], torch.Tensor]:
        """Return a launch of tsmla into one output tensor, which it returns, with LSE, as serving engines call it."""
        out = self.output()

        def launch() -> torch.Tensor:
            tsmla_prefill(
                self.query,
                self.key,
                self.value,
                None,
                self.ends_kv,
                self.keys,
                self.sequences,
                self.scale,
                is_causal=self.causal,
                return_lse=True,
                cum_seq_lens_q=self.ends_q,
                out=out,
            )
            return out

        return launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser)
    parser.add_argument("--dims", choices=DIMS, default=192, type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--against", nargs="*", default=[], metavar="NAME=MODULE:FUNCTION", type=runner.other)


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        ceilings = protocol.ceilings(monitor)
        for shape in SHAPES:
            case = Case.make(*shape, DTYPES[options.dtype], options.dims)
            others = {name: make(case) for name, make in options.against}
            launches = {"tsmla": case.ours(), **{name: launch for name, launch in others.items() if launch}}
            protocol.agree(launches, MAX_DIFFERENCE[case.query.dtype.itemsize])
            candidates = [Candidate(name, launch) for name, launch in launches.items()]
            for regime in protocol.REGIMES:
                timings = protocol.measure(candidates, regime, monitor, options.seconds)
                said = {"shape": shape, "dims": options.dims, "dtype": options.dtype, "tflop": case.tflop}
                results.append({**said, "timings": timings})
            del case, launches, candidates
            torch.cuda.empty_cache()
    record = {"certificate": runner.certificate(options.commit), "ceilings": ceilings, "results": results}
    dims = "" if options.dims == 192 else f"{options.dims}-"
    path = runner.write_record(options.results, f"prefill-{dims}{options.dtype}", record)
    print(f"ceilings: {', '.join(f'{name} {value:.0f}' for name, value in ceilings.items())}")
    names = list(results[0]["timings"])
    header = ("sequences", "queries", "keys", "mask", "regime", *(f"{n} {u}" for n in names for u in ("us", "TF/s")))
    print(runner.table((*header, "MHz", "W"), (_row(result) for result in results)))
    print(path)


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    sequences, queries, keys, causal = result["shape"]
    timings = result["timings"].values()
    numbers = [value for t in timings for value in (t.median_us, result["tflop"] / (t.median_us * 1e-6))]
    first = result["timings"]["tsmla"]
    mask = "causal" if causal else "full"
    return sequences, queries, keys, mask, first.regime, *numbers, first.sm_clock_mhz, first.power_w
