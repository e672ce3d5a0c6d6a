"""Least times of Blackwell decodes: no problem of the table is planned to take longer than the peer's splits would."""

from __future__ import annotations

import pytest
from tsmla.row_format import ROWS
from tsmla.support import LATENT_DIM
from tsmla.variant import Arch, DecodeVariant, Dtype
from tsmla_emulator.decode_time import HBM, PROBLEMS, SHAPES, equal_splits_us, least_us, partial_row_bytes
from tsmla_kernels.sm90.decode.geometry import DecodeGeometry as HopperGeometry
from tsmla_kernels.sm100.decode.geometry import DecodeGeometry

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


@pytest.mark.parametrize("dtype", Dtype, ids=str)
def test_partial_rows_are_as_long_as_kernels_make_them(dtype: Dtype) -> None:
    solo, hopper = (DecodeVariant(arch, dtype, Dtype.BF16, lse=False, pdl=False) for arch in (Arch.SM100A, Arch.SM90A))
    for variant, geometry in ((solo, DecodeGeometry.solo(solo)), (hopper, HopperGeometry.of(hopper))):
        assert partial_row_bytes(variant.arch, dtype) == geometry.partial_rows.row_bytes(LATENT_DIM)


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM100A], ids=str)
def test_partial_rows_of_rows_with_scales_apart(arch: Arch) -> None:
    variant = DecodeVariant(arch, Dtype.E4M3, Dtype.BF16, lse=False, pdl=False, row=ROWS["snapmla"])
    geometry = HopperGeometry.of(variant) if arch is Arch.SM90A else DecodeGeometry.solo(variant)
    assert partial_row_bytes(arch, Dtype.E4M3, scaled=True) == geometry.partial_rows.row_bytes(LATENT_DIM)
