"""DeepSeek's rows of 656 bytes in Blackwell's decode: both kernels, what no row sees, and a role that lags behind."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import Sight, check, run
from decode_rows import as_bf16, as_plain, make_whole
from emulated_archs import SMS
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant
from tsmla_emulator.prove.check import check as check_variant
from tsmla_emulator.run.machine import Options
from unwatched import unwatched

from docs.pictures import schedules_of

VARIANT = DecodeVariant(Arch.SM100A, Dtype.BF16, Dtype.BF16, lse=True, row=ROWS["fp8_ds_mla"])
ROLES = {role.name: role.warps for schedule in schedules_of(VARIANT).values() for role in schedule.roles}

pytestmark = [pytest.mark.archs(str(VARIANT.arch)), pytest.mark.processors(SMS)]

CASES = {
    "pairs around a tile": ([127, 128, 129, 1, 0], 1, 72, 16, {}),
    "two row tiles and a row": ([200, 70], 1, 129, 128, {"power_of_two": True}),
    "windows of pairs": ([400, 30], 4, 24, 32, {"sight": Sight(window_left=70)}),
    "split pairs, and packed": ([900, 0, 300], [20, 1, 2], 4, 64, {"output_scale": 0.5}),
    "single CTAs, more than a window of boxes": ([1200], 1, 6, 16, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    *shape, page_size, fields = case
    check(make_whole(*shape, page_size, **fields))


@pytest.mark.parametrize("heads", [16, 72])
def test_the_bits_of_bf16_rows_whatever_unseen_rows_hold(gpu, heads):
    """Behind a request's keys, before its window, and in pages of the table that do not exist."""
    problem = make_whole([200, 1], 1, heads, 32, sight=Sight(window_left=69))
    given = as_bf16(str(VARIANT.arch), heads)
    out, lse = check(problem, **given)
    with unwatched(gpu):
        got, got_lse = run(problem, kv_cache=as_plain(problem), **given)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    out, lse = check(problem)
    seen = torch.zeros(problem.kv_cache.shape[:2], dtype=torch.bool)
    for request, length in enumerate(problem.seq_lens):
        for key in range(max(0, length - 70), length):
            seen[int(problem.block_tables[request, key // 32]), key % 32] = True
    for scale in (math.inf, math.nan):
        hidden = problem.kv_cache[~seen]
        hidden[:, :512] = 0x7E
        hidden[:, 512:528] = torch.full((4,), scale).view(torch.uint8)
        problem.kv_cache[~seen] = hidden
        again, again_lse = run(problem)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("completion", ["late", "eager"])
@pytest.mark.parametrize("starved", ["attend", "convert_keys"])
def test_a_starved_role(starved, completion, compiled_kernels):
    options = Options(async_mode=completion, happens_before=True, starve=ROLES[starved])
    assert check_variant(VARIANT, options, compiled=compiled_kernels).error is None
