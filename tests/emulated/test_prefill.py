"""tsmla_prefill in emulation against float64: the edges of its contract, under every schedule."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from prefill_reference import Problem, judge, make_problem

pytestmark = pytest.mark.archs("sm_90a")

LENGTHS = {
    "shorter than a tile": ([64], [100]),
    "around a tile": ([127, 129], [128, 129]),
    "empty sequences": ([1, 0, 130, 5], [1, 77, 0, 300]),
    "more queries than keys": ([150, 1], [77, 1]),
    "several tiles": ([257], [513]),
}


def check(problem: Problem, causal: bool, lse: bool = True, **options) -> None:
    shape = (*problem.query.shape[:2], problem.value.shape[2])
    out = torch.full(shape, math.nan, dtype=problem.query.dtype, device="cuda")
    result = tsmla.tsmla_prefill(
        problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, max(problem.lengths_kv),
        problem.cum_seq_lens_kv.numel() - 1, problem.softmax_scale, causal, lse, problem.cum_seq_lens_q, out=out,
        **options,
    )  # fmt: skip
    judge(problem, causal, *(result if lse else (result, None)))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(gpu, lengths, causal):
    check(
        make_problem(*lengths, 2, 1, 192, 128, torch.bfloat16, "cuda", slack=3, padded_entries=2, strided=True), causal
    )


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_dims(gpu, dtype, dims):
    check(make_problem([130], [200], 1, 1, *dims, dtype, "cuda"), True)


def test_without_lse_and_with_pdl(gpu):
    check(make_problem([130], [200], 1, 1, 192, 128, torch.bfloat16, "cuda"), False, lse=False, enable_pdl=True)


@pytest.mark.parametrize("factor", [-0.5, 0.0], ids=str)
def test_scales(gpu, factor):
    problem = make_problem([40, 2], [70, 0], 1, 1, 192, 128, torch.bfloat16, "cuda")
    ends_q, ends_kv = problem.cum_seq_lens_q, problem.cum_seq_lens_kv
    out, lse = tsmla.tsmla_prefill(
        problem.query, problem.key, problem.value, None, ends_kv, 70, 2, problem.softmax_scale / 0.375, True, True,
        ends_q, k_scale=0.375, v_scale=4.0, output_scale=factor / 4.0,
    )  # fmt: skip
    if factor == 0.0:
        assert (out == 0).all()
    else:
        judge(problem, True, out / factor, lse)  # a power of two: nothing is rounded anew
