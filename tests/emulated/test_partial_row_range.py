"""tsmla_decode's outputs whose columns have other magnitudes, of requests whose keys are split: what is kept by rows of
16 bits, in which partial results wait for the combine.

Weights are exact, powers of two of one another and mostly alike. So what is off comes from partial results, and from
rounding the output.
"""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import LATENT, ROPE, Problem, attend, make_problem, run
from decode_rows import attend_stored, make_scaled, make_whole, rounds
from emulated_archs import SMS

pytestmark = [
    pytest.mark.archs("sm_90a"),
    pytest.mark.processors(SMS),
    pytest.mark.usefixtures("values_only"),
]
KEYS, BLOCK = 600, 128
SCALES = (-60, *range(-20, -6), 0, 60)
"""Powers of two of whole requests. Among the small ones are those from which on sums of 64 or 128 keys lie where rows
are kept as they are, of columns up to 1 and of those up to 2^8."""
EVEN_AND_ODD, ALONE = ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))
"""Blocks of 128 columns that share a power of two."""
ROUNDED = 1.01 * 2.0**-8
"""A share of an output: what rounding it to bf16 and a partial result to as many bits may make, half each."""
FULL, LOST = 2.0**-14, 2.0**-22
"""Shares of the largest output of those that share a power: the least that is kept as well as that, and how much a
smaller one may be off. (In a partial result it is half of that: another part of the keys may have larger ones.)"""
LEAST_E4M3, LOST_E4M3 = 2.0**-22, 2.0**-31
"""These shares where the cache is in e4m3, which is kept in fixed point: of outputs in the units of the cache."""


def numbers(span: int, apart: int, scale: int) -> torch.Tensor:
    """Keys [KEYS, 576] whose rope parts are 0. Columns are from 1 down to 2^-span, in disorder, times 2^scale and, from
    block to block, 1, 2^-apart, 4^-apart, 2^apart."""
    exponents = torch.cat([torch.randperm(BLOCK) * span // (BLOCK - 1) for _ in range(LATENT // BLOCK)])
    exponents = scale - exponents - apart * torch.tensor([0, 1, 2, -1]).repeat_interleave(BLOCK)
    latent = (1 + torch.rand(KEYS, LATENT)) * 2.0**exponents
    return torch.cat((latent, torch.zeros(KEYS, ROPE)), -1).to("cuda")


def largest_of(exact: torch.Tensor, sharing: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """For each output [.., 512], the largest magnitude of those that share a power with it."""
    blocks = exact.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    for group in sharing:
        blocks[..., group] = blocks[..., group].amax(-1, keepdim=True)
    return blocks.repeat_interleave(BLOCK, -1)


def judge(problem: Problem, exact: torch.Tensor, least: torch.Tensor, lost: torch.Tensor, **given) -> None:
    """least: from which magnitude on outputs must be right to a bf16's precision. lost: how much others may be off. A
    call whose requests are not split must be right in all, and have other bits, so that there is something to see."""
    whole, _ = run(problem, **given, batch_invariant=True)
    assert ((whole.double() - exact).abs() <= ROUNDED * exact.abs()).all()
    out, _ = run(problem, **given)
    off, size = (out.double() - exact).abs(), exact.abs()
    assert (size >= least).any() and (size > 0).all()
    assert (off <= ROUNDED * size)[size >= least].all()
    assert (off <= ROUNDED * size + lost).all()
    assert not torch.equal(out, whole)


def judge_sharing(problem: Problem, exact: torch.Tensor, sharing, **given) -> None:
    largest = largest_of(exact, sharing)
    judge(problem, exact, FULL * largest, LOST * largest, **given)


def test_bf16(gpu):
    rows = [numbers(14, 8, scale).bfloat16() for scale in SCALES]
    problem = make_problem([KEYS] * len(rows), 1, 16, rows=rows)
    problem.query.zero_()
    judge_sharing(problem, attend(problem, torch.float64)[0], EVEN_AND_ODD)


@pytest.mark.parametrize("heads, sharing", [(16, ALONE), (17, EVEN_AND_ODD)])
def test_rows_of_656_bytes(gpu, heads, sharing):
    """16 query rows have a kernel of their own."""
    keys = [numbers(14, 8, scale) for scale in SCALES]
    problem = make_whole([KEYS] * len(keys), 1, heads, keys=keys, power_of_two=True, rounded=rounds(gpu.arch, heads))
    problem.query.zero_()
    judge_sharing(problem, attend(problem, torch.float64)[0], sharing)


@pytest.mark.parametrize("heads", [16, 17])
def test_rows_with_a_scale_each(gpu, heads):
    """A row's columns reach as far apart as e4m3 does. More than 16 query rows are kept as averages of stored numbers,
    as those of an e4m3 cache are."""
    keys = [numbers(9, 2, scale) for scale in SCALES]
    query = torch.zeros(len(keys), 1, heads, LATENT + ROPE, device="cuda")
    scaled = make_scaled([KEYS] * len(keys), 1, heads, keys=keys, query=query)
    exact = attend_stored(scaled, "exact")[0]
    if heads == 16:
        judge_sharing(scaled.problem, exact, ALONE, **scaled.arguments())
    else:
        unit = torch.stack([rows.abs().max() / 448 for rows in keys]).double().view(-1, 1, 1, 1).expand_as(exact)
        judge(scaled.problem, exact, LEAST_E4M3 * unit, LOST_E4M3 * unit, **scaled.arguments())


def test_e4m3(gpu):
    """Columns of which one key alone is not 0, and has a weight down to 2^-12 of another's."""
    rows = torch.zeros(KEYS, LATENT + ROPE)
    rows[torch.randperm(KEYS)[:LATENT], torch.arange(LATENT)] = 2.0 ** (torch.randperm(LATENT) * 18 // LATENT - 9)
    rows[:, LATENT] = -(torch.arange(KEYS) % 13)
    problem = make_problem([KEYS] * 2, 1, 16, torch.float8_e4m3fn, rows=[rows.to("cuda").to(torch.float8_e4m3fn)] * 2)
    problem.query.zero_()[..., LATENT] = 1.0
    problem.softmax_scale = math.log(2)
    exact = attend(problem, torch.float64)[0]
    judge(problem, exact, torch.full_like(exact, LEAST_E4M3), torch.full_like(exact, LOST_E4M3))


def test_fp16(gpu):
    """Is kept in float32: outputs are right to all its bits as far as its normal numbers reach."""
    problem = make_problem([KEYS] * 2, 1, 16, torch.float16, rows=[numbers(27, 0, 14).half() for _ in range(2)])
    problem.query.zero_()
    exact = attend(problem, torch.float64)[0]
    out, _ = run(problem)
    assert exact.min() > 0 and exact.max() / exact.min() > 2.0**26
    assert ((out.double() - exact).abs() <= 1.01 * 2.0**-11 * exact).all()
