"""Queries for an FP8 cache, quantised in the two parts that they are computed in.

vLLM joins the parts first, in a launch of its own, where it does not compile that into one with the rounding.
`tsmla_decode` takes them apart. The numbers are the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import CompilationMode

_ROWS = 8
"""Query rows that make one row for vLLM's kernel, which gives a block of threads to each: it fills them."""


def are_quantised_here(config: Any) -> bool:
    """Whether a layer should ask vLLM for queries in 16 bits. Ranks of context parallelism gather quantised ones."""
    alone = config.parallel_config.decode_context_parallel_size == 1
    return alone and config.compilation_config.mode == CompilationMode.NONE


def quantised(part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide [tokens, heads, columns] by a scale and round it to e4m3; tokens and heads lie in the same order."""
    heads_first = part.stride(0) < part.stride(1)
    part = part.transpose(0, 1) if heads_first else part
    rows = part.flatten(0, 1)
    if rows.is_contiguous():
        rows = rows.view(-1, math.gcd(len(rows), _ROWS) * rows.shape[1])
    result = ops.scaled_fp8_quant(rows, scale)[0].view(part.shape)
    return result.transpose(0, 1) if heads_first else result
