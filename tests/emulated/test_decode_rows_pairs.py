"""tsmla_decode of DeepSeek's rows of 656 bytes for 128 heads, in emulation: on Hopper, pairs of CTAs convert keys for
each other."""

from __future__ import annotations

import pytest
import torch
import tsmla
from chosen_reference import check_chosen, make_chosen
from decode_reference import Sight, check, run
from decode_rows import WHOLE, as_plain, make_whole
from tsmla.identity.plan import plan_decode

pytestmark = pytest.mark.archs("sm_90a")


@pytest.fixture(autouse=True)
def few_parts(monkeypatch):
    """Leave so few CTAs that requests have to share them, in pairs."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 4, *shape))


def ctas_together(gpu) -> int:
    """In the last call's attention."""
    return gpu.emulation.calls[-1].launches[0].cluster[0]


CASES = {
    "around a half and a tile": ([31, 32, 33, 65], 1, 128, 64, {}),
    "short, pages of 16": ([0, 1, 130], 1, 128, 16, {"power_of_two": True}),
    "two query tokens and a window": ([140], 2, 128, 32, {"sight": Sight(window_left=70)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    seq_lens, q_len, heads, page_size, fields = case
    check(make_whole(seq_lens, q_len, heads, page_size, **fields))
    assert ctas_together(gpu) == 2


def test_requests_that_are_split(gpu):
    """And a page that there is not."""
    problem = make_whole([330, 70, 0, 290], 1, 128, 64)
    problem.block_tables[0, 2] = -1
    problem.rows[0][2 * 64 : 3 * 64] = 0
    check(problem)
    assert ctas_together(gpu) == 2


@pytest.mark.parametrize("q_len, heads", [(1, 64), (2, 64), (3, 128), ([1], 128)])
def test_which_calls_take_pairs(gpu, q_len, heads):
    """A single row tile, those of two tokens, and a pack; those of three tokens come by twos."""
    check(make_whole([70], q_len, heads))
    assert ctas_together(gpu) == (2 if q_len == 3 else 1)


def test_it_gives_what_bf16_rows_give(gpu):
    problem = make_whole([150, 70], 1, 128)
    out, lse = check(problem, batch_invariant=True, enable_pdl=True)
    got, got_lse = run(problem, kv_cache=as_plain(problem), batch_invariant=True)
    assert ctas_together(gpu) == 1
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


CHOSEN = {
    "lists around a half and a tile": ((6,), 128, 130, {"lengths": [31, 32, 33, 63, 65, 130]}),
    "no key, one key, and nearly all outside": ((2, 2), 128, 100, {"lengths": [0, 1, 100, -3], "outside": 0.9}),
    "lists that are split, pages of 69": ((2,), 128, 330, {"page_size": 69, "output_scale": 0.5}),
    "four row tiles": ((1,), 256, 200, {}),
}


@pytest.mark.parametrize("case", CHOSEN.values(), ids=CHOSEN.keys())
def test_chosen_keys(gpu, case):
    shape, heads, top_k, more = case
    check_chosen(make_chosen(shape, heads, top_k, row=WHOLE, **more))
    assert ctas_together(gpu) == 2


def test_all_keys_in_order_give_the_bits_of_a_dense_call(gpu):
    """Work is dealt alike, and pairs of CTAs add in the same order."""
    dense = make_whole([200, 200], 1, 128, sight=Sight(causal=False))
    out, lse = run(dense)
    keys = torch.arange(200)
    indices = dense.block_tables.cpu()[:, keys // 64] * 64 + keys % 64
    chosen = {**dense.arguments(), "indices": indices.int().to("cuda")[:, None]}
    one, its_lse = tsmla.tsmla_decode(**chosen | dict.fromkeys(("block_tables", "seq_lens", "max_seq_len")))
    assert ctas_together(gpu) == 2
    assert torch.equal(one, out) and torch.equal(its_lse, lse)


def test_causal_keys_in_small_pages(gpu):
    """Keys of a dense cache are gathered, too, where a page holds fewer than a copy brings."""
    check(make_whole([140, 3], 2, 128, 4, sight=Sight(window_left=70)))
    assert ctas_together(gpu) == 2
