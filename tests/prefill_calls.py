"""Calls of tsmla_prefill without a GPU: arguments that are right, of which tests change some."""

from __future__ import annotations

import torch

TOKENS_Q, TOKENS_KV, HEADS, HEADS_KV, D_QK, D_V = 5, 7, 4, 2, 192, 128


def inputs(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": torch.zeros(TOKENS_Q, HEADS, D_QK, dtype=dtype),
        "key": torch.zeros(TOKENS_KV, HEADS_KV, D_QK, dtype=dtype),
        "value": torch.zeros(TOKENS_KV, HEADS_KV, D_V, dtype=dtype),
        "seq_lens": None,
        "cum_seq_lens": torch.tensor([0, 3, TOKENS_KV], dtype=torch.int32),
        "max_seq_len": 4,
        "batch_size": 2,
        "softmax_scale": 0.125,
        "cum_seq_lens_q": torch.tensor([0, 3, TOKENS_Q], dtype=torch.int32),
    }
    return {**given, **changes}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


LENGTHS = torch.tensor([0, 3, 7], dtype=torch.int32)
