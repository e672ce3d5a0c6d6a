"""Roles `load_keys`, `load_values` and `load_queries` of the Blackwell decode: one warp each.

Probabilities of hidden keys are 0, but 0 x NaN is NaN, so what the values' product reads must be zeros outside of the
unit's keys: boxes without such a key are copied from a page that does not exist, those partly in it are copied by the
warp's lanes. Scores of hidden keys are never looked at."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from tsmla.identity.dtype import bytes_of

from ....decode.segments import Segment
from ....limits import SWIZZLE_BYTES
from ....parts.blackwell.pair import rank_of
from ....parts.division import Divisor
from ....parts.keys import paged
from ....parts.keys.source import BOX_KEYS, Lookup, Wanted, follow, look_up, wanted_of
from ....parts.keys.visible import Viewers, seen_bits, surely_seen
from ....parts.query import NO_LINES, Map, Query, copy_rows, copy_tile
from ..assignment import Assignment, Done, for_each_segment, is_leader
from ..geometry import ATOM, CTA_ROWS, LARGE_KEYS, DecodeGeometry
from ..storage import Shared, layouts_of

ALL_KEYS = (1 << BOX_KEYS) - 1
"""The bits of a box whose keys are all seen."""


class Maps(NamedTuple):
    """Tensor maps of a part of cache rows: for boxes of BOX_KEYS keys, which every page has, and for LARGE_KEYS where
    pages have as many. One large copy costs the warp and the copy engine no more than a small one."""

    small: Map
    large: Map | None


class KeyMaps(NamedTuple):
    """Tensor maps of the wide and tail parts of cache rows; None where rows have no such part, or do not come by bulk
    copies."""

    k_wide: Maps | None
    k_tail: Maps | None


def load_keys(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    query: Query,
    maps: KeyMaps,
    assignment: Assignment,
    records: cute.Tensor,
):
    """Load Q of each segment, then its K tiles: in a pair, this CTA's half of a tile's keys; solo, all of them. After a
    segment's loads have been issued, this warp writes the records that the combine reads."""
    rank = rank_of(geometry.is_pair)
    tile_boxes = geometry.tile_kv // BOX_KEYS
    slots = geometry.k_slots_per_tile

    @cute.jit
    def load_keys_of(segment: Segment, done: Done) -> Done:
        wanted = wanted_of(assignment.source, segment, tile_boxes)
        viewers = assignment.viewers(segment)
        lookup = look_up(wanted)
        shared.edges.q.wait_empty(done.segments)
        _load_query(shared, geometry, query, segment, assignment.work.terms.heads, done.segments)
        segments = done.segments + 1
        for i in cutlass.range(segment.tiles, unroll=1):
            first = i * tile_boxes
            lookup = follow(wanted, lookup, first)
            for index in cutlass.range_constexpr(slots):
                count = (done.tiles + i) * slots + index
                place = rank if const_expr(geometry.is_pair) else Int32(index)
                box = first + place * (geometry.k_keys // BOX_KEYS)
                if const_expr(geometry.is_pair):
                    large, at = _large_box(wanted, viewers, lookup, box)
                    shared.edges.k.wait_empty(count)
                    chunk = index * geometry.k_chunks
                    if large:
                        _copy_large(shared, geometry, maps, at, count, chunk)
                    else:
                        _copy_boxes(shared, geometry, maps, wanted, lookup, count, chunk, box)
                    if is_leader(geometry):
                        shared.edges.k.announce(count)
                else:
                    shared.edges.k.wait_empty(count)
                    _load_slot(shared, geometry, maps, assignment, viewers, wanted, lookup, count, box)
        return Done(segments, done.tiles + segment.tiles)

    for_each_segment(geometry, assignment, load_keys_of, Done.nothing(), records)


@cute.jit
def _load_slot(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    maps: KeyMaps,
    assignment: Assignment,
    viewers: Viewers,
    wanted: Wanted,
    lookup: Lookup,
    count: Int32,
    first: Int32,
):
    """Load boxes from `first` on to K slot number `count`; solo CTAs only."""
    wide = geometry.k_chunks * geometry.chunk
    by_lanes, chunk = Int32(0), 0
    if surely_seen(viewers, wanted.key_of(first), geometry.k_keys):
        _copy_boxes(shared, geometry, maps, wanted, lookup, count, chunk, first)
    else:
        slot = shared.edges.k.stage(count)
        for index in cutlass.range(geometry.k_keys // BOX_KEYS, unroll=1):
            keys = seen_bits(viewers, wanted.key_of(first + index), BOX_KEYS)
            box = paged.box_with(wanted, lookup, first + index, keys)
            if keys != 0 and keys != ALL_KEYS:
                place = slot * geometry.k_wide_bytes + index * _box_bytes(geometry.k_chunks)
                by_lanes += _box_bytes(geometry.k_chunks)
                words = shared.words.k + place // 4
                paged.copy_box_keys(assignment.cache, Int32(0), wide, assignment.source, keys, box, words)
            else:
                _copy_wide(shared, geometry, maps, box, slot, chunk, index)
            if const_expr(geometry.tail > 0):
                _copy_tail(shared, geometry, maps, box, slot, index)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
    shared.edges.k.announce(count, shared.edges.k.spec.bytes - by_lanes)


@cute.jit
def _copy_boxes(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    maps: KeyMaps,
    wanted: Wanted,
    lookup: Lookup,
    count: Int32,
    chunk: cutlass.Constexpr,
    first: Int32,
):
    slot = shared.edges.k.stage(count)
    for index in cutlass.range_constexpr(geometry.k_keys // BOX_KEYS):
        box = paged.box_at(wanted, lookup, first + index)
        _copy_wide(shared, geometry, maps, box, slot, chunk, index)
        if const_expr(geometry.tail > 0):
            _copy_tail(shared, geometry, maps, box, slot, index)


@cute.jit
def _copy_large(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    maps: KeyMaps,
    box: paged.Box,
    count: Int32,
    chunk: cutlass.Constexpr,
):
    """Copy all keys of a slot in one box, which starts where `box` does, as `_copy_boxes` does in several."""
    slot, layouts = shared.edges.k.stage(count), layouts_of(geometry)
    barrier = shared.edges.k.full(slot)
    target = _at(shared.tiles.k, slot * geometry.k_wide_bytes, layouts.k_large)
    tiler = _box_tiler(geometry.chunk, geometry.k_chunks, LARGE_KEYS)
    paged.copy_box(maps.k_wide.large.atom, maps.k_wide.large.view, tiler, chunk, box, target, barrier)
    if const_expr(geometry.tail > 0):
        target = _at(shared.tiles.k_tail, slot * geometry.k_tail_bytes, layouts.k_tail_large)
        tiler = _box_tiler(geometry.tail, 1, LARGE_KEYS)
        paged.copy_box(maps.k_tail.large.atom, maps.k_tail.large.view, tiler, 0, box, target, barrier)


@cute.jit
def _large_box(wanted: Wanted, viewers: Viewers, lookup: Lookup, box: Int32) -> tuple[Boolean, paged.Box]:
    """Whether LARGE_KEYS keys from box number `box` on lie in one page and each is wanted, so that one copy can bring
    them; and where the box starts. For pairs; asked before the wait for a slot, of which it knows nothing."""
    large = surely_seen(viewers, wanted.key_of(box), LARGE_KEYS) and wanted.source.page_size >= LARGE_KEYS
    return large, paged.box_at(wanted, lookup, box)


@cute.jit
def _copy_wide(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], maps: KeyMaps, box: paged.Box, slot, chunk, index
):
    place = slot * geometry.k_wide_bytes + index * _box_bytes(geometry.k_chunks)
    tiler = _box_tiler(geometry.chunk, geometry.k_chunks)
    target, k_map = _at(shared.tiles.k, place), maps.k_wide.small
    paged.copy_box(k_map.atom, k_map.view, tiler, chunk, box, target, shared.edges.k.full(slot))


@cute.jit
def _copy_tail(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], maps: KeyMaps, box: paged.Box, slot, index):
    place = slot * geometry.k_tail_bytes + index * (BOX_KEYS * geometry.tail_bytes)
    tiler = _box_tiler(geometry.tail, 1)
    target, k_map = _at(shared.tiles.k_tail, place), maps.k_tail.small
    paged.copy_box(k_map.atom, k_map.view, tiler, 0, box, target, shared.edges.k.full(slot))


@cute.jit
def _load_query(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    query: Query,
    segment: Segment,
    heads: Divisor,
    count: Int32,
):
    """Load this CTA's query rows of a segment, its q number `count`, and up to a whole tile rows that are zeros or
    copies of others. In a pair, each CTA hands over: lanes may have written its part."""
    tile = geometry.query_tile
    first_row = segment.first_row + rank_of(geometry.is_pair) * CTA_ROWS
    if query.rows.lines == NO_LINES:
        last_row = segment.first_row + segment.rows - 1
        copy_rows(query.rows, tile, shared.words.q, segment.request, first_row, last_row, heads)
        shared.edges.q.hand_over(count)
    else:
        if is_leader(geometry):
            shared.edges.q.announce(count)
        else:
            shared.edges.q.hand_over(count)
        copy_tile(query, tile, shared.tiles.q, segment.request, first_row, heads, shared.edges.q.full(0))


def load_queries(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    query: Query,
    assignment: Assignment,
    records: cute.Tensor,
):
    """Load Q of each segment, and write the records, where other warps bring keys (`convert.py`)."""

    @cute.jit
    def load_query_of(segment: Segment, done: Done) -> Done:
        shared.edges.q.wait_empty(done.segments)
        _load_query(shared, geometry, query, segment, assignment.work.terms.heads, done.segments)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, load_query_of, Done.nothing(), records)


