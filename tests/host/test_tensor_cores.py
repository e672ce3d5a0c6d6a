"""The truncating sum that 8-bit kernels on Hopper are judged by."""

from __future__ import annotations

import tensor_cores
import torch
from tensor_cores import lse_loss, truncate, truncated_products


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
    query = torch.zeros(1, dtype=torch.float8_e4m3fn)
    assert not truncate(query)
    assert lse_loss(query, torch.ones(2), torch.zeros(2)) == 0


def test_loss_of_rows_with_keys(monkeypatch):
    monkeypatch.setattr(tensor_cores, "truncate", lambda query: True)
    plain, exact = torch.tensor([1.5, -torch.inf, 2.0]), torch.tensor([1.0, -torch.inf, 2.25])
    assert lse_loss(plain, plain, exact) == 0.5
    assert lse_loss(plain, plain[1:2], exact[1:2]) == 0
