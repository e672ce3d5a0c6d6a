"""The hardware anchor: results of the sm_90a kernels on a real GPU, kept so that the emulator can be held against them.

Inputs come from integer arithmetic, so that they are the same bits on every machine. On a GPU,

    python tests/anchor.py --record DIRECTORY --commit HASH

writes one .npz per case, with the device, driver, versions, date and commit in it; copy them to tests/anchor_results.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "anchor_results"


def uniform_normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of roughly normal distribution: the sum of four hashed integers per element, exact in float32."""
    count = math.prod(shape)
    index = np.arange(count * 4, dtype=np.uint64) + np.uint64(seed) * np.uint64(0x1000003)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1)):
        index ^= index >> np.uint64(shift)
        index *= np.uint64(factor)
    parts = (index >> np.uint64(54)).astype(np.float32).reshape(count, 4)  # 10 bits each
    return torch.from_numpy((parts.sum(1) - 2046.0) / 591.0).reshape(shape).to(dtype)


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    name: str
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    heads: tuple[int, int]
    d_qk: int
    dtype: torch.dtype
    causal: bool

    def run(self) -> dict[str, np.ndarray]:
        """{"out": 16-bit patterns, "lse": float32}, computed by the operator on device "cuda"."""
        import tsmla

        def ends(lengths):
            return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")

        heads_q, heads_kv = self.heads
        tokens_q, tokens_kv = sum(self.lengths_q), sum(self.lengths_kv)
        out, lse = tsmla.tsmla_prefill(
            uniform_normal((tokens_q, heads_q, self.d_qk), 1, self.dtype).to("cuda"),
            uniform_normal((tokens_kv, heads_kv, self.d_qk), 2, self.dtype).to("cuda"),
            uniform_normal((tokens_kv, heads_kv, 128), 3, self.dtype).to("cuda"),
            None,
            ends(self.lengths_kv),
            max(self.lengths_kv),
            len(self.lengths_kv),
            self.d_qk**-0.5,
            is_causal=self.causal,
            return_lse=True,
            cum_seq_lens_q=ends(self.lengths_q),
        )
        return {"out": out.cpu().view(torch.int16).numpy(), "lse": lse.cpu().numpy()}


@dataclasses.dataclass(frozen=True)
class PackCase:
    name: str
    tokens: int
    heads: int
    dtype: torch.dtype
    fp8: torch.dtype

    def run(self) -> dict[str, np.ndarray]:
        """{"k", "v"}: the bytes, computed by the operator on device "cuda"; scaled so that some values saturate."""
        import tsmla

        both = uniform_normal((self.tokens, self.heads, 256), 4, self.dtype).to("cuda")
        k_pe = uniform_normal((self.tokens, 64), 5, self.dtype).to("cuda")
        largest = torch.finfo(self.fp8).max
        k, v = tsmla.mla_kv_pack_quantize_fp8(
            both[..., :128], k_pe, both[..., 128:], largest / 2.5, 0.37, fp8_dtype=self.fp8
        )
        return {"k": k.cpu().view(torch.uint8).numpy(), "v": v.cpu().view(torch.uint8).numpy()}


CASES = (
    PrefillCase("prefill_causal", (200, 312), (384, 400), (2, 2), 192, torch.bfloat16, True),
    PrefillCase("prefill_full", (200, 312), (384, 400), (2, 1), 192, torch.bfloat16, False),
    PrefillCase("prefill_fp16_128", (129,), (257,), (2, 2), 128, torch.float16, True),
    PackCase("pack_e4m3", 37, 5, torch.bfloat16, torch.float8_e4m3fn),
    PackCase("pack_e5m2", 37, 5, torch.float16, torch.float8_e5m2),
)


def recorded(case: PrefillCase | PackCase) -> dict[str, np.ndarray]:
    """What the GPU gave, and under "certificate" where and when."""
    with np.load(RESULTS / f"{case.name}.npz") as file:
        return dict(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    options.record.mkdir(parents=True, exist_ok=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    date = datetime.date.today().isoformat()
    certificate = f"{device}; torch {torch.__version__}; {' '.join(sys.argv)}; {date}; commit {options.commit}"
    for case in CASES:
        np.savez_compressed(options.record / f"{case.name}.npz", certificate=certificate, **case.run())
    print(certificate)


if __name__ == "__main__":
    main()
