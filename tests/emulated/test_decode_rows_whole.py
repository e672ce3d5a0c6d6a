"""tsmla_decode of DeepSeek's rows of 656 bytes, in emulation: edges of the contract, and the bits of what is read."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import Sight, check, run
from decode_rows import OUTLIERS, as_bf16, as_plain, keys_with_outliers, make_whole, rounds
from emulated_archs import KERNELS, SMS
from tsmla.identity.plan import plan_decode
from unwatched import unwatched

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]

CASES = {
    "around a tile": ([127, 128, 129], 1, 16, 64, {"sight": Sight()}),
    "short, pages of 16": ([0, 1, 2, 63, 65], 1, 6, 16, {"power_of_two": True}),
    "window, two row tiles": ([400, 30], 5, 24, 32, {"sight": Sight(window_left=70)}),
    "a packed batch": ([700, 0, 300], [1, 2, 3], 8, 128, {"output_scale": 0.5}),
    "not causal": ([190, 66], 3, 16, 64, {"sight": Sight(causal=False)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    seq_lens, q_len, heads, page_size, fields = case
    rounded = not isinstance(q_len, int) or rounds(gpu.arch, q_len * heads)
    check(make_whole(seq_lens, q_len, heads, page_size, rounded=rounded, **fields))


@pytest.mark.parametrize("lengths", [[1300], [400, 70, 0, 250, 129, 64]])
def test_few_parts(gpu, monkeypatch, lengths):
    """Rings that are filled more than once, tasks of several requests, and requests that are split."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 2, *shape))
    problem = make_whole(lengths, 2, 8, 16, rounded=rounds(gpu.arch, 16), sight=Sight(window_left=1100))
    problem.block_tables[0, 18] = -1  # no page: keys that are zeros
    problem.rows[0][18 * 16 : 19 * 16] = 0
    check(problem)


@pytest.mark.parametrize("heads", [16, 17])
def test_columns_that_are_zero_or_next_to_nothing(gpu, heads):
    """Partial rows are kept in float16; not all of their columns have the same power of two then; with few rows, every
    128 columns have their own."""
    keys = torch.randn(450, 576, device="cuda")
    keys[:, 128:256], keys[:, 256:384] = 0.0, keys[:, 256:384] * 2.0**-30
    keys[1:449:2, 384:512] = -keys[0:448:2, 384:512]
    problem = make_whole([450], 1, heads, keys=[keys], softmax_scale=1e-3, rounded=rounds(gpu.arch, heads))
    out, _ = check(problem)
    assert (out[..., 128:256] == 0).all() and (heads > 16 or (out[..., 256:384] != 0).any())


def test_everything_that_hides_keys(gpu):
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_whole([190, 66], 3, 16, 32, visible=visible, causal_seqs=[380, 130], sight=sight))


def test_sinks_and_batch_invariance(gpu):
    sinks = torch.randn(8, device="cuda")
    problem = make_whole([500, 64, 5], 2, 8, sinks=sinks, lse_includes_sink=True)
    out, lse = check(problem, batch_invariant=True, enable_pdl=True)
    alone = {"query": problem.query[:1], "block_tables": problem.block_tables[:1], "out": None}
    lengths = torch.tensor([500], dtype=torch.int32, device="cuda")
    got, got_lse = run(problem, seq_lens=lengths, batch_invariant=True, enable_pdl=True, **alone)
    assert torch.equal(got, out[:1]) and torch.equal(got_lse, lse[:1])


LENGTHS = [70, 129]


def keys_of(case: str) -> list[torch.Tensor]:
    keys = keys_with_outliers(LENGTHS, case)
    if case == "scales of any magnitude":
        keys = [rows * torch.logspace(-30, 30, len(rows), device="cuda")[:, None] for rows in keys]
    return keys


@pytest.mark.parametrize("case", ["usual", *OUTLIERS, "scales of any magnitude"])
@pytest.mark.parametrize("heads", [16, 17])
def test_it_gives_what_bf16_rows_give(gpu, heads, case):
    """Rows that `mla_read_cache` reads from them: the very bits, where the same kernel takes both; not for few query
    rows on Hopper, whose kernel does not round what it multiplies."""
    keys = keys_of(case)
    largest = max(float(own.double().norm(dim=-1).max()) for own in keys)
    rounded = rounds(gpu.arch, heads)
    problem = make_whole(LENGTHS, 1, heads, keys=keys, softmax_scale=8 / largest, rounded=rounded)
    given = as_bf16(gpu.arch, heads)
    check(problem)
    out, lse = check(problem, **given)
    if rounded:
        with unwatched(gpu):
            got, got_lse = run(problem, kv_cache=as_plain(problem), **given)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("scale", [3, 16])
@pytest.mark.parametrize("magnitude", [1, 1e30])
def test_it_gives_what_bf16_rows_give_where_references_move(gpu, scale, magnitude):
    """In some rows of a warp they move because they must, in others because they may. Products of 1e30 and more are as
    far below 0 as the reference before the first key is: it then moves before the first tile because it has to."""
    keys = torch.randn(500, 576, device="cuda") * magnitude
    keys[[150, 280, 400], :512] *= torch.tensor([6.0, 12.0, 20.0], device="cuda")[:, None]
    problem = make_whole([500], 1, 64, keys=[keys], softmax_scale=scale / float(keys.double().norm(dim=-1).max()))
    out, lse = check(problem, batch_invariant=True)
    with unwatched(gpu):
        got, got_lse = run(problem, kv_cache=as_plain(problem), batch_invariant=True)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_a_scale_of_nan_spoils_who_sees_it_only(gpu):
    problem = make_whole([100, 80], 1, 16, rounded=rounds(gpu.arch, 16))
    out, _ = run(problem)
    page = int(problem.block_tables[0, 1])
    problem.kv_cache[page, 99 % 64, 512:516].view(torch.float32).fill_(math.nan)
    spoiled, _ = run(problem)
    assert spoiled[0, ..., :128].isnan().all() and torch.equal(spoiled[1], out[1])
    problem.seq_lens[0] = 99
    check(problem)


@pytest.mark.parametrize("heads", [16, 17])
def test_scales_may_be_negative(gpu, heads):
    problem = make_whole([100, 64], 1, heads, rounded=rounds(gpu.arch, heads))
    for request, rows in enumerate(problem.rows):
        for key in range(3, len(rows), 7):
            page = problem.kv_cache[int(problem.block_tables[request, key // 64])]
            page[key % 64, 516:524].view(torch.float32).neg_()
            rows[key, 128:384] *= -1
    check(problem)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_no_number(gpu, scale):
    problem = make_whole([70], 1, 16)
    problem.kv_cache[int(problem.block_tables[0, 0]), 5, 516:520].view(torch.float32).fill_(scale)
    out, _ = run(problem)
    assert out.isnan().all()
