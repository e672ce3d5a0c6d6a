"""Role `load` of the Blackwell prefill: one warp that fills the query tiles once, then the ring of K and V slots.

In a pair of CTAs each loads its own query tile, half of the keys of a K tile, and half of the columns of a V tile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...prefill import tma
from ...prefill.visits import listed_work
from ...prefill.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .storage import Shared


@cute.jit
def load(
    rows: tuple, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], rank: Int32, first_tile: Int32,
    work: WorkRange,
) -> None:  # fmt: skip
    """Load the query tiles from number `first_tile` on, then the KV tiles that the CTA visits; `rows` are those of the
    tiles' head."""
    if const_expr(work.listed is not None):
        work = listed_work(shared.visits)
    q, k, (v_atom, v_rows) = rows
    k = tuple((atom, _share(geometry, piece, rank, down=geometry.slot_rows)) for atom, piece in k)
    v = (v_atom, _share(geometry, v_rows, rank, across=geometry.slot_elements))
    per_tile = geometry.k_slots + geometry.v_slots
    shape = (geometry.rows, geometry.slot_elements)
    ctas = geometry.plan.ctas
    q_slots, k_slots, v_blocks = (tma.boxes(pieces, geometry.slot_elements) for pieces in (q, k, (v,)))
    k_slots = [(slot, 0) for slot in k_slots]
    v_slots = [(block, half) for block in v_blocks[::ctas] for half in range(ctas)]
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        barrier = shared.q_edge.announce(Int32(tile))
        for slot in cutlass.range_constexpr(geometry.k_slots):
            atom, rows, column = q_slots[slot]
            q_shared, q_global = tma.tiles_of(atom, rows, shape, shared.q, column)
            source = q_global[None, first_tile + tile]
            cute.copy(atom, source, q_shared[None, tile * geometry.q_pitch + slot], tma_bar_ptr=barrier)
    for count in cutlass.range(work.tiles, unroll=1):
        tile = tile_at(work, count)
        first = count * per_tile
        _fill(k_slots, shared, geometry, tile, first)
        _fill(v_slots, shared, geometry, tile, first + geometry.k_slots)


def _share(geometry: PrefillGeometry, rows: cute.Tensor, rank: Int32, down: int = 0, across: int = 0) -> cute.Tensor:
    """One head's rows from the first on that this CTA loads: `down` rows and `across` columns further in the second
    CTA of a pair."""
    return cute.domain_offset((rank * down, rank * across), rows) if geometry.plan.ctas > 1 else rows


@cute.jit
def _fill(
    slots: cutlass.Constexpr, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tile: Int32, first: Int32
) -> None:
    """Copy the slots of one KV tile to the ring's slots number `first`, `first` + 1, ... `slots`: a box of columns, and
    which half of the tile's rows, where slots have half of them."""
    shape = (geometry.slot_rows, geometry.slot_elements)
    for slot in cutlass.range_constexpr(len(slots)):
        (atom, rows, column), half = slots[slot]
        ring, tiles = tma.tiles_of(atom, rows, shape, shared.ring, column)
        barrier = shared.ring_edge.acquire(first + slot)
        cute.copy(
            atom,
            tiles[None, tile * geometry.plan.ctas + half],
            ring[None, shared.ring_edge.stage(first + slot)],
            tma_bar_ptr=barrier,
        )
