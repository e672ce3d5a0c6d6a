"""Least times of Blackwell decodes: no problem of the table is planned to take longer than the peer's splits would."""

from __future__ import annotations

import pytest
from tsmla_emulator.decode_time import HBM, PROBLEMS, SHAPES, equal_splits_us, least_us

FASTEST = max(HBM.values())
"""Bytes a second, when plans differ most: what memory does not hide is seen."""


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: "-".join(map(str, problem)))
def test_no_plan_is_slower_than_equal_splits(problem: tuple[int, int, int, int]) -> None:
    """(heads, q_len, keys, batch)."""
    assert least_us(*problem, FASTEST) <= equal_splits_us(*problem, FASTEST) + 1e-9


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[:2] != (128, 4) and shape[2] == 81920])
def test_one_request_with_many_keys_is_faster(shape: tuple[int, int, int]) -> None:
    """Where the published leader is weakest: it has at most 64 parts, or 32 pairs, at one request."""
    assert least_us(*shape, 1, FASTEST) < 0.9 * equal_splits_us(*shape, 1, FASTEST)
