"""The truncating sum that 8-bit kernels on Hopper are judged by."""

from __future__ import annotations

import torch
from tensor_cores import truncate, truncated_products


def test_what_14_bits_hold_is_exact():
    q, k = torch.randint(-3, 4, (5, 192)).float(), torch.randint(-3, 4, (7, 192)).float()
    assert torch.equal(truncated_products(q, k), (q @ k.T).double())


def test_what_lies_13_bits_below_the_largest_is_cut_off():
    q, k = torch.zeros(1, 64), torch.ones(1, 64)
    q[0, 0] = 2.0**13
    q[0, 1], q[0, 2], q[0, 40] = 1.5, -1.5, 0.75
    assert truncated_products(q, k).item() == 2.0**13 + 1 - 1
    q[0, 0] = 2.0**12
    assert truncated_products(q, k).item() == 2.0**12 + 0.5


def test_nothing_is_cut_off_elsewhere():
    assert not truncate(torch.zeros(1, dtype=torch.float8_e4m3fn))
