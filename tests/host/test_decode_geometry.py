"""Budgets of every Blackwell decode that ships, in both of its kernels."""

from __future__ import annotations

import dataclasses

import pytest
from tsmla.support import LATENT_DIM, ROPE_DIM
from tsmla.variant import Arch, DecodeVariant
from tsmla_kernels.limits import REGISTERS_PER_SM, SHARED_BYTES_PER_CTA, TMEM_COLUMNS
from tsmla_kernels.sm100.decode.geometry import CONTROL_BYTES, DecodeGeometry
from tsmla_kernels.sm100.decode.schedule import DecodeSchedule

from build_aot.matrix import shipped

VARIANTS = [v for v in shipped() if isinstance(v, DecodeVariant) and v.arch is not Arch.SM90A]
KINDS = {"pair": DecodeGeometry.pair, "solo": DecodeGeometry.solo}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_shipped_variants_are_within_budget(variant, kind):
    geometry = KINDS[kind](variant)
    element = variant.dtype.bits // 8
    row = (LATENT_DIM + ROPE_DIM) * element
    keys = geometry.k_slots * geometry.k_keys * row // geometry.k_parts
    values = geometry.v_slots * geometry.v_keys * LATENT_DIM // 2 * element
    probabilities = geometry.p_slots * 64 * geometry.tile_kv * element
    assert geometry.shared_bytes == CONTROL_BYTES + 64 * row + keys + values + probabilities <= SHARED_BYTES_PER_CTA
    assert geometry.s_column >= LATENT_DIM // 2, "scores would overwrite the output"
    assert geometry.s_column + 2 * geometry.s_columns <= TMEM_COLUMNS
    schedule = DecodeSchedule(geometry)
    assert schedule.threads * schedule.registers <= REGISTERS_PER_SM


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_cta_brings_its_part_of_a_tile(variant):
    pair, solo = DecodeGeometry.pair(variant), DecodeGeometry.solo(variant)
    row = (LATENT_DIM + ROPE_DIM) * variant.dtype.bits // 8
    assert 2 * pair.k_slots_per_tile * pair.k_bytes == pair.tile_kv * row
    assert solo.k_slots_per_tile * solo.k_bytes == solo.tile_kv * row
    assert solo.k_slots >= 2 * solo.k_slots_per_tile, "no tile could be under way while another is multiplied"


def test_sizes_over_budget_are_refused():
    geometry = DecodeGeometry.pair(VARIANTS[0])
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        dataclasses.replace(geometry, k_slots=9)
    with pytest.raises(AssertionError):
        dataclasses.replace(geometry, deal=dataclasses.replace(geometry.deal, row_tile=64))
    with pytest.raises(AssertionError):
        dataclasses.replace(DecodeSchedule(geometry), threads=512)