def load_values(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], v_maps: Maps, assignment: Assignment):
    """Load V tiles of a pair: this CTA's 256 of the 512 latent dims, all keys."""
    tile_boxes = geometry.tile_kv // BOX_KEYS
    slots = geometry.v_slots_per_tile

    @cute.jit
    def load_values_of(segment: Segment, done: Done) -> Done:
        wanted = wanted_of(assignment.source, segment, tile_boxes)
        viewers = assignment.viewers(segment)
        lookup = look_up(wanted)
        for i in cutlass.range(segment.tiles, unroll=1):
            first = i * tile_boxes
            lookup = follow(wanted, lookup, first)
            for index in cutlass.range_constexpr(slots):
                count = (done.tiles + i) * slots + index
                box = first + index * (geometry.v_keys // BOX_KEYS)
                large, at = _large_box(wanted, viewers, lookup, box)
                shared.edges.v.wait_empty(count)
                if large:
                    _copy_large_values(shared, geometry, v_maps, at, count)
                else:
                    small = v_maps.small
                    _load_value_slot(shared, geometry, small, assignment, viewers, wanted, lookup, count, box)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, load_values_of, Done.nothing())


@cute.jit
def _load_value_slot(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    v_map: Map,
    assignment: Assignment,
    viewers: Viewers,
    wanted: Wanted,
    lookup: Lookup,
    count: Int32,
    first: Int32,
):
    """Load boxes from `first` on to V slot number `count`. Each CTA's part may lack what its lanes copy, so each hands
    over."""
    slot = shared.edges.v.stage(count)
    barrier = shared.edges.v.full(slot)
    rank = rank_of(geometry.is_pair)
    box_bytes = _box_bytes(geometry.v_chunks)
    tiler, chunk = _box_tiler(geometry.chunk, geometry.v_chunks), rank * geometry.v_chunks
    tx_bytes = Int32(shared.edges.v.spec.bytes)
    if surely_seen(viewers, wanted.key_of(first), geometry.v_keys):
        for index in cutlass.range_constexpr(geometry.v_keys // BOX_KEYS):
            box = paged.box_at(wanted, lookup, first + index)
            target = _at(shared.tiles.v, slot * geometry.v_bytes + index * box_bytes)
            paged.copy_box(v_map.atom, v_map.view, tiler, chunk, box, target, barrier)
    else:
        for index in cutlass.range(geometry.v_keys // BOX_KEYS, unroll=1):
            keys = seen_bits(viewers, wanted.key_of(first + index), BOX_KEYS)
            box = paged.box_with(wanted, lookup, first + index, keys)
            place = slot * geometry.v_bytes + index * box_bytes
            if keys != 0 and keys != ALL_KEYS:
                dim, words = rank * geometry.v_dims, shared.words.v + place // 4
                paged.copy_box_keys(assignment.cache, dim, geometry.v_dims, assignment.source, keys, box, words)
                tx_bytes -= geometry.ctas * box_bytes
            else:
                paged.copy_box(v_map.atom, v_map.view, tiler, chunk, box, _at(shared.tiles.v, place), barrier)
        cute.arch.fence_view_async_shared()
    _tell_values(shared, geometry, count, tx_bytes)


@cute.jit
def _copy_large_values(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], maps: Maps, box: paged.Box, count: Int32
):
    """Load a V slot whose keys are one large box, which starts where `box` does."""
    slot = shared.edges.v.stage(count)
    target = _at(shared.tiles.v, slot * geometry.v_bytes, layouts_of(geometry).v_large)
    rank = rank_of(geometry.is_pair)
    tiler, chunk = _box_tiler(geometry.chunk, geometry.v_chunks, LARGE_KEYS), rank * geometry.v_chunks
    paged.copy_box(maps.large.atom, maps.large.view, tiler, chunk, box, target, shared.edges.v.full(slot))
    _tell_values(shared, geometry, count, Int32(shared.edges.v.spec.bytes))


@cute.jit
def _tell_values(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], count: Int32, tx_bytes: Int32):
    if is_leader(geometry):
        cute.arch.sync_warp()
        shared.edges.v.announce(count, tx_bytes)
    else:
        shared.edges.v.hand_over(count)


def _box_bytes(chunks: int) -> int:
    return BOX_KEYS * chunks * SWIZZLE_BYTES


def _box_tiler(width: int, chunks: int, keys: int = BOX_KEYS) -> tuple[int, ...]:
    return (width, paged.GROUP, chunks, keys // paged.GROUP, 1)


@cute.jit
def _at(first: cute.Tensor, offset_bytes: Int32, box: cute.ComposedLayout | None = None) -> cute.Tensor:
    """The box at `offset_bytes` from the first, with its layout or that of `box`."""
    element_bytes = bytes_of(first.element_type.width)
    offset = cute.assume(offset_bytes // element_bytes, divby=ATOM // 2 // element_bytes)
    layout = first.layout if const_expr(box is None) else box.outer
    return cute.make_tensor(first.iterator + offset, layout)
