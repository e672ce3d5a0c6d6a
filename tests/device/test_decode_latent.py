"""tsmla_decode of rows without a rope piece on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from decode_reference import Sight, check, make_problem
from decode_rows import LENGTHS

pytestmark = pytest.mark.usefixtures("seed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("q_len, heads, page_size", [(1, 16, 64), (2, 128, 64), (3, 7, 16), (1, 65, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(lengths, q_len, heads, page_size, dtype):
    sight = Sight(window_left=200) if q_len == 3 else Sight()
    check(make_problem(lengths, q_len, heads, dtype, page_size, rope=0, sight=sight, output_scale=0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_packs_of_other_numbers_of_tokens(dtype):
    check(make_problem([1500, 70, 0, 300], [2, 0, 1, 5], 24, dtype, rope=0))
