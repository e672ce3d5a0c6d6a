"""What lies where in a CTA's shared memory of the Blackwell prefill, and who waits for whom there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import Numeric

from ...limits import TILE_ALIGNMENT, WARPGROUP
from ...parts.pipeline import Signals, TmaEdge
from .geometry import HEADER_BYTES, PrefillGeometry


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    ring: cute.ComposedLayout
    out: cute.ComposedLayout


class Shared(NamedTuple):
    """Tiles in shared memory, and who tells whom that they are ready.

    factors: per query tile and row, by what the correction multiplies the output: at each event after the first the
    rescale, at the end the inverse of the sum. No barrier of their own guards their reuse: the softmax writes the next
    factor after scores that the MMA warp started only when the correction had arrived for the one before, and waits
    for that arrival before it writes the last.
    """

    q: cute.Tensor
    ring: cute.Tensor
    out: cute.Tensor
    factors: cute.Pointer
    tmem_base: cute.Pointer
    q_edge: TmaEdge
    ring_edge: TmaEdge
    scores_full: Signals
    probabilities_early: Signals
    probabilities_late: Signals
    factors_full: Signals
    output_full: Signals

    def edges(self) -> tuple:
        return (
            self.q_edge, self.ring_edge, self.scores_full, self.probabilities_early, self.probabilities_late,
            self.factors_full, self.output_full,
        )  # fmt: skip


def layouts_of(geometry: PrefillGeometry, dtype: type[Numeric], out_dtype: type[Numeric]) -> Layouts:
    """Slots of (rows, 64 elements), swizzled over their whole width, last mode the slot; the output's tiles as
    (rows, d_v, query tile)."""
    kinds = tcgen05.SmemLayoutAtomKind
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64}[geometry.slot_elements * geometry.element_bytes]
    atom = tcgen05.make_smem_layout_atom(kind, dtype)
    out_atom = tcgen05.make_smem_layout_atom(kinds.K_SW128, out_dtype)

    def slots(number):
        return cute.tile_to_shape(atom, (geometry.rows, geometry.slot_elements, number), order=(0, 1, 2))

    one_out = cute.tile_to_shape(out_atom, (geometry.rows, geometry.d_v), order=(0, 1))
    pitch = geometry.q_pitch * geometry.slot_bytes // geometry.out_bytes
    tiles = cute.make_layout(geometry.query_tiles, stride=pitch)
    return Layouts(
        q=slots(geometry.query_tiles * geometry.q_pitch),
        ring=slots(geometry.ring_slots),
        out=cute.make_composed_layout(one_out.inner, one_out.offset, cute.append(one_out.outer, tiles)),
    )


def shared_of(
    geometry: PrefillGeometry, layouts: Layouts, dtype: type[Numeric], out_dtype: type[Numeric]
) -> Shared:
    """Carve up shared memory: barriers, tensor memory address, row factors; Q slots (outputs later); the ring."""
    base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

    def tensor(offset, layout, element):
        pointer = cute.recast_ptr(base + offset, layout.inner, element)
        return cute.make_tensor(pointer, layout.outer)

    q_offset = HEADER_BYTES
    ring_offset = q_offset + geometry.query_tiles * geometry.q_pitch * geometry.slot_bytes
    factor_offset = HEADER_BYTES - geometry.query_tiles * geometry.rows * 4
    tmem_offset = factor_offset - 16
    barriers = cute.recast_ptr(base, dtype=cutlass.Int64)
    tiles = geometry.query_tiles
    q_words = TmaEdge.barrier_count(tiles)
    ring_words = TmaEdge.barrier_count(geometry.ring_slots)
    signals = barriers + q_words + ring_words
    warps = WARPGROUP // 32
    assert (q_words + ring_words + 5 * tiles) * 8 <= tmem_offset, geometry
    return Shared(
        q=tensor(q_offset, layouts.q, dtype),
        ring=tensor(ring_offset, layouts.ring, dtype),
        out=tensor(q_offset, layouts.out, out_dtype),
        factors=cute.recast_ptr(base + factor_offset, dtype=Float32),
        tmem_base=cute.recast_ptr(base + tmem_offset, dtype=Int32),
        q_edge=TmaEdge(barriers, tiles, geometry.q_bytes, 1),
        ring_edge=TmaEdge(barriers + q_words, geometry.ring_slots, geometry.slot_bytes, 1),
        scores_full=Signals(signals, tiles, 1),
        probabilities_early=Signals(signals + tiles, tiles, 2 * warps),
        probabilities_late=Signals(signals + 2 * tiles, tiles, warps),
        factors_full=Signals(signals + 3 * tiles, tiles, warps),
        output_full=Signals(signals + 4 * tiles, tiles, 1),
    )
