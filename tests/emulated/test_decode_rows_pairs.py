"""tsmla_decode of DeepSeek's rows of 656 bytes for 128 heads, in emulation: on Hopper, pairs of CTAs convert keys for
each other."""

from __future__ import annotations

import pytest
import torch
from decode_reference import Sight, check, run
from decode_rows import as_plain, make_whole
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
