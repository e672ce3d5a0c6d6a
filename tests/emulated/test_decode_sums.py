"""tsmla_decode of values of one sign under flat scores, products summed as tensor cores do: a sum that keeps 13 bits
loses what is small beside it, and over a long segment that is much."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import tsmla
from chosen_reference import make_chosen
from decode_reference import LATENT, ROPE, Problem, make_problem, run
from decode_rows import Stored, make_scaled, make_whole
from tsmla.identity.plan import plan_decode
from unwatched import unwatched

pytestmark = [pytest.mark.archs("sm_90a"), pytest.mark.processors(1)]

KEYS = 640
LARGE, SMALL = 224.0, 3 / 256
"""Weights of the first key and of all others, which are lost beside it: 3 % of the whole."""
ALLOWED = 0.01
"""Relative: bf16 rounds by up to 0.4 %, and of the first tile, 0.3 % may be lost."""
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
FEW, MANY = 16, 24
"""Heads for which Hopper has kernels of their own."""


@pytest.fixture(autouse=True)
def tensor_cores(gpu, monkeypatch):
    """Sums of tensor cores, on a GPU of one SM: no request is cut into segments."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 1, *shape))
    with unwatched(gpu):
        if gpu.emulation is not None:
            gpu.emulation.options = dataclasses.replace(gpu.emulation.options, hardware_sums=True)
        yield


def keys(columns: int = LATENT + ROPE) -> torch.Tensor:
    """The keys. One of 128 columns is large in all, so that their scales are those of the first."""
    rows = torch.full((KEYS, columns), SMALL, device="cuda")
    rows[0, :] = rows[:, ::128] = LARGE
    return rows


def judge(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, allowed: float = ALLOWED) -> None:
    """Assert that flat attention gives the mean of the values."""
    exact = rows[:, :LATENT].double().mean(0)
    off = (out.double() / exact - 1).abs().max()
    assert off <= allowed, f"an output is off by {off:.1%}"
    assert (lse.double() - math.log2(len(rows))).abs().max() < 2e-5


def flat(problem: Problem) -> Problem:
    """Have all scores be 0."""
    problem.query.copy_(torch.zeros_like(problem.query, dtype=torch.float32))
    return problem


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_rows_of_one_dtype(gpu, dtype, heads):
    judge(*run(flat(make_problem([KEYS], 1, heads, dtype, rows=[keys().to(dtype)]))), keys())


def test_a_long_segment(gpu):
    """4,096 keys between 0.5 and 1.5 lose up to 5 % of their mean in one sum of 13 bits."""
    rows = (torch.rand(4096, LATENT + ROPE, device="cuda") + 0.5).to(EIGHT_BITS[0])
    problem = flat(make_problem([len(rows)], 1, MANY, EIGHT_BITS[0], rows=[rows]))
    judge(*run(problem), rows, torch.finfo(torch.bfloat16).eps)


def test_rows_without_a_rope_piece(gpu):
    rows = keys(LATENT)
    judge(*run(flat(make_problem([KEYS], 1, MANY, EIGHT_BITS[0], rows=[rows.to(EIGHT_BITS[0])], rope=0))), rows)


@pytest.mark.parametrize("heads", [FEW, MANY])
def test_rows_with_a_scale_each(gpu, heads):
    scaled = make_scaled([KEYS], 1, heads, query=torch.zeros(1, device="cuda"), keys=[keys()])
    judge(*run(scaled.problem, **scaled.arguments()), keys())


@pytest.mark.parametrize("heads", [FEW, MANY])
def test_rows_of_656_bytes(gpu, heads):
    judge(*run(flat(make_whole([KEYS], 1, heads, keys=[keys()]))), keys())


@pytest.mark.parametrize("row", ["e4m3", "latent_e4m3", "snapmla"])
def test_chosen_keys(gpu, row):
    scaled, rope = row == "snapmla", 0 if row == "latent_e4m3" else ROPE
    given = {"row": row} if scaled else {"dtype": EIGHT_BITS[0], "rope": rope}
    slots = torch.arange(KEYS)
    chosen = make_chosen((1,), MANY, KEYS, indices=slots[None], **given)
    rows = keys(LATENT + rope)
    own = Stored.of(rows) if scaled else None
    held = (rows,) if own is None else (own.latent, own.rope, own.scales)
    caches = chosen.kv_cache if scaled else (chosen.kv_cache,)
    page_size = caches[0].shape[1]
    for cache, numbers in zip(caches, held, strict=True):
        cache[slots // page_size, slots % page_size] = numbers.to(cache.dtype)
    for piece in chosen.query[:2] if scaled else (chosen.query,):
        piece.copy_(torch.zeros_like(piece, dtype=torch.float32))
    judge(*tsmla.tsmla_decode(**chosen.arguments()), rows)
