"""tsmla_prefill of queries and keys in pieces, in emulation: the bits of joined ones, from wherever the pieces lie."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from emulated_archs import KERNELS
from prefill_reference import Problem, judge, make_problem
from tsmla.operators.checks import TORCH_DTYPES
from unwatched import unwatched

pytestmark = pytest.mark.archs(*KERNELS)
DTYPES = list(TORCH_DTYPES)
LENGTHS = {
    "empty sequences": ([1, 0, 130, 5], [1, 77, 0, 300]),
    "more queries than keys": ([150, 1], [77, 1]),
    "several tiles": ([257], [513]),
}
Pair = tuple[torch.Tensor, torch.Tensor]


def run(problem: Problem, query, key, causal: bool, value=None) -> Pair:
    dtype = torch.bfloat16 if problem.query.dtype.itemsize == 1 else problem.query.dtype
    out = torch.full((*problem.query.shape[:2], 128), math.nan, dtype=dtype, device="cuda")
    return tsmla.tsmla_prefill(
        query,
        key,
        problem.value if value is None else value,
        None,
        problem.cum_seq_lens_kv,
        1,
        len(problem.lengths_kv),
        problem.softmax_scale,
        causal,
        True,
        problem.cum_seq_lens_q,
        out=out,
    )


def make(lengths, heads_q: int, heads_kv: int, dtype: torch.dtype) -> tuple[Problem, Pair, Pair]:
    """A problem whose keys have one rope for all heads, and its query and key in pieces: slices of what projections
    write, with NaN between the rows."""
    problem = make_problem(*lengths, heads_q, heads_kv, 192, 128, dtype, "cuda", slack=3)
    problem.key[:, :, 128:] = problem.key[:, :1, 128:].clone()
    tokens, heads = problem.key.shape[:2]
    both = torch.full((tokens, heads, 128 + 128 + 16), math.nan, device="cuda").to(dtype)
    both[..., :128], both[..., 128:256] = problem.key[..., :128], problem.value
    latent = torch.full((tokens, 512 + 64 + 16), math.nan, device="cuda").to(dtype)
    latent[:, 512:576] = problem.key[:, 0, 128:]
    problem.value = both[..., 128:256]
    rope = torch.full((heads_q, problem.query.shape[0] + 1, 64), math.nan, device="cuda").to(dtype)
    rope[:, :-1] = problem.query[..., 128:].transpose(0, 1)
    plain = torch.full((problem.query.shape[0], heads_q + 1, 128 + 16), math.nan, device="cuda").to(dtype)
    plain[:, :heads_q, :128] = problem.query[..., :128]
    query = plain[:, :heads_q, :128], rope[:, :-1].transpose(0, 1)
    return problem, query, (both[..., :128], latent[:, 512:576])


def same(a: Pair, b: Pair) -> bool:
    return all(torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_pieces_give_the_bits_of_joined_ones(gpu, lengths, causal):
    problem, query, key = make(lengths, 4, 2, torch.bfloat16)
    with unwatched(gpu):
        joined = run(problem, problem.query, problem.key, causal)
    judge(problem, causal, *joined)
    for q, k in ((query, key), (query, problem.key), (problem.query, (key[0], key[1][:, None]))):
        assert same(run(problem, q, k, causal), joined)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(gpu, dtype):
    problem, query, key = make(([130, 3], [200, 1]), 3, 3, dtype)
    found = run(problem, query, key, True)
    judge(problem, True, *found)
    assert same(found, run(problem, problem.query, problem.key, True))


def test_one_head_and_one_token(gpu):
    problem, query, key = make(([1], [1]), 1, 1, torch.bfloat16)
    assert same(run(problem, query, key, True), run(problem, problem.query, problem.key, True))
    problem, query, key = make(([3], [0]), 2, 1, torch.bfloat16)
    out, lse = run(problem, query, key, False)
    assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all()


def test_a_wrong_rope_is_noticed(gpu):
    """Each piece of each head counts: the test above would see another one."""
    problem, query, key = make(([20], [40]), 2, 2, torch.bfloat16)
    joined = run(problem, query, key, False)
    for changed in ((query[0].clone(), query[1].clone(), key[0], key[1]), (query[0], query[1], key[0], key[1].clone())):
        changed[1 if changed[3] is key[1] else 3][:20] += 1
        assert not same(run(problem, changed[:2], changed[2:], False), joined)


def test_an_lse_of_heads_first(gpu):
    problem, query, key = make(([30, 5], [40, 7]), 4, 2, torch.bfloat16)
    _, want = run(problem, query, key, True)
    buffer = torch.full((4, problem.query.shape[0]), math.nan, device="cuda")
    for returned in (True, False):
        buffer.fill_(math.nan)
        result = tsmla.tsmla_prefill(
            query,
            key,
            problem.value,
            None,
            problem.cum_seq_lens_kv,
            1,
            2,
            problem.softmax_scale,
            True,
            returned,
            problem.cum_seq_lens_q,
            lse=buffer.T,
        )
        assert torch.equal(buffer.T[:35].cpu(), want[:35].cpu()) and buffer.T[35:].isnan().all()
        assert isinstance(result, tuple) == returned
