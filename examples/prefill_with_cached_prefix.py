"""Prefill new tokens behind a prefix whose keys are in the paged cache: two launches, merged into one result.

python examples/prefill_with_cached_prefix.py
"""

from __future__ import annotations

import torch
import tsmla

SCALE = 192**-0.5


def main(heads: int = 16, prefix: int = 1000, new: int = 300) -> float:
    """Return the largest difference from float64."""
    torch.manual_seed(0)
    latent, rope = (torch.randn(prefix + new, columns, device="cuda").bfloat16() for columns in (512, 64))
    w_k, w_v = (torch.randn(512, heads * 128, device="cuda").bfloat16() * 512**-0.5 for _ in range(2))
    q = torch.randn(new, heads, 192, device="cuda").bfloat16()

    # An earlier request left the prefix in pages 0, 1, ... of the cache.
    cache = torch.zeros(-(-prefix // 64), 64, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(prefix, device="cuda")
    tsmla.mla_write_cache(latent[:prefix], rope[:prefix], slots, cache, format="bf16")

    # The new tokens attend to each other, causally.
    k_nope, v = expanded(latent[prefix:], w_k, w_v)
    out, lse = tsmla.tsmla_prefill(
        query=q,
        key=(k_nope, rope[prefix:]),
        value=v,
        seq_lens=None,
        cum_seq_lens=ends(new),
        max_seq_len=new,
        batch_size=1,
        softmax_scale=SCALE,
        is_causal=True,
        return_lse=True,
    )

    # All of them attend to the whole prefix, read back from the cache. merge_into makes both one softmax.
    kv_c, k_pe = latent.new_empty(prefix, 512), rope.new_empty(prefix, 64)
    tsmla.mla_read_cache(cache, kv_c, k_pe, slots, format="bf16")
    k_nope, v = expanded(kv_c, w_k, w_v)
    tsmla.tsmla_prefill(
        query=q,
        key=(k_nope, k_pe),
        value=v,
        seq_lens=None,
        cum_seq_lens=ends(prefix),
        max_seq_len=prefix,
        batch_size=1,
        softmax_scale=SCALE,
        is_causal=False,
        cum_seq_lens_q=ends(new),
        max_seq_len_q=new,
        merge_into=(out, lse),
    )

    k_nope, v = (x.double() for x in expanded(latent, w_k, w_v))
    k = torch.cat([k_nope, rope[:, None].expand(-1, heads, -1).double()], -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    later = torch.ones(new, prefix + new, dtype=torch.bool, device="cuda").triu(prefix + 1)
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
    error = float((out.double() - expected).abs().max())
    print(f"{new} tokens behind {prefix} cached ones, {heads} heads: largest error {error:.1e}")
    return error


def expanded(latent: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys without rope, and values, of every head: [tokens, heads, 128] each."""
    return (latent @ w_k).unflatten(-1, (-1, 128)), (latent @ w_v).unflatten(-1, (-1, 128))


def ends(tokens: int) -> torch.Tensor:
    return torch.tensor([0, tokens], dtype=torch.int32, device="cuda")


if __name__ == "__main__":
    main()
