"""mla_kv_pack_quantize_fp8 against torch's cat + cast + cast and against a copy of as many bytes.

    python -m benchmarks pack [--commit HASH] [--seconds S]

GB/s count what the operator must move: k_nope, k_pe and v once in, K and V once out. "of ceiling" is against the copy
of 1 GiB, "of same copy" against a copy that moves as many bytes as the case.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from tsmla import mla_kv_pack_quantize_fp8

from . import protocol, runner
from .protocol import Candidate, Monitor

D_NOPE, D_ROPE, D_V = 128, 64, 128
FP8 = torch.float8_e4m3fn
CASES = ((8192, 128), (8192, 16), (1024, 128), (1024, 16), (128, 128), (1, 128))
"""(tokens, heads): 128 heads is one GPU that serves all of DeepSeek's, 16 is one of eight."""

HEADER = (
    "tokens",
    "heads",
    "regime",
    "tsmla us",
    "GB/s",
    "of ceiling",
    "of same copy",
    "torch us",
    "ratio",
    "MHz",
    "W",
)


@dataclasses.dataclass
class Case:
    """Inputs as models have them, k_nope and v being slices of one projection, and outputs to write into."""

    k_nope: torch.Tensor
    k_pe: torch.Tensor
    v: torch.Tensor
    k_out: torch.Tensor
    v_out: torch.Tensor

    @classmethod
    def make(cls, tokens: int, heads: int) -> Case:
        both = torch.randn(tokens, heads, D_NOPE + D_V, device="cuda").bfloat16()
        k_pe = torch.randn(tokens, 1, D_ROPE, device="cuda").bfloat16()
        k_out = torch.empty(tokens, heads, D_NOPE + D_ROPE, dtype=FP8, device="cuda")
        v_out = torch.empty(tokens, heads, D_V, dtype=FP8, device="cuda")
        return cls(both[..., :D_NOPE], k_pe, both[..., D_NOPE:], k_out, v_out)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))

    def ours(self) -> None:
        mla_kv_pack_quantize_fp8(self.k_nope, self.k_pe, self.v, k_out=self.k_out, v_out=self.v_out)

    def torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack with torch, without scales or clamping, which the kernel does in addition."""
        shared = self.k_pe.expand(-1, self.k_nope.shape[1], -1)
        return torch.cat((self.k_nope, shared), -1).to(FP8), self.v.to(FP8)

    def check(self) -> None:
        """Check that both give the same bytes: the inputs are within FP8's range."""
        self.ours()
        for got, want in zip((self.k_out, self.v_out), self.torch(), strict=True):
            if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                raise SystemExit("the kernel's result differs from torch's; nothing was measured")

    def candidates(self) -> list[Candidate]:
        source = torch.zeros(self.nbytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return [
            Candidate("tsmla", self.ours),
            Candidate("torch", self.torch),
            Candidate("copy", lambda: target.copy_(source)),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        ceilings = protocol.ceilings(monitor)
        for tokens, heads in CASES:
            case = Case.make(tokens, heads)
            case.check()
            for regime, graph in (("isolated", False), ("isolated", True), ("back to back", False)):
                timings = protocol.measure(case.candidates(), regime, monitor, options.seconds, graph)
                results.append({"tokens": tokens, "heads": heads, "bytes": case.nbytes, "timings": timings})
    record = {"certificate": runner.certificate(options.commit), "ceilings": ceilings, "results": results}
    path = runner.write_record(options.results, "pack", record)
    print(f"ceilings: {', '.join(f'{name} {value:.0f}' for name, value in ceilings.items())}")
    print(runner.table(HEADER, (_row(result, ceilings["copy_gb_s"]) for result in results)))
    print(path)


def _row(result: dict[str, Any], copy_gb_s: float) -> tuple[object, ...]:
    ours, theirs, copy = (result["timings"][name] for name in ("tsmla", "torch", "copy"))
    rate = result["bytes"] / ours.median_us / 1e3
    return (
        result["tokens"],
        result["heads"],
        ours.regime + (" graph" if ours.graph else ""),
        ours.median_us,
        rate,
        f"{rate / copy_gb_s:.0%}",
        f"{copy.median_us / ours.median_us:.0%}",
        theirs.median_us,
        f"{theirs.median_us / ours.median_us:.2f}x",
        ours.sm_clock_mhz,
        ours.power_w,
    )
