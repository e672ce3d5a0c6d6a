"""Scales of the Blackwell decode, where cache rows have one each (`parts/keys/scales.py`): role `load_scales`, and what
softmax does with them.

Scores are folded where they come out of tensor memory. From there on they are exponents themselves, and all that moves
references, outputs and sums is as without scales. The row's sum of probabilities decides when its reference moves; a
second sum, without the keys' scales, is what outputs are divided by."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....decode.segments import Segment
from ....parts.alignment import aligned
from ....parts.keys.listed import entries_of, slot_of
from ....parts.keys.scales import (
    RowScales,
    anchor_of,
    deciding_key,
    fold,
    inverse_of,
    key_scale,
    listed_anchor,
    query_scale,
    slot_scale,
)
from ....parts.keys.source import BOX_KEYS, Lookup, Wanted, follow, look_up, wanted_of
from ....parts.keys.visible import seen_by_any
from ..assignment import Assignment, Done, for_each_segment
from ..geometry import DecodeGeometry
from ..storage import Shared

AHEAD = 2
"""Tiles whose scales are on their way to registers, besides those in shared memory."""
_VECTOR = 4
"""Numbers that a thread takes from shared memory at a time."""
_CHAINS = 4


def load_scales(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, assignment: Assignment):
    """Fold the scale of each key of each tile into what scores and sums need, and hand that over."""
    tile_boxes = geometry.tile_kv // BOX_KEYS

    @cute.jit
    def load_scales_of(segment: Segment, done: Done) -> Done:
        wanted = wanted_of(assignment.source, segment, tile_boxes)
        lookup = look_up(wanted)
        scale_anchor = anchor_of_segment(geometry, keys, assignment, segment)
        coming = (Float32(1.0),) * (AHEAD * geometry.lane_keys)
        for i in cutlass.range(segment.tiles + AHEAD, unroll=1):
            first = i * tile_boxes
            lookup = follow(wanted, lookup, first)
            found = _found(geometry, keys, wanted, lookup, first)
            if i >= AHEAD:
                count = done.tiles + i - AHEAD
                shared.edges.scales.wait_empty(count)
                _put(shared, geometry, coming[: geometry.lane_keys], scale_anchor, count)
            coming = (*coming[geometry.lane_keys :], *found)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, load_scales_of, Done.nothing())


def load_listed_scales(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, assignment: Assignment
):
    """Fold the scales of gathered keys, found by the slots of their rows, and hand them over. Entries of the table are
    read a tile ahead of scales."""
    source = assignment.source

    @cute.jit
    def load_scales_of(segment: Segment, done: Done) -> Done:
        viewers = assignment.viewers(segment)
        first_key = segment.first_tile * geometry.tile_kv + cute.arch.lane_idx()
        ahead = entries_of(source, viewers, first_key, geometry.tile_kv)
        scale_anchor = anchor_of_segment(geometry, keys, assignment, segment)
        coming = (Float32(1.0),) * (AHEAD * geometry.lane_keys)
        for i in cutlass.range(segment.tiles + AHEAD, unroll=1):
            key = first_key + i * geometry.tile_kv
            slots = tuple(slot_of(source, entry, key + 32 * number) for number, entry in enumerate(ahead))
            found = tuple(slot_scale(source, keys, slot) for slot in slots)
            ahead = entries_of(source, viewers, key + geometry.tile_kv, geometry.tile_kv)
            if i >= AHEAD:
                count = done.tiles + i - AHEAD
                shared.edges.scales.wait_empty(count)
                _put(shared, geometry, coming[: geometry.lane_keys], scale_anchor, count)
            coming = (*coming[geometry.lane_keys :], *found)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, load_scales_of, Done.nothing())


@cute.jit
def anchor_of_segment(
    geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, assignment: Assignment, segment: Segment
) -> Float32:
    """The anchor of the scales of a segment's keys."""
    source, first_key = assignment.source, segment.first_tile * geometry.tile_kv
    viewers = assignment.viewers(segment)
    found = Float32(1.0)
    if const_expr(geometry.gathers):
        found = listed_anchor(source, keys, viewers, first_key, segment.tiles * geometry.tile_kv)
    else:
        key = deciding_key(viewers, first_key)
        scale = Float32(1.0)
        if seen_by_any(viewers, key):
            page = source.table[segment.request, key >> cute.arch.popc(source.page_size - 1)]
            scale = key_scale(source, keys, page, key)
        found = anchor_of(scale)
    return found


