"""Causal attention over a ragged pack of sequences, with expanded MLA heads: 192 elements of a key, 128 of a value."""

import math

import torch

ROWS = 1024


def run(query, key, value, cum_seq_lens_q, cum_seq_lens, softmax_scale):
    """Return the output, and the natural LSE. Query tokens are the last ones of their sequence."""
    tokens, heads, _ = query.shape
    out = torch.zeros(tokens, heads, value.shape[-1], dtype=torch.bfloat16, device=query.device)
    lse = torch.full((tokens, heads), -math.inf, device=query.device)
    for sequence in range(len(cum_seq_lens) - 1):
        start_q, end_q = cum_seq_lens_q[sequence : sequence + 2].tolist()
        start, end = cum_seq_lens[sequence : sequence + 2].tolist()
        at = torch.arange(start, end, device=query.device)
        for head in range(heads):
            keys, values = key[start:end, head].float(), value[start:end, head].float()
            for first in range(start_q, end_q, ROWS):
                rows = torch.arange(first, min(first + ROWS, end_q), device=query.device)
                last = rows - end_q + end
                scores = softmax_scale * (query[rows, head].float() @ keys.T)
                scores = scores.masked_fill(at > last[:, None], -math.inf)
                seen = last >= start
                out[rows[seen], head] = (scores[seen].softmax(-1) @ values).bfloat16()
                lse[rows[seen], head] = scores[seen].logsumexp(-1)
    return out, lse
