"""Budgets of every prefill that ships, and that a geometry or schedule over budget is refused."""

from __future__ import annotations

import dataclasses

import pytest
from tsmla.variant import PrefillVariant
from tsmla_kernels.geometry import REGISTERS_PER_SM, SHARED_BYTES_PER_CTA, PrefillGeometry
from tsmla_kernels.schedule import WARPGROUP, PrefillSchedule

from build_aot.matrix import shipped

VARIANTS = [v for v in shipped() if isinstance(v, PrefillVariant)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_shipped_variants_are_within_budget(variant):
    geometry = PrefillGeometry.of(variant)
    schedule = PrefillSchedule.of(geometry)
    element = variant.dtype.bits // 8
    tiles = geometry.stages * geometry.tile_kv * (variant.d_qk + variant.d_v) * element
    assert geometry.shared_bytes - tiles - geometry.tile_q * variant.d_qk * element == 1024
    assert geometry.shared_bytes <= SHARED_BYTES_PER_CTA
    used = WARPGROUP * (schedule.load_registers + schedule.attend_warpgroups * schedule.attend_registers)
    assert used <= REGISTERS_PER_SM
    assert schedule.threads == WARPGROUP * (1 + geometry.tile_q // 64)
    assert schedule.attend_warps == geometry.tile_q // 16


def test_too_much_shared_memory_is_refused():
    geometry = PrefillGeometry.of(VARIANTS[0])
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        dataclasses.replace(geometry, d_qk=192, stages=4).check()


def test_an_output_larger_than_its_query_slice_is_refused():
    geometry = PrefillGeometry.of(VARIANTS[0])
    with pytest.raises(AssertionError, match="does not fit in its Q slice"):
        dataclasses.replace(geometry, d_v=256, stages=1).check()


def test_too_many_registers_are_refused():
    geometry = PrefillGeometry.of(VARIANTS[0])
    schedule = PrefillSchedule.of(geometry)
    with pytest.raises(AssertionError, match="registers"):
        dataclasses.replace(schedule, load_registers=240).check(geometry)
    with pytest.raises(AssertionError):
        dataclasses.replace(schedule, attend_registers=160).check(dataclasses.replace(geometry, tile_kv=256))
