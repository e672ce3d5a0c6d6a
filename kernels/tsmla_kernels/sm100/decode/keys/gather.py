"""Roles `gather_keys`, `gather_values` and `tell_rows` of the Blackwell decode, where rows are gathered one by one.

Lanes copy 16 bytes each, to where bulk copies would put them. They write as plain stores do, which products do not see
by themselves: in each CTA, `tell_rows` waits for what lanes have copied, makes it visible (a proxy fence; any warp may
run it), and tells the warp that multiplies. It also tells softmax which keys are there. Keys that no row sees, or that
the cache does not have, are zeros in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....decode.segments import Segment
from ....limits import SWIZZLE_BYTES
from ....parts.blackwell.pair import rank_of
from ....parts.keys.listed import Lines, for_each_tile, gather, lane_keys, place_of, tell_there
from ....parts.query import QueryRows
from ..assignment import Assignment, Done, for_each_segment
from ..geometry import DecodeGeometry
from ..query import hold_query
from ..storage import Shared


def gather_keys(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    warp: Int32,
    warps: cutlass.Constexpr[int],
    assignment: Assignment,
    query: QueryRows,
):
    """Gather the K tiles of each segment, as warp number `warp` of `warps`: in a pair, this CTA's half of a tile's
    keys; solo, all of them. Behind a segment's first tile, bring what tensor memory holds of its query, whose place is
    free when the last scores of the segment before are there."""
    assert geometry.k_cuts == geometry.k_slots_per_tile, geometry
    share = geometry.k_keys // warps
    own, source = warp * share, assignment.source
    first = rank_of(geometry.is_pair) * geometry.k_keys + own + cute.arch.lane_idx()

    def gather_keys_of(segment: Segment, done: Done) -> Done:
        @cute.jit
        def gather_tile(index: Int32, slots: tuple, places: tuple) -> None:
            (slot,), (place,) = slots, places
            for cut in cutlass.range_constexpr(geometry.k_cuts):
                count = (done.tiles + index) * geometry.k_cuts + cut
                shared.edges.k.wait_empty(count)
                stage = shared.edges.k.stage(count)
                target = shared.operands.k + stage * geometry.k_wide_bytes
                latent, rope = _lines_of(geometry, cut)
                gather(source.rows.start + cut * geometry.k_chunks * SWIZZLE_BYTES, place, latent, target, own, share)
                if const_expr(rope is not None):
                    behind = target + latent.offset(latent.lines)
                    gather(source.rope.start, place_of(source, source.rope, slot), rope, behind, own, share)
                if const_expr(geometry.rope_apart):
                    shared.edges.landed_keys.arrive_behind_copies(count)
                    shared.edges.rope.wait_empty(count)
                if const_expr(geometry.tail > 0):
                    target = shared.operands.k_tail + (0 if geometry.rope_apart else stage * geometry.k_tail_bytes)
                    tail = Lines(geometry.tail_bytes, 1)
                    gather(source.rope.start, place_of(source, source.rope, slot), tail, target, own, share)
                landed = shared.edges.landed_rope if geometry.rope_apart else shared.edges.landed_keys
                landed.arrive_behind_copies(count)
            if const_expr(geometry.q_held > 0):
                if index == 0:
                    hold_query(shared, geometry, query, segment, warp, assignment.work.terms.heads, done.segments)

        first_key = segment.first_tile * geometry.tile_kv + first
        mine = lane_keys(source, assignment.viewers(segment), first_key, share)
        for_each_tile(mine, segment.tiles, geometry.tile_kv, 0, gather_tile, places=True)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, gather_keys_of, Done.nothing())


def gather_values(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    warp: Int32,
    warps: cutlass.Constexpr[int],
    assignment: Assignment,
):
    """Gather the V tiles of a pair, as warp number `warp` of `warps`: this CTA's 256 of the 512 latent dims, all
    keys."""
    share = geometry.v_keys // warps
    own, source, slots = warp * share, assignment.source, geometry.v_slots_per_tile
    lines = Lines(SWIZZLE_BYTES, geometry.v_chunks)
    start = source.rows.start + rank_of(geometry.is_pair) * (geometry.v_chunks * SWIZZLE_BYTES)
    first = own + cute.arch.lane_idx()

    def gather_values_of(segment: Segment, done: Done) -> Done:
        @cute.jit
        def gather_slot(count: Int32, _: tuple, places: tuple) -> None:
            shared.edges.v.wait_empty(count)
            target = shared.operands.v + shared.edges.v.stage(count) * geometry.v_bytes
            gather(start, places[0], lines, target, own, share)
            shared.edges.landed_values.arrive_behind_copies(count)

        first_key = segment.first_tile * geometry.tile_kv + first
        mine = lane_keys(source, assignment.viewers(segment), first_key, share)
        for_each_tile(mine, segment.tiles * slots, geometry.v_keys, done.tiles * slots, gather_slot, places=True)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, gather_values_of, Done.nothing())


def tell_rows(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], assignment: Assignment):
    """Tell of every tile which keys are there, and hand over what has landed, in the order in which it is multiplied:
    a tile's keys go before the values of the tile before. Where rows are converted, nothing lands."""
    source, late = assignment.source, geometry.is_pair and not geometry.converts

    def tell_of(segment: Segment, done: Done) -> Done:
        @cute.jit
        def tell_tile(tile: Int32, slots: tuple) -> None:
            index = tile - done.tiles
            if index < segment.tiles:
                shared.edges.there.wait_empty(tile)
                tell_there(there_of(shared, geometry, tile), slots)
                shared.edges.there.hand_over(tile)
                if const_expr(not geometry.converts):
                    for cut in cutlass.range_constexpr(geometry.k_cuts):
                        _hand_over(shared.edges.landed_keys, shared.edges.k, tile * geometry.k_cuts + cut)
                    if const_expr(geometry.rope_apart):
                        _hand_over(shared.edges.landed_rope, shared.edges.rope, tile)
            if const_expr(late):
                if index > 0:
                    for slot in cutlass.range_constexpr(geometry.v_slots_per_tile):
                        count = (tile - 1) * geometry.v_slots_per_tile + slot
                        _hand_over(shared.edges.landed_values, shared.edges.v, count)

        first_key = segment.first_tile * geometry.tile_kv + cute.arch.lane_idx()
        mine = lane_keys(source, assignment.viewers(segment), first_key, geometry.tile_kv)
        for_each_tile(mine, segment.tiles + int(late), geometry.tile_kv, done.tiles, tell_tile)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, tell_of, Done.nothing())


def _lines_of(geometry: DecodeGeometry, cut: int) -> tuple[Lines, Lines | None]:
    """The lines of a K slot that are of latent pieces, and those behind them, if any, that are of rope pieces."""
    chunks, latent = geometry.k_chunks, geometry.row.value_columns // geometry.chunk - cut * geometry.k_chunks
    if chunks <= latent:
        return Lines(SWIZZLE_BYTES, chunks), None
    return Lines(SWIZZLE_BYTES, latent, chunks), Lines(SWIZZLE_BYTES, chunks - latent, chunks)


def there_of(shared: Shared, geometry: DecodeGeometry, tile: Int32) -> cute.Tensor:
    """The words that say which keys of tile number `tile` are there, a bit for each key."""
    words = geometry.tile_kv // 32
    return cute.make_tensor(shared.there + shared.edges.there.stage(tile) * words, words)


def _hand_over(landed, edge, count: Int32) -> None:
    landed.wait_full(count)
    cute.arch.fence_view_async_shared()
    edge.hand_over(count)
