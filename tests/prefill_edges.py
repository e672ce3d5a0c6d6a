"""Calls of tsmla_prefill at the edges of its contract, judged: what emulated tests of all head dims share."""

from __future__ import annotations

import math

import torch
import tsmla
from prefill_reference import Problem, judge, out_dtype

LENGTHS = {
    "shorter than a tile": ([64], [100]),
    "around a tile": ([127, 129], [128, 129]),
    "empty sequences": ([1, 0, 130, 5], [1, 77, 0, 300]),
    "more queries than keys": ([150, 1], [77, 1]),
    "several tiles": ([257], [513]),
    "a first query tile without keys": ([257, 129, 300], [16, 1, 100]),
}
SEVERAL_TILES = [([257, 130], [513, 200]), ([257, 0, 130, 140], [16, 7, 0, 100])]
"""CTAs with tiles of one head and of two, of two sequences, of heads in pairs and not; without keys before and behind
others; and CTAs with one tile."""


def check(problem: Problem, causal: bool, lse: bool = True, **options) -> torch.Tensor:
    shape = (*problem.query.shape[:2], problem.value.shape[2])
    dtype = options.pop("out_dtype", out_dtype(problem.query.dtype))
    out = torch.full(shape, math.nan, dtype=dtype, device="cuda")
    result = tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        max(problem.lengths_kv),
        problem.cum_seq_lens_kv.numel() - 1,
        problem.softmax_scale,
        causal,
        lse,
        problem.cum_seq_lens_q,
        out=out,
        **options,
    )
    judge(problem, causal, *(result if lse else (result, None)))
    return out
