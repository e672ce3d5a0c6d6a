"""tsmla_decode of rows with a scale each, in emulation: edges of the contract, and how accurate it must be."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import Sight, run
from decode_rows import attend_stored, check_scaled, make_scaled, relative
from tsmla.support import DECODE_ROWS

ARCHS = [str(arch) for arch, rows in DECODE_ROWS.items() if "snapmla" in rows]

pytestmark = pytest.mark.archs(*ARCHS)

CASES = {
    "around a tile": ([127, 128, 129], 1, 16, 64, {"sight": Sight()}),
    "short": ([0, 1, 2, 63, 65], 1, 6, 16, {"power_of_two": False}),
    "window, two row tiles": ([400, 30], 5, 24, 32, {"sight": Sight(window_left=70), "side_by_side": True}),
    "long, and a packed batch": ([1100, 0, 300], [1, 2, 3], 8, 128, {"power_of_two": False, "output_scale": 0.5}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    *shape, page_size, fields = case
    check_scaled(make_scaled(*shape, page_size, **fields))
