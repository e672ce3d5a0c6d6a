"""Least times of Blackwell decodes: no problem of the table is planned to take longer than the peer's splits would."""

from __future__ import annotations

import pytest
from tsmla.row_format import ROWS, uniform_row
from tsmla.variant import Arch, DecodeVariant, Dtype
from tsmla_emulator.decode_time import HBM, PROBLEMS, SHAPES, equal_splits_us, least_us, partial_row_bytes

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


@pytest.mark.parametrize(
    ("arch", "dtype", "row", "few", "more"),
    [
        (Arch.SM90A, Dtype.BF16, None, 1036, 1036),  # of 16 bits, an LSE, two factors
        (Arch.SM90A, Dtype.FP16, None, 2052, 2052),
        (Arch.SM90A, Dtype.E4M3, None, 1028, 1028),
        (Arch.SM90A, Dtype.E5M2, None, 2052, 2052),
        (Arch.SM90A, Dtype.E4M3, "snapmla", 1044, 1036),  # a factor of each warp's columns
        (Arch.SM90A, Dtype.BF16, "fp8_ds_mla", 1044, 1036),
        (Arch.SM100A, Dtype.BF16, None, 2052, 2052),
        (Arch.SM100A, Dtype.E4M3, None, 1028, 1028),
        (Arch.SM100A, Dtype.E4M3, "snapmla", 2052, 2052),
    ],
)
def test_bytes_of_partial_rows(arch: Arch, dtype: Dtype, row: str | None, few: int, more: int) -> None:
    """Of up to 16 query rows, and of more."""
    stored = ROWS[row] if row else uniform_row(dtype)
    variant = DecodeVariant(arch, dtype, Dtype.BF16, lse=False, row=stored)
    assert [partial_row_bytes(variant, rows) for rows in (1, 16, 17)] == [few, few, more]
