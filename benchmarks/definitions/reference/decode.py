"""Absorbed MLA attention over a paged cache: a row is a key, and its first 512 elements are also the value."""

import math

import torch


def run(query, kv_cache, block_tables, seq_lens, softmax_scale):
    """Return the output, and the LSE in base 2. Query tokens are the last ones of their request."""
    batch, q_len, heads, _ = query.shape
    out = torch.zeros(batch, q_len, heads, 512, dtype=torch.bfloat16, device=query.device)
    lse = torch.full((batch, q_len, heads), -math.inf, device=query.device)
    as_bytes = kv_cache.view(torch.uint8)
    for request in range(batch):
        length = int(seq_lens[request])
        pages = as_bytes[block_tables[request].long()].view(kv_cache.dtype)
        keys = pages.flatten(0, 1)[:length].float()
        for token in range(q_len):
            seen = keys[: max(length - q_len + token + 1, 0)]
            if len(seen):
                scores = softmax_scale * (query[request, token].float() @ seen.T)
                out[request, token] = (scores.softmax(-1) @ seen[:, :512]).bfloat16()
                lse[request, token] = scores.logsumexp(-1) / math.log(2)
    return out, lse
