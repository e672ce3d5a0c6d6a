"""Absorbed MLA attention of each token to the keys that it chose: a row is a key, its first 512 elements the value."""

import math

import torch


def run(query, kv_cache, indices, softmax_scale):
    """Return the output, and the LSE in base 2. An index is page * page_size + row; a negative one names no key."""
    tokens, heads, _ = query.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.bfloat16, device=query.device)
    lse = torch.full((tokens, heads), -math.inf, device=query.device)
    rows = kv_cache.flatten(0, 1)
    for token in range(tokens):
        chosen = indices[token][indices[token] >= 0].long()
        if len(chosen):
            seen = rows[chosen].float()
            scores = softmax_scale * (query[token].float() @ seen.T)
            out[token] = (scores.softmax(-1) @ seen[:, :512]).bfloat16()
            lse[token] = scores.logsumexp(-1) / math.log(2)
    return out, lse
