"""Calls of tsmla_decode without a GPU: arguments that are right, of which tests change some."""

from __future__ import annotations

import torch
from launches import SMS

BATCH, Q_LEN, HEADS, PAGES, PAGE, WIDTH = 3, 2, 4, 10, 64, 6
FORMULA = SMS * HEADS * 8 * 513 * 4


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": torch.zeros(BATCH, Q_LEN, HEADS, 576, dtype=dtype),
        "kv_cache": torch.zeros(PAGES, PAGE, 576, dtype=dtype),
        "workspace_buffer": torch.zeros(FORMULA, dtype=torch.int8),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(BATCH, WIDTH, dtype=torch.int32),
        "seq_lens": ints(1, 2, 3),
        "max_seq_len": 300,
        "softmax_scale": 0.125,
    }
    return {**given, **changes}


LENGTHS = ints(1, 2, 3)
