"""What lies where in a CTA's shared memory of the Blackwell prefill, and who waits for whom there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import Numeric

from ...parts.pipeline import Barriers, ClusterSignals, ClusterTmaEdge, WarpSignals
from .geometry import PrefillGeometry


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    ring: cute.ComposedLayout
    out: cute.ComposedLayout


class Shared(NamedTuple):
    """Tiles in shared memory, and who tells whom that they are ready.

    factors: for each query tile and row, what the correction multiplies the output by: at each event after the first
    the rescale, at the end the inverse of the sum. Their places are used again without a barrier of their own: the
    softmax writes a factor after it has received scores, which the MMA warp computes only after the correction has
    arrived for the factor before. Where it computes them sooner, there are two or four places, used in turn. For the
    last factor, after which there are no scores, the softmax waits for that arrival itself, or for what comes behind
    it; with four places it waits for nothing, because the correction has left the place when the last scores come.

    output_full: the last values of a query tile are in its output; where scores are computed ahead of values, those of
    each event.

    turns: told by each softmax warp shortly before its last exponentials: those of the other query tile's warp in the
    same quarter of the SM may begin.

    kept: for each query tile and row, what an earlier result is multiplied by; written with the last factor.

    visits: with a key mask, where the list of the CTA's KV tiles is (`visits.list_of`). Roles that walk the list read
    that here: if they had its address from where they part, ptxas would spill it."""

    q: cute.Tensor
    ring: cute.Tensor
    out: cute.Tensor
    factors: cute.Pointer
    kept: cute.Pointer
    tmem_base: cute.Pointer
    visits: cute.Pointer
    q_edge: ClusterTmaEdge
    ring_edge: ClusterTmaEdge
    scores_full: ClusterSignals
    probabilities_early: ClusterSignals
    probabilities_late: ClusterSignals | None
    scores_read: WarpSignals | None
    factors_full: WarpSignals
    output_full: ClusterSignals
    turns: WarpSignals | None


def layouts_of(geometry: PrefillGeometry, dtype: type[Numeric], out_dtype: type[Numeric]) -> Layouts:
    """Layouts: slots of (their rows, 64 elements), swizzled over their whole width, last mode the slot; the output's
    tiles as (rows, d_v, query tile)."""
    kinds = tcgen05.SmemLayoutAtomKind
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64}[geometry.slot_elements * geometry.element_bytes]
    atom = tcgen05.make_smem_layout_atom(kind, dtype)
    out_atom = tcgen05.make_smem_layout_atom(kinds.K_SW128, out_dtype)

    def slots(rows, number):
        return cute.tile_to_shape(atom, (rows, geometry.slot_elements, number), order=(0, 1, 2))

    one_out = cute.tile_to_shape(out_atom, (geometry.rows, geometry.d_v), order=(0, 1))
    pitch = geometry.q_pitch * geometry.q_slot_bytes // geometry.out_bytes
    tiles = cute.make_layout(geometry.query_tiles, stride=pitch)
    return Layouts(
        q=slots(geometry.rows, geometry.query_tiles * geometry.q_pitch),
        ring=slots(geometry.slot_rows, geometry.ring_slots),
        out=cute.make_composed_layout(one_out.inner, one_out.offset, cute.append(one_out.outer, tiles)),
    )


def shared_of(
    geometry: PrefillGeometry,
    layouts: Layouts,
    dtype: type[Numeric],
    out_dtype: type[Numeric],
    base: cute.Pointer,
    barriers: Barriers,
) -> Shared:
    """Carve up shared memory from `base` on: barriers, tensor memory address, place of the list, row factors; Q slots
    (outputs later); the ring."""

    def tensor(offset, layout, element):
        pointer = cute.recast_ptr(base + offset, layout.inner, element)
        return cute.make_tensor(pointer, layout.outer)

    crossed = geometry.plan.crossed
    return Shared(
        q=tensor(geometry.header_bytes, layouts.q, dtype),
        ring=tensor(geometry.ring_offset, layouts.ring, dtype),
        out=tensor(geometry.header_bytes, layouts.out, out_dtype),
        factors=cute.recast_ptr(base + geometry.factors_offset, dtype=Float32),
        kept=cute.recast_ptr(base + geometry.kept_offset, dtype=Float32),
        tmem_base=cute.recast_ptr(base + geometry.tmem_base_offset, dtype=Int32),
        visits=cute.recast_ptr(base + geometry.visits_offset, dtype=Int32),
        q_edge=barriers.edge("q", ClusterTmaEdge),
        ring_edge=barriers.edge("ring", ClusterTmaEdge),
        scores_full=barriers.edge("scores_full", ClusterSignals),
        probabilities_early=barriers.edge("probabilities_early", ClusterSignals),
        probabilities_late=None if crossed else barriers.edge("probabilities_late", ClusterSignals),
        scores_read=barriers.edge("scores_read", WarpSignals) if crossed else None,
        factors_full=barriers.edge("factors_full", WarpSignals),
        output_full=barriers.edge("output_full", ClusterSignals),
        turns=barriers.edge("turns", WarpSignals) if crossed else None,
    )
