"""Sizes of every decode that ships follow from its row; budgets of the Blackwell ones, in both of their kernels."""

from __future__ import annotations

import dataclasses

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.row_format import ROWS, Piece, RowFormat, Scales, uniform_row
from tsmla.identity.support import LATENT_DIM
from tsmla.identity.variant import DecodeVariant
from tsmla_kernels.limits import REGISTERS_PER_SM, SHARED_BYTES_PER_CTA, TMEM_COLUMNS
from tsmla_kernels.sm90.decode.row64.geometry import DecodeGeometry as HopperGeometry
from tsmla_kernels.sm100.decode.geometry import CONTROL_BYTES, DecodeGeometry
from tsmla_kernels.sm100.decode.schedule import DecodeSchedule

from build_aot.matrix import shipped

DECODES = [v for v in shipped() if isinstance(v, DecodeVariant)]
SNAPMLA = [
    DecodeVariant(arch, Dtype.E4M3, Dtype.BF16, lse=True, row=ROWS["snapmla"]) for arch in (Arch.SM100A, Arch.SM103A)
]
VARIANTS = [*(v for v in DECODES if v.arch is not Arch.SM90A and v not in SNAPMLA), *SNAPMLA]
HOPPER = [v for v in DECODES if v.arch is Arch.SM90A]
KINDS = {"pair": DecodeGeometry.pair, "few": DecodeGeometry.few}


def _piece_bytes(variant):
    """Bytes of a key's pieces as products read it."""
    return 1152 if _converts(variant) else sum(piece.bytes for piece in variant.row.pieces)


def _converts(variant):
    return variant.row.scales is not None and not variant.row.apart


