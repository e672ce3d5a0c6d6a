"""Budgets of every prefill that ships, and that a geometry or schedule over budget is refused."""

from __future__ import annotations

import dataclasses

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.support import NOPE_DIMS
from tsmla.identity.variant import DecodeVariant, PrefillVariant
from tsmla_kernels.limits import REGISTERS_PER_SM, SHARED_BYTES_PER_CTA, TMEM_COLUMNS, WARPGROUP
from tsmla_kernels.sm90.decode.row64.geometry import DecodeGeometry
from tsmla_kernels.sm90.decode.row64.schedule import DecodeSchedule
from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry
from tsmla_kernels.sm90.prefill.schedule import PrefillSchedule
from tsmla_kernels.sm100.prefill.geometry import PrefillGeometry as BlackwellGeometry
from tsmla_kernels.sm100.prefill.schedule import PrefillSchedule as BlackwellSchedule

from build_aot.matrix import shipped

PREFILLS = [v for v in shipped() if isinstance(v, PrefillVariant)]
VARIANTS = [v for v in PREFILLS if v.arch is Arch.SM90A]
DECODE_16_BITS = next(
    v for v in shipped() if isinstance(v, DecodeVariant) and v.arch is Arch.SM90A and v.dtype is Dtype.BF16
)
BLACKWELL = [v for v in PREFILLS if v.arch is not Arch.SM90A and v.d_v == 128]
BLACKWELL_PAIRS = [v for v in PREFILLS if v.arch is not Arch.SM90A and v.d_v == 256]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_shipped_variants_are_within_budget(variant):
    geometry = PrefillGeometry.of(variant)
    schedule = PrefillSchedule.of(geometry)
    element = variant.dtype.bits // 8
    loaded, wide = geometry.stages * (variant.d_qk + variant.d_v), geometry.wide_stages * variant.d_v
    tiles = geometry.tile_kv * (loaded * element + wide * 2)
    assert geometry.shared_bytes - tiles - geometry.tile_q * variant.d_qk * element == 1024
    assert geometry.shared_bytes <= SHARED_BYTES_PER_CTA
    used = WARPGROUP * (schedule.load_registers + schedule.attend_warpgroups * schedule.attend_registers)
    assert used <= schedule.threads * (REGISTERS_PER_SM // schedule.threads // 8 * 8)
    assert schedule.threads == WARPGROUP * (1 + geometry.tile_q // 64)


def changed(geometry: PrefillGeometry, **policy) -> PrefillGeometry:
    """The geometry with some of its policy changed."""
    return dataclasses.replace(geometry, policy=dataclasses.replace(geometry.policy, **policy))


def test_too_much_shared_memory_is_refused():
    geometry = PrefillGeometry.of(VARIANTS[0])
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        changed(geometry, stages=4).check()


def test_widening_warps_go_with_8_bit_values():
    geometry = PrefillGeometry.of(VARIANTS[0])
    schedule = PrefillSchedule.of(geometry)
    assert (schedule.widen_warps > 0) == (geometry.element_bytes == 1) == geometry.widens_values
    with pytest.raises(AssertionError):
        dataclasses.replace(schedule, widen_warps=4).check()
    with pytest.raises(AssertionError):
        other = changed(geometry, wide_stages=0 if geometry.wide_stages else 2)
        dataclasses.replace(schedule, geometry=other).check()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_pieces_are_whole_boxes(variant):
    geometry = PrefillGeometry.of(variant)
    assert variant.d_qk % geometry.box_columns == NOPE_DIMS[variant.d_qk] % geometry.box_columns == 0


def test_wide_heads_fill_a_cta():
    """A tile more of keys, or of widened values, would not fit, nor would as few keys more as a tile can have."""
    for variant in (v for v in VARIANTS if v.d_v == 256):
        geometry = PrefillGeometry.of(variant)
        keys = geometry.tile_kv + 16
        rings = ("stages", *(["wide_stages"] if geometry.widens_values else []))
        for change in ({"tile_kv": keys}, *({ring: getattr(geometry, ring) + 1} for ring in rings)):
            with pytest.raises(AssertionError, match="bytes of shared memory"):
                changed(geometry, **change).check()


def test_warpgroups_pass_over_fewer_tiles_than_there_are_stages():
    """Else one that waits for values of a tile that it has passed over would hold the stage of the keys after it."""
    for variant in (v for v in VARIANTS if v.d_v == 256):
        geometry = PrefillGeometry.of(variant)
        with pytest.raises(AssertionError):
            changed(geometry, stages=1).check()


def test_too_many_registers_are_refused():
    geometry = PrefillGeometry.of(VARIANTS[0])
    schedule = PrefillSchedule.of(geometry)
    with pytest.raises(AssertionError, match="registers"):
        dataclasses.replace(schedule, load_registers=240).check()
    with pytest.raises(AssertionError, match="registers"):  # an SM has as many; a CTA of 384 threads starts with fewer
        dataclasses.replace(schedule, load_registers=32, attend_registers=240).check()
    with pytest.raises(AssertionError):
        wide = changed(geometry, tile_kv=256)
        dataclasses.replace(schedule, attend_registers=160, geometry=wide).check()


def test_more_registers_than_a_decode_starts_with_are_refused():
    schedule = DecodeSchedule.of(DecodeGeometry.of(DECODE_16_BITS))
    with pytest.raises(AssertionError, match="registers"):
        dataclasses.replace(schedule, load_registers=32, attend_registers=240).check()


@pytest.mark.parametrize("variant", BLACKWELL, ids=str)
def test_shipped_blackwell_variants_are_within_budget(variant):
    geometry = BlackwellGeometry.of(variant)
    element = variant.dtype.bits // 8
    ring = geometry.ring_slots * 128 * 64 * element
    queries = 2 * max(128 * variant.d_qk * element, 128 * variant.d_v * variant.out_dtype.bits // 8)
    headers = 3072 * (2 if element == 1 else 1)
    assert geometry.shared_bytes == headers + queries + ring <= SHARED_BYTES_PER_CTA
    assert ring >= 128 * (variant.d_qk + variant.d_v) * element, "the tiles of a step are in use together"
    assert geometry.tmem_columns == 2 * (128 + variant.d_v) <= TMEM_COLUMNS
    assert geometry.tmem_output >= geometry.tmem_scores + 2 * geometry.tile_kv, "output would overwrite scores"
    schedule = BlackwellSchedule.of(variant)
    softmax, correct, issue = schedule.softmax_registers, schedule.correct_registers, schedule.issue_registers
    assert WARPGROUP * (2 * softmax + correct + issue) <= REGISTERS_PER_SM
    assert schedule.threads == 4 * WARPGROUP


@pytest.mark.parametrize("variant", BLACKWELL_PAIRS, ids=str)
def test_shipped_blackwell_pairs_are_within_budget(variant):
    geometry = BlackwellGeometry.of(variant)
    element = variant.dtype.bits // 8
    ring = geometry.ring_slots * 64 * 64 * element
    assert geometry.shared_bytes == 6144 + 128 * 256 * 2 + ring <= SHARED_BYTES_PER_CTA
    assert ring >= 2 * 128 * 256 * element, "a CTA's halves of the keys and values of two KV tiles"
    assert geometry.tmem_columns == 2 * 128 + 256 <= TMEM_COLUMNS
    assert geometry.tmem_output >= geometry.tmem_scores + 2 * geometry.tile_kv, "output would overwrite scores"
    assert geometry.rows_together == 256
    schedule = BlackwellSchedule.of(variant)
    registers = schedule.softmax_registers + schedule.correct_registers + schedule.issue_registers
    assert schedule.threads == 3 * WARPGROUP and registers <= REGISTERS_PER_SM // schedule.threads // 8 * 8 * 3


def test_blackwell_sizes_over_budget_are_refused():
    geometry = BlackwellGeometry.of(next(v for v in BLACKWELL if v.d_qk == 192))
    for change, text in (
        ({"ring_slots": 64}, "bytes of shared memory"),
        ({"ring_slots": 4}, "do not fit in the ring"),
        ({"d_v": 256}, None),
    ):
        with pytest.raises(AssertionError, match=text):
            dataclasses.replace(geometry, **change).check()
    schedule = BlackwellSchedule.of(BLACKWELL[0])
    with pytest.raises(AssertionError, match="registers"):
        dataclasses.replace(schedule, correct_registers=128).check()
