"""Rows with a scale each in Blackwell's decode: pairs of CTAs, what no row sees, and a role that lags behind."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import Sight, run
from decode_rows import (
    MOST_OFF,
    OUTLIERS,
    attend_stored,
    check_scaled,
    make_scaled,
    outlier_call,
    relative,
)
from emulated_archs import SMS
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant
from tsmla_emulator.prove.check import check
from tsmla_emulator.run.machine import Options

from docs.pictures import schedules_of

VARIANT = DecodeVariant(Arch.SM100A, Dtype.E4M3, Dtype.BF16, lse=True, row=ROWS["snapmla"])
ROLES = {role.name: role.warps for schedule in schedules_of(VARIANT).values() for role in schedule.roles}

pytestmark = [pytest.mark.archs(str(VARIANT.arch)), pytest.mark.processors(SMS)]

PAIRS = {
    "around a tile": ([127, 128, 129, 1, 0], 1, 72, 16, {"power_of_two": False}),
    "two row tiles and a row": ([200, 70], 1, 129, 128, {"side_by_side": True}),
    "windows": ([400, 30], 4, 24, 32, {"sight": Sight(window_left=70), "power_of_two": False}),
    "split, and packed": ([900, 0, 300], [20, 1, 2], 4, 64, {"output_scale": 0.5}),
}


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS.keys())
def test_pairs_against_float64(gpu, case):
    *shape, page_size, fields = case
    check_scaled(make_scaled(*shape, page_size, **fields))


def test_pairs_are_accurate_on_scales_as_models_have_them(gpu):
    scaled = outlier_call(OUTLIERS[0], [700, 70], 72, power_of_two=False)
    out, _ = check_scaled(scaled)
    assert relative(out, attend_stored(scaled, "exact")[0]) <= MOST_OFF


@pytest.mark.parametrize("heads, scale", [(16, math.inf), (16, -1.0), (72, -math.inf), (72, 0.0)])
def test_scales_and_rope_of_unseen_keys_do_no_harm(gpu, heads, scale):
    """Behind a request's keys, and before its window, in tiles that have keys that are seen."""
    scaled = make_scaled([200, 1], 1, heads, 32, sight=Sight(window_left=69))
    out, lse = check_scaled(scaled)
    problem, (latent, rope, scales) = scaled.problem, scaled.cache
    seen = torch.zeros(scales.shape, dtype=torch.bool)
    for request, length in enumerate(problem.seq_lens):
        for key in range(max(0, length - 70), length):
            seen[int(problem.block_tables[request, key // 32]), key % 32] = True
    scales[~seen], rope[~seen], latent.view(torch.uint8)[~seen] = scale, math.nan, 0x7F
    again, again_lse = run(problem, **scaled.arguments())
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("completion", ["late", "eager"])
@pytest.mark.parametrize("starved", ["attend", "load_scales"])
def test_a_starved_role(starved, completion, compiled_kernels):
    options = Options(async_mode=completion, happens_before=True, starve=ROLES[starved])
    assert check(VARIANT, options, compiled=compiled_kernels).error is None