def _holds_query(variant, kind):
    """Whether 448 columns of a query row are in tensor memory: where 16-bit rows are gathered for few rows."""
    return kind == "few" and variant.gathers and variant.dtype.bits == 16 and variant.row.scales is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_shipped_variants_are_within_budget(variant, kind):
    geometry = KINDS[kind](variant)
    element, row = variant.dtype.bits // 8, _piece_bytes(variant)
    held, rope = (896, row - 1024) if _holds_query(variant, kind) else (0, 0)  # such keys have one place for the rope
    keys = geometry.k_slots * geometry.k_keys * (row - rope) // geometry.k_cuts + geometry.k_keys * rope
    values = geometry.v_slots * geometry.v_keys * LATENT_DIM // 2 * element
    probabilities = geometry.p_slots * 64 * geometry.tile_kv * element
    scales = geometry.scale_slots * geometry.tile_kv * 3 * 4
    assert (scales > 0) == variant.row.apart
    parts = CONTROL_BYTES + 64 * (row - held) + keys + values + probabilities + scales
    assert geometry.shared_bytes == parts <= SHARED_BYTES_PER_CTA
    assert geometry.s_column >= LATENT_DIM // 2, "scores would overwrite the output"
    assert geometry.s_slots == (1 if held else 2)
    end = geometry.s_column + geometry.s_slots * geometry.s_columns
    assert end + held // 4 <= TMEM_COLUMNS
    if held:
        assert geometry.q_column in range(end, TMEM_COLUMNS - held // 4 + 1), "queries would overwrite scores"
    schedule = DecodeSchedule(geometry)
    groups = {warp // 4: role.registers for role in schedule.roles for warp in role.warps}
    more = 2 if _converts(variant) else int(variant.gathers)
    assert len(groups) == schedule.threads // 128 == 2 + more
    assert 128 * sum(groups.values()) <= schedule.threads * (REGISTERS_PER_SM // schedule.threads // 8 * 8)
    assert not more or all(registers % 8 == 0 for registers in groups.values()), "setmaxnreg's units"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_cta_brings_its_part_of_a_tile(variant):
    pair, row = DecodeGeometry.pair(variant), _piece_bytes(variant)
    solo = DecodeGeometry.solo(variant)
    assert 2 * pair.k_slots_per_tile * pair.k_bytes == pair.tile_kv * row
    assert solo.k_slots_per_tile * solo.k_bytes == solo.tile_kv * row
    assert solo.k_slots >= 2 * solo.k_slots_per_tile, "no tile could be under way while another is multiplied"


@pytest.mark.parametrize("variant", filter(_converts, HOPPER), ids=str)
def test_hopper_converts_strips_as_they_come(variant):
    """A warpgroup has one loading warp's in its order; a strip as it is stored lies in the second half of its place,
    the scales in the first half of each warpgroup's first."""
    geometry = HopperGeometry.of(variant)
    for converter in range(2):
        strips = tuple(geometry.converted_strip(converter, i) for i in range(geometry.converted_strips))
        assert strips == geometry.loaded_strips(converter)
        assert len(geometry.copied_with(strips[0])) == 2
    stored = geometry.tile_kv * geometry.d_strip
    assert all(size == 2 * geometry.stored_at == geometry.stored_at + stored for size in geometry.strip_bytes[:-1])
    assert geometry.tile_kv * geometry.scales_bytes <= geometry.stored_at


@pytest.mark.parametrize("variant", HOPPER, ids=str)
def test_hopper_loads_each_column_of_a_row_once(variant):
    geometry = HopperGeometry.of(variant)
    again = geometry.scales_bytes if geometry.converts else 0  # scales are copied for either converting warpgroup
    assert sum(geometry.edge_bytes) == geometry.tile_kv * (variant.row.bytes + again)
    made = 1152 if geometry.converts else variant.row.bytes
    assert sum(geometry.strip_bytes) == sum(geometry.ready_bytes) == geometry.tile_kv * made
    assert geometry.q_bytes == geometry.tile_q * made
    assert geometry.scaled == variant.row.apart and geometry.shared_bytes <= SHARED_BYTES_PER_CTA
    strips = list(zip(geometry.first_columns, geometry.strips, strict=True))
    latent, behind = strips[: geometry.latent_strips], strips[geometry.latent_strips :]
    rope = [(512, 64)] if variant.row.has("rope") else []
    assert behind == rope
    columns = [column for first, size in latent for column in range(first, first + size)]
    assert columns == list(range(variant.row.value_columns))
    assert sorted(geometry.loaded_strips(0) + geometry.loaded_strips(1)) == list(range(len(latent)))
    copied = [box for strip in range(len(latent)) for box in geometry.copied_with(strip)]
    assert sorted(copied) == list(range(len(strips) + 2 * geometry.converts)), "strips, rope, scales twice"
    written = [place for mine in range(2) for place in geometry.places(mine)]
    assert sorted(written) == list(range(variant.row.value_columns // geometry.value_columns))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_blackwell_cuts_a_row_in_chunks_and_a_tail(variant):
    uniform = _converts(variant) or len({piece.dtype for piece in variant.row.pieces}) == 1
    tail = (64 if variant.dtype.bits == 8 and variant.row.has("rope") else 0) if uniform else 128
    for kind, of in KINDS.items():
        geometry = of(variant)
        assert geometry.row_chunks * geometry.chunk + geometry.tail == variant.row.columns
        assert geometry.tail_bytes == (128 * variant.row.has("rope") if _holds_query(variant, kind) else tail)
        dims = [
            half * geometry.lane_dims + block * geometry.block_dims + column
            for half in range(2)
            for block in range(2)
            for column in range(geometry.o_columns // 2)
        ]
        assert sorted(dims) == list(range(variant.row.value_columns)), "an output column has one place"


ODD_ROWS = {
    "another latent size": (Piece("latent", Dtype.BF16, 480), Piece("rope", Dtype.BF16, 64)),
    "another rope size": (Piece("latent", Dtype.BF16, 512), Piece("rope", Dtype.BF16, 96)),
    "the rope first": (Piece("rope", Dtype.BF16, 64), Piece("latent", Dtype.BF16, 512)),
    "the rope alone": (Piece("rope", Dtype.BF16, 512),),
    "a third piece": (*uniform_row(Dtype.BF16).pieces, Piece("x", Dtype.BF16, 64)),
    "two dtypes": (Piece("latent", Dtype.E4M3, 512), Piece("rope", Dtype.BF16, 64)),
}


@pytest.mark.parametrize("pieces", ODD_ROWS.values(), ids=ODD_ROWS)
def test_rows_that_a_geometry_cannot_hold_are_refused(pieces):
    for arch, makers in ((Arch.SM90A, [HopperGeometry.of]), (Arch.SM100A, KINDS.values())):
        for make in makers:
            with pytest.raises((AssertionError, ValueError, KeyError)):
                make(DecodeVariant(arch, Dtype.BF16, Dtype.BF16, lse=True, row=RowFormat(pieces)))


@pytest.mark.parametrize("make", [*KINDS.values(), HopperGeometry.of])
def test_scales_of_parts_of_a_row_are_refused(make):
    arch = Arch.SM90A if make == HopperGeometry.of else Arch.SM100A
    row = RowFormat(uniform_row(Dtype.E4M3).pieces, Scales("latent", 128, in_row=True))
    with pytest.raises(AssertionError):
        make(DecodeVariant(arch, Dtype.E4M3, Dtype.BF16, lse=True, row=row))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=DecodeVariant.symbol)
def test_no_further_tile_of_keys_would_fit(variant, kind):
    geometry = kind(variant)
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        dataclasses.replace(geometry, k_slots=geometry.k_slots + geometry.k_slots_per_tile)


def test_sizes_over_budget_are_refused():
    geometry = DecodeGeometry.pair(VARIANTS[0])
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        dataclasses.replace(geometry, k_slots=3 * geometry.k_slots_per_tile)
    with pytest.raises(AssertionError):
        dataclasses.replace(geometry, deal=dataclasses.replace(geometry.deal, row_tile=64))
    with pytest.raises(AssertionError):
        dataclasses.replace(DecodeSchedule(geometry), mma_warp=16)
    with pytest.raises(AssertionError, match="two roles have the same warp"):
        dataclasses.replace(DecodeSchedule(geometry), mma_warp=5)
