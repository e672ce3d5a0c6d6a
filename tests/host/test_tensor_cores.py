"""The truncating sum that 8-bit kernels on Hopper are judged by."""

from __future__ import annotations

import dataclasses

import prefill_reference
import pytest
import torch
from prefill_reference import Problem, attend, lost_lse, make_problem
from tensor_cores import sampled_losses, truncate, truncated_products


def test_what_14_bits_hold_is_exact():
    q, k = torch.randint(-3, 4, (5, 192)).float(), torch.randint(-3, 4, (7, 192)).float()
    assert torch.equal(truncated_products(q, k), (q @ k.T).double())


def test_what_lies_13_bits_below_the_largest_is_cut_off():
    q, k = torch.zeros(1, 64), torch.ones(1, 64)
    q[0, 0] = 2.0**13
    q[0, 1], q[0, 2], q[0, 40] = 1.5, -1.5, 0.75
    assert truncated_products(q, k).item() == 2.0**13 + 1 - 1
    q[0, 0] = 2.0**12
    assert truncated_products(q, k).item() == 2.0**12 + 0.5


def test_nothing_is_cut_off_elsewhere():
    assert not truncate(torch.zeros(1, dtype=torch.float8_e4m3fn))


@pytest.fixture
def on_hopper(monkeypatch):
    """References judge as they do there, though no GPU is at hand."""
    monkeypatch.setattr(prefill_reference, "truncate", lambda query: query.dtype.itemsize == 1)


def problem_of(lengths_q: list[int], lengths_kv: list[int], dtype: torch.dtype) -> Problem:
    return make_problem(lengths_q, lengths_kv, 4, 4, 192, 128, dtype, "cpu", slack=1)


def lse_of(problem: Problem, order: torch.Tensor) -> torch.Tensor:
    """What tensor cores make of the LSE if columns are added in this order."""
    turned = dataclasses.replace(problem, query=problem.query[..., order], key=problem.key[..., order])
    return attend(turned, False, problem.query.dtype)[1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_losses_of_a_few_rows_are_within_what_many_lose(on_hopper, dtype):
    """The order in which hardware adds is not known. Twice the worst of four rows of a single key, added in another
    order, is less than some of these lose (here the last 64 dims first)."""
    torch.manual_seed(0)
    problem = problem_of([1] * 80, [1] * 80, dtype)
    _, exact = attend(problem, False, torch.float64)
    off, forwards = ((lse_of(problem, torch.arange(192).roll(by)) - exact).abs() for by in (64, 0))
    assert (off <= 1e-5 + lost_lse(problem, False, exact)).all()
    assert (off > 1e-5 + 2 * forwards.amax(1, keepdim=True)).any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_rows_of_many_keys_lose_the_same(on_hopper, dtype):
    """What is cut off brings scores nearer to 0, so that LSEs fall, which more keys do not average away."""
    torch.manual_seed(0)
    problem = problem_of([2], [9000], dtype)
    _, exact = attend(problem, False, torch.float64)
    off = exact - lse_of(problem, torch.arange(192).roll(64))
    allowed = lost_lse(problem, False, exact)
    assert off.mean() > 1e-5 and (off.abs() <= allowed).all()
    assert (allowed < 3e-4).all()  # 2.7 keys of average weight


def test_a_missing_key_is_more_than_a_loss(on_hopper):
    """What the row with the least change loses, on average: one of 300 keys of random weight."""
    torch.manual_seed(0)
    problem = problem_of([5], [300], torch.float8_e5m2)
    _, exact = attend(problem, False, torch.float64)
    assert lost_lse(problem, False, exact).max() < 1 / 300 / 4


def test_nothing_is_lost_where_products_are_exact(on_hopper):
    problem = problem_of([3], [2], torch.float8_e4m3fn)
    ones = dataclasses.replace(problem, query=torch.ones(3, 4, 192).to(torch.float8_e4m3fn), key=torch.ones(2, 4, 192))
    for given, loses in ((ones, False), (problem, True)):
        assert (sampled_losses(given.query, given.key)[1] != 0).any() == loses
    assert (sampled_losses(problem.query[:0], problem.key)[1] == 0).all()
