"""On a GPU: of decodes with batch_invariant, a request's bits are those that it has alone."""

from __future__ import annotations

import random

import pytest
import torch
from batch_invariance import differing
from decode_reference import check, make_problem, run
from tsmla.identity.arch import Arch
from tsmla.operators.checks import TORCH_DTYPE_OF

DTYPES = sorted({dtype for arch in Arch for dtype in arch.facts.decode})


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, arch: Arch, seed: int) -> torch.dtype:
    if request.param not in arch.facts.decode:
        pytest.skip(f"decode for {arch} does not take {request.param}")
    return TORCH_DTYPE_OF[request.param]


@pytest.mark.parametrize("q_len, heads", [(1, 16), (4, 16), (2, 48), (1, 128)])
def test_requests_of_one_query_length(dtype, q_len, heads):
    problem = make_problem([9000, 0, 65, 1, 2500, 700] + [37 * i % 1500 for i in range(40)], q_len, heads, dtype)
    assert differing(problem, check(problem, batch_invariant=True), batch_invariant=True) == []


@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_requests_of_any_query_lengths(dtype, heads):
    draw = random.Random(heads)
    lengths = [draw.choice((0, 1, 64, 700, 3000)) for _ in range(16)] + [9000]
    query_lengths = [draw.choice((0, 1, 1, 1, 2, 9, 64)) for _ in lengths]
    problem = make_problem(lengths, query_lengths, heads, dtype)
    assert differing(problem, check(problem, batch_invariant=True), batch_invariant=True) == []


def test_otherwise_bits_do_depend(dtype):
    problem = make_problem([9000, 2500, 700], 1, 16, dtype)
    assert differing(problem, run(problem))
