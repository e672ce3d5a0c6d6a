"""tsmla_prefill of values of one sign under flat scores, products summed as tensor cores do: a sum that keeps 13 bits
loses what is small beside it, and over many keys that is most of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from prefill_edges import check
from prefill_reference import Problem, make_problem
from unwatched import unwatched

pytestmark = pytest.mark.archs("sm_90a")

ROWS = 64
LARGE, SMALL = 224.0, 3 / 256
"""Values of the first key and of all others, which a sum of 13 bits loses beside it."""
ALLOWED = torch.finfo(torch.bfloat16).eps
"""Relative: bf16 rounds by up to half of that."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def tensor_cores(gpu):
    with unwatched(gpu):
        if gpu.emulation is not None:
            gpu.emulation.options = dataclasses.replace(gpu.emulation.options, hardware_sums=True)
        yield


def judge_flat(problem: Problem, values: torch.Tensor, **options) -> None:
    """Assert that rows whose scores are all 0 get the mean of the values [keys, 1, dim]."""
    problem.query.copy_(torch.zeros(problem.query.shape))
    problem.value.copy_(values.to(problem.value.dtype))
    out = check(problem, False, **options).double()
    off = (out / problem.value.double().mean(0) - 1).abs().max()
    assert off <= ALLOWED, f"an output is off by {off:.1%}"


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((192, 128), E4M3), ((192, 128), E5M2), ((128, 128), E4M3), ((256, 256), E4M3)],
    ids=str,
)
def test_small_values_beside_a_large_one(gpu, dims, dtype):
    values = torch.full((640, 1, dims[1]), SMALL)
    values[0] = LARGE
    judge_flat(make_problem([ROWS], [len(values)], 1, 1, *dims, dtype, "cuda"), values)


def test_with_a_key_mask(gpu):
    values = torch.full((640, 1, 128), SMALL)
    values[0] = LARGE
    problem = make_problem([ROWS], [len(values)], 1, 1, 192, 128, E4M3, "cuda")
    every = torch.full((ROWS, len(values) // 32), -1, dtype=torch.int32, device="cuda")
    judge_flat(problem, values, key_mask=every)


def test_a_long_context(gpu):
    """4,096 values between 0.5 and 1.5 lose 3 % of their mean in one sum of 13 bits."""
    judge_flat(make_problem([ROWS], [4096], 1, 1, 192, 128, E4M3, "cuda"), torch.rand(4096, 1, 128) + 0.5)
