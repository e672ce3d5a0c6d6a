"""How the results of the calls of `check` are judged."""

from __future__ import annotations

import pytest
import torch
from tsmla.problems.prefill import rmse_of_rounding
from tsmla_emulator.prove.calls.reference import attention, judged

WEIGHTS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def results(weights: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Output, LSE and what both must be, of 300 queries of 2 heads; their weights are rounded to this type."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((300, 2, 64), (400, 1, 64), (400, 1, 64)))
    exact, lse = attention(q, k, v, 0.125, True)
    scores = (torch.einsum("qhd,kd->hqk", q.double(), k[:, 0].double()) * 0.125).masked_fill(
        ~torch.ones(300, 400, dtype=torch.bool).tril(100), -torch.inf
    )
    rounded = ((scores - scores.amax(-1, keepdim=True)).exp() * 256).to(weights).double()
    out = torch.einsum("hqk,kd->qhd", rounded, v[:, 0].double()) / 256
    top = scores.amax(-1).T
    return (out * (top - lse).exp()[..., None]).bfloat16(), lse.float(), exact, lse


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.8, 1.2, float("nan")])
def test_a_row_of_one_head_that_is_wrong_is_refused(weights, factor):
    out, lse, exact, exact_lse = results(weights)
    step = rmse_of_rounding(weights, out.dtype)
    assert judged(out, lse, exact, exact_lse, step, torch.bfloat16)[1] is None
    out[17, 1] *= factor
    assert "a row" in (judged(out, lse, exact, exact_lse, step, torch.bfloat16)[1] or "")


def test_an_output_of_a_row_without_keys_is_refused():
    out, lse, exact, exact_lse = results(torch.bfloat16)
    exact[5], exact_lse[5], lse[5] = 0.0, -torch.inf, -torch.inf
    out[5] = 0.0
    assert judged(out, lse, exact, exact_lse, 2.0**-8, torch.bfloat16)[1] is None
    out[5, 0, 0] = 1e-30
    assert "a row" in (judged(out, lse, exact, exact_lse, 2.0**-8, torch.bfloat16)[1] or "")
