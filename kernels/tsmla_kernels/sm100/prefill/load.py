"""Role `load` of the Blackwell prefill: one warp that fills the query tiles once, then the ring of K and V slots."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...parts import tma
from ...parts.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .storage import Shared


@cute.jit
def load(
    q, k, v, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, work: WorkRange
) -> None:
    """`q`, `k` and `v` are (copy atom, one head's rows)."""
    per_tile = geometry.k_slots + geometry.v_slots
    shape = (geometry.rows, geometry.slot_elements)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        barrier = shared.q_edge.announce(Int32(tile))
        for slot in cutlass.range_constexpr(geometry.k_slots):
            q_shared, q_global = tma.tiles_of(q[0], q[1], shape, shared.q, slot)
            source = q_global[None, query_tile * geometry.query_tiles + tile]
            cute.copy(q[0], source, q_shared[None, tile * geometry.q_pitch + slot], tma_bar_ptr=barrier)
    for count in cutlass.range(work.tiles, unroll=1):
        tile = tile_at(work, count)
        first = count * per_tile
        _fill(k, shared, geometry, tile, first, geometry.k_slots)
        _fill(v, shared, geometry, tile, first + geometry.k_slots, geometry.v_slots)


@cute.jit
def _fill(
    operand, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tile: Int32, first: Int32,
    slots: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Copy the slots of one KV tile to the ring's slots number `first`, `first` + 1, ..."""
    shape = (geometry.rows, geometry.slot_elements)
    for slot in cutlass.range_constexpr(slots):
        ring, tiles = tma.tiles_of(operand[0], operand[1], shape, shared.ring, slot)
        barrier = shared.ring_edge.acquire(first + slot)
        cute.copy(
            operand[0], tiles[None, tile], ring[None, shared.ring_edge.stage(first + slot)], tma_bar_ptr=barrier
        )
