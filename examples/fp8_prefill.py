"""Prefill in FP8: keys and values are quantised in one pass, scores and outputs are scaled back by the kernel.

python examples/fp8_prefill.py
"""

from __future__ import annotations

import torch
import tsmla

SCALE = 192**-0.5


def main(heads: int = 16, tokens: int = 1000) -> float:
    """Return the relative RMS difference from float64 attention over the unquantised numbers."""
    torch.manual_seed(0)
    projected = torch.randn(tokens, heads, 256, device="cuda").bfloat16()  # K without rope, and V, of one projection
    k_nope, v = projected.split(128, -1)
    k_pe = torch.randn(tokens, 64, device="cuda").bfloat16()  # one for all heads
    q = torch.randn(tokens, heads, 192, device="cuda").bfloat16()

    # e4m3 reaches 448: the factors put the largest number near it.
    k_scale, v_scale = float(max(k_nope.abs().max(), k_pe.abs().max())) / 448, float(v.abs().max()) / 448
    k_fp8, v_fp8 = tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe, v, 1 / k_scale, 1 / v_scale)
    out = tsmla.tsmla_prefill(
        query=q.to(torch.float8_e4m3fn),
        key=k_fp8,
        value=v_fp8,
        seq_lens=None,
        cum_seq_lens=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        max_seq_len=tokens,
        batch_size=1,
        softmax_scale=SCALE,
        is_causal=True,
        k_scale=k_scale,
        v_scale=v_scale,
    )

    k = torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1)], -1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    later = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").triu(1)
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v.double())
    error = float((out.double() - expected).norm() / expected.norm())
    print(f"{tokens} tokens, {heads} heads, e4m3: relative RMS error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
