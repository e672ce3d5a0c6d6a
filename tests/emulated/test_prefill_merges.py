"""Prefill that continues from an earlier result, in emulation: against float64 over all keys, exact at its edges."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import tsmla
from emulated_archs import KERNELS
from prefill_reference import Problem, judge, make_problem, out_dtype
from tsmla.operators.checks import TORCH_DTYPES

pytestmark = pytest.mark.archs(*KERNELS)
Result = tuple[torch.Tensor, torch.Tensor]
QUERIES = [130, 5, 0, 260, 3]
FIRST, SECOND = [300, 0, 9, 100, 0], [77, 40, 0, 0, 0]
"""Keys of both parts: rows with keys in both, in one of them, in none."""


def call(problem: Problem, causal: bool = False, **options) -> Result:
    return tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        1,
        len(problem.lengths_kv),
        problem.softmax_scale,
        causal,
        True,
        problem.cum_seq_lens_q,
        sinks=problem.sinks,
        lse_includes_sink=problem.lse_includes_sink,
        **options,
    )


def nothing(problem: Problem, content: float = math.nan) -> Result:
    """A result without keys, whose outputs do not matter."""
    tokens, heads, _ = problem.query.shape
    dtype = out_dtype(problem.query.dtype)
    out = torch.full((tokens, heads + 1, 128 + 8), content, dtype=dtype, device="cuda")[:, 1:, 8:]
    return out, torch.full((heads, tokens), -math.inf, device="cuda").T


def part(whole: Problem, lengths: list[int], others: list[int], last: bool) -> Problem:
    """The first or the last keys of each sequence."""
    keys, start = [], 0
    for length, other in zip(lengths, others, strict=True):
        first = start + (other if last else 0)
        keys += range(first, first + length)
        start += length + other
    rows = torch.tensor(keys, dtype=torch.int64, device="cuda")
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to("cuda")
    return dataclasses.replace(
        whole, key=whole.key[rows], value=whole.value[rows], cum_seq_lens_kv=ends, lengths_kv=lengths
    )


def parts_of(dtype: torch.dtype, heads: int, queries=QUERIES, first=FIRST, second=SECOND) -> list[Problem]:
    """All keys; the first; the last ones."""
    lengths = [a + b for a, b in zip(first, second, strict=True)]
    whole = make_problem(queries, lengths, heads, 1, 192, 128, dtype, "cuda", slack=3)
    return [whole, part(whole, first, second, False), part(whole, second, first, True)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def rounded_twice(problem: Problem, causal: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Judge a result that is rounded twice; the bound of `judge` is for one rounding: outputs below 8 lose up to a step
    more."""
    judge(problem, causal, out, lse)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES), ids=str)
def test_two_parts_are_the_whole(gpu, dtype):
    whole, first, last = parts_of(dtype, 2)
    tokens = whole.tokens
    earlier = call(first)
    plain = call(last)
    before = [tensor.clone() for tensor in earlier]
    out, lse = call(last, merge_into=earlier)
    assert out is earlier[0] and lse is earlier[1]
    for tensor, want in zip(earlier, before, strict=True):
        assert same(tensor[tokens:], want[tokens:]), "rows of no sequence were written"
    out[tokens:] = lse[tokens:] = math.nan
    rounded_twice(whole, False, out, lse)
    alone, kept = plain[1][:tokens].cpu(), before[1][:tokens].cpu()
    for mine, theirs, got in zip(plain, before, (out, lse), strict=True):
        mine, theirs, got = mine[:tokens].cpu(), theirs[:tokens].cpu(), got[:tokens].cpu()
        assert same(got[alone == -math.inf], theirs[alone == -math.inf]), "a row without new keys stays"
        assert same(got[kept == -math.inf], mine[kept == -math.inf]), "a row without earlier keys is the new one"
    again = [tensor.clone() for tensor in before]
    call(last, merge_into=tuple(again))
    assert same(again[0][:tokens], out[:tokens]) and same(again[1][:tokens], lse[:tokens])


def test_causal_behind_context(gpu):
    """A chunk of a prompt: what came before is merged into, and rows of the first tile see no own keys."""
    queries, own, context = [300, 20, 140], [300, 20, 10], [70, 129, 200]
    whole, cached, new = parts_of(torch.bfloat16, 2, queries, context, own)
    out, lse = call(new, True, merge_into=call(cached))
    tokens = whole.tokens
    exact_out, exact_lse = merged_reference(cached, new)
    assert (out[:tokens].cpu().double() - exact_out).abs().max() < 0.03
    assert torch.allclose(lse[:tokens].cpu().double(), exact_lse, rtol=1e-6, atol=1e-5)


def merged_reference(context: Problem, new: Problem) -> Result:
    from prefill_reference import attend

    results = [attend(context, False, torch.float64), attend(new, True, torch.float64)]
    lse = torch.logsumexp(torch.stack([lse for _, lse in results]), 0)
    shares = [torch.exp(x - lse).nan_to_num(0.0)[..., None] for _, x in results]
    return sum(out * share for (out, _), share in zip(results, shares, strict=True)).cpu(), lse.cpu()


@pytest.mark.parametrize("content", [math.nan, 0.0], ids=["nan", "zero"])
def test_into_nothing_gives_the_bits_of_the_call_alone(gpu, content):
    _, first, _ = parts_of(torch.bfloat16, 2)
    tokens = first.tokens
    want = call(first, True)
    found = call(first, True, merge_into=nothing(first, content))
    for got, alone in zip(found, want, strict=True):
        assert same(got[:tokens], alone[:tokens])


def test_no_keys_leave_everything(gpu):
    _, first, _ = parts_of(torch.bfloat16, 2)
    tokens = first.tokens
    empty = dataclasses.replace(
        first, cum_seq_lens_kv=torch.zeros_like(first.cum_seq_lens_kv), lengths_kv=[0] * len(QUERIES)
    )
    out, lse = call(first)
    out[:2] = -0.0
    before = out.clone(), lse.clone()
    call(empty, merge_into=(out, lse))
    assert same(out, before[0]) and same(lse[:tokens], before[1][:tokens])
    out, lse = nothing(first)
    call(empty, merge_into=(out, lse))
    assert (out[:tokens] == 0).all() and (lse[:tokens] == -math.inf).all()


def test_far_apart(gpu):
    """LSEs of which one is nothing beside the other, in both orders."""
    _, first, _ = parts_of(torch.bfloat16, 2)
    tokens = first.tokens
    plain = call(first)
    for shift in (-1e4, 1e4):
        out, lse = (tensor.clone() for tensor in plain)
        lse += shift
        out.neg_()
        before = out.clone(), lse.clone()
        call(first, merge_into=(out, lse))
        want = plain if shift < 0 else before
        has = plain[1][:tokens].cpu() > -math.inf
        assert same(out[:tokens].cpu()[has], want[0][:tokens].cpu()[has])
        assert same(lse[:tokens].cpu()[has], want[1][:tokens].cpu()[has])


@pytest.mark.parametrize("counting", [False, True], ids=["without", "in the LSE"])
def test_sinks_count_once(gpu, counting):
    whole, first, last = parts_of(torch.bfloat16, 4)
    earlier = call(first)
    sinks = torch.tensor([0.5, -math.inf, 4.0, math.inf], device="cuda")
    if counting:
        sinks[3] = 30.0
    whole, last = (dataclasses.replace(x, sinks=sinks, lse_includes_sink=counting) for x in (whole, last))
    out, lse = call(last, merge_into=earlier)
    out[whole.tokens :] = lse[whole.tokens :] = math.nan
    rounded_twice(whole, False, out, lse)