@cute.jit
def row_factor(scales: RowScales, segment: Segment, row: Int32, assignment: Assignment, scale_log2: Float32) -> Float32:
    """What products of row `row` of a segment with stored keys are multiplied by to become exponents, but for the keys'
    scales."""
    row = cutlass.min(row, segment.rows - 1)
    heads = assignment.work.terms.heads
    return scale_log2 * query_scale(scales.queries, segment.request, segment.first_row + row, heads)


@cute.jit
def _found(
    geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, wanted: Wanted, lookup: Lookup, first: Int32
) -> tuple:
    """The scales of this lane's keys of the tile that begins with box `first`: every 32nd key."""
    lane = cute.arch.lane_idx()
    values = []
    for index in cutlass.range_constexpr(geometry.lane_keys):
        key = index * 32 + lane
        page = lookup.page_of(first + key // BOX_KEYS)
        values.append(key_scale(wanted.source, keys, page, wanted.key_of(first) + key))
    return tuple(values)


@cute.jit
def _put(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], values: tuple, anchor: Float32, count: Int32):
    """Hand over this lane's scales of tile number `count`. Those of keys that no row sees may be anything: their scores
    are not looked at, and what their probabilities of 0 are multiplied by is finite."""
    place = _stage(shared, geometry, count) + cute.arch.lane_idx()
    for index in cutlass.range_constexpr(geometry.lane_keys):
        words = fold(values[index], Boolean(True), anchor, inverse_of(anchor))
        for word in cutlass.range_constexpr(len(words)):
            place[word * geometry.tile_kv + index * 32] = words[word]
    cute.arch.sync_warp()
    shared.edges.scales.hand_over(count)


def folded(shared: Shared, geometry: DecodeGeometry, half: Int32, scores: list, factor: Float32, count: Int32) -> list:
    """The folded scores of this thread's half of the keys of tile number `count`, once their scales are there."""
    shared.edges.scales.wait_full(count)
    mine = _mine(shared, geometry, half, count)
    values = []
    for first in range(0, len(scores), _VECTOR):
        scale, logarithm = (_vector(mine, word * geometry.tile_kv + first) for word in (0, 1))
        for index in range(0, _VECTOR, 2):
            x = cute.arch.mul_packed_f32x2(scores[first + index : first + index + 2], scale[index : index + 2])
            values += cute.arch.fma_packed_f32x2(x, (factor, factor), logarithm[index : index + 2])
    return values


def unfolded_sum(
    shared: Shared, geometry: DecodeGeometry, half: Int32, values: list, start: Float32, count: Int32
) -> Float32:
    """start + this thread's probabilities of tile number `count`, each divided by its key's scale. Releases the
    scales."""
    mine = _mine(shared, geometry, half, count)
    chains = [(start, Float32(0.0))] + [(Float32(0.0), Float32(0.0))] * (_CHAINS - 1)
    for first in range(0, len(values), _VECTOR):
        inverse = _vector(mine, 2 * geometry.tile_kv + first)
        for index in range(0, _VECTOR, 2):
            two, chain = values[first + index : first + index + 2], (first + index) // 2 % _CHAINS
            chains[chain] = cute.arch.fma_packed_f32x2(two, inverse[index : index + 2], chains[chain])
    cute.arch.sync_warp()
    shared.edges.scales.release(count)
    low, high = (cute.arch.add_packed_f32x2(chains[i], chains[i + 1]) for i in (0, 2))
    both = cute.arch.add_packed_f32x2(low, high)
    return both[0] + both[1]


def _stage(shared: Shared, geometry: DecodeGeometry, count: Int32) -> cute.Pointer:
    """Where a tile's folded scales lie: one vector of the tile's keys for each word."""
    return shared.scales + shared.edges.scales.stage(count) * (geometry.scale_bytes // 4)


def _mine(shared: Shared, geometry: DecodeGeometry, half: Int32, count: Int32) -> cute.Pointer:
    """Where the first vector has the first key of a thread's half of the tile."""
    return _stage(shared, geometry, count) + half * geometry.s_columns


def _vector(mine: cute.Pointer, first: int) -> list:
    """_VECTOR numbers from number `first` on, which all lanes of a warp read together."""
    values = cute.make_rmem_tensor(_VECTOR, Float32)
    cute.autovec_copy(cute.make_tensor(aligned(mine + first, 4 * _VECTOR), _VECTOR), values)
    return [values[index] for index in range(_VECTOR)]
