"""tsmla_decode of requests whose keys are counted to the end of 32 bits, of which a window shows the last."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import judge, make_problem, run
from emulated_archs import KERNELS, SMS
from tsmla.problems.pages import NO_PAGE

pytestmark = [
    pytest.mark.archs(*KERNELS),
    pytest.mark.processors(SMS),
    pytest.mark.usefixtures("values_only"),
]
PAGE = 128
MOST_KEYS = 2**31 - 256
"""Most keys of a request: the last tile must end where 32 bits do. Keys from this one on are left out."""
WINDOW = 300


@pytest.mark.parametrize("length", [MOST_KEYS, 2**31 - 100, 2**31 - 1], ids=lambda n: f"2^31 - {2**31 - n}")
def test_keys_beyond_the_most_of_a_request_are_left_out(gpu, length):
    """Its token still has the last position, so that the window shows fewer keys. Those beyond are NaN."""
    first = length - 1 - WINDOW
    shown = min(length, MOST_KEYS) - first
    problem = make_problem([shown], 1, 16, page_size=PAGE)
    cache = torch.full((5, PAGE, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    first_page, place = divmod(first, PAGE)
    cache.view(-1, 576)[place : place + shown] = problem.rows[0]
    table = torch.full((1, 2**31 // PAGE), NO_PAGE, dtype=torch.int32)
    pages = table.shape[1] - first_page
    table[0, first_page:] = torch.arange(pages)
    assert pages <= len(cache)
    given = problem.arguments(
        kv_cache=cache,
        block_tables=table.to("cuda"),
        window_left=WINDOW,
        max_seq_len=2**31 - 1,
        seq_lens=torch.tensor([length], dtype=torch.int32, device="cuda"),
    )
    out, lse = run(problem, **given)
    judge(problem, out, lse)
