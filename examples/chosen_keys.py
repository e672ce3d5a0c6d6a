"""Decode of chosen keys (sparse attention): each query token lists the cache slots that it attends to.

python examples/chosen_keys.py
"""

from __future__ import annotations

import torch
import tsmla

SCALE, PAGE = 192**-0.5, 64


def main(batch: int = 4, q_len: int = 2, heads: int = 16, keys: int = 8000, top_k: int = 2048) -> float:
    """Return the largest difference from float64."""
    torch.manual_seed(0)
    pages = -(-keys // PAGE)
    cache = torch.randn(batch * pages, PAGE, 576, device="cuda").bfloat16()
    tables = torch.randperm(batch * pages, device="cuda").view(batch, pages)  # pages of each request, in order
    q = torch.randn(batch, q_len, heads, 576, device="cuda").bfloat16()

    # An indexer scores all keys and keeps the best. It knows them by their positions; the cache knows slots.
    positions = torch.randn(batch, q_len, keys, device="cuda").topk(min(top_k, keys)).indices
    page = tables[:, None].expand(-1, q_len, -1).gather(2, positions // PAGE)
    indices = (page * PAGE + positions % PAGE).int()
    indices[..., -3:] = -1  # no key: a list may be shorter than others, here or by topk_length

    out = tsmla.tsmla_decode(
        q, cache, torch.empty(tsmla.decode_workspace_size(batch * q_len, 1, heads), dtype=torch.int8, device="cuda"),
        512, 64, block_tables=None, seq_lens=None, max_seq_len=None, softmax_scale=SCALE, indices=indices,
    )  # fmt: skip

    chosen = cache.flatten(0, 1)[indices[..., :-3].long()].double()  # [batch, q_len, keys of a list, 576]
    weights = (torch.einsum("bqhd,bqkd->bqhk", q.double(), chosen) * SCALE).softmax(-1)
    error = float((out.double() - weights @ chosen[..., :512]).abs().max())
    print(f"{batch} requests, {q_len} tokens each, {indices.shape[-1]} of {keys} keys: largest error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
