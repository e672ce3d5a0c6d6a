"""Judgement of random calls whose sinks leave next to nothing of a row: what float32 loses there is accepted, and no
more."""

from __future__ import annotations

import pytest
import torch
from fuzz.reference_attention import Precision, attend, judge, precision, with_sinks

WEIGHTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
LIFTED = 2.0**17
"""What a kernel's weights are multiplied by before they are summed, at most."""


@pytest.fixture(params=WEIGHTS.values(), ids=WEIGHTS.keys())
def given(request) -> Precision:
    return precision(request.param, torch.bfloat16)


@pytest.fixture(params=[1, 128], ids=["one key", "equal keys"])
def rows(request):
    """Queries, keys and values of 4 rows. Equal keys have equal weights, whose rounding does not add up."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 64, generator=generator) for n in (4, 1))
    k = k.expand(request.param, -1)
    return q, k, k, torch.ones(4, len(k), dtype=torch.bool)


def attended(rows: tuple[torch.Tensor, ...], distance: float):
    """The rows beside sinks that are `distance` above their LSEs."""
    plain = attend(*rows, 1.0)
    return plain, with_sinks(plain, plain.lse + distance, False)


@pytest.mark.parametrize("scale", [1.0, 1e-3, -1e-6, 100.0])
def test_what_float32_makes_of_a_small_share_is_accepted(rows, given: Precision, scale: float):
    for distance in range(0, 160, 3):
        plain, expected = attended(rows, distance)
        share = (expected.out.norm() / plain.out.norm()).float()
        share = torch.where(share < 2.0**-126, 0.0, share)
        factor = torch.tensor(1 / LIFTED) * share * torch.tensor(scale)
        judge(expected, ((plain.out * LIFTED).float() * factor).bfloat16(), None, scale, given)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
@pytest.mark.parametrize("wrong", [0.0, 0.8, 1.25])
def test_a_small_share_that_is_wrong_is_refused(rows, given: Precision, scale: float, wrong: float):
    for distance in range(0, 79, 3):
        _, expected = attended(rows, distance)
        judge(expected, (expected.out * scale).bfloat16(), None, scale, given)
        with pytest.raises(AssertionError, match="instead of"):
            judge(expected, (expected.out * (scale * wrong)).bfloat16(), None, scale, given)
