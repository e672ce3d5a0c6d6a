"""The stream of rows that pairs of CTAs convert for each other: in the role `convert_for_both`, warps read stored keys
from global memory, multiply them by their scales, and write the rows that are multiplied into the shared memory of both
CTAs.

A CTA has half of a tile's keys, and a warp 8 of these. A lane has two vectors of a strip of one key, one in each of the
patterns that the strip has in shared memory; eight lanes that store together have two neighbouring keys, whose swizzles
differ in the vector, so that no two use the same banks.

Keys come from global memory through registers, which waits for no place in shared memory: those of a tile are all asked
for in the first half of the tile before. ptxas has one scoreboard for all of them, so that whoever waits for the first
waits for the last, too."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Vector, const_expr
from tsmla.identity.row_format import SCALE_BYTES

from .....limits import SWIZZLE_BYTES, VECTOR_BYTES, VECTOR_WORDS, WARPGROUP
from .....parts.alignment import shared_vector
from .....parts.division import Divisor
from .....parts.keys.source import BOX_KEYS, Lookup, Wanted, exists, follow, look_up, wanted_of
from .....parts.keys.visible import Viewers, Visibility, seen_bits, viewers_of
from .....parts.precision import multiplied, numeric
from .....parts.ptx import load_if
from ...work.task import Task, for_each_task
from ..geometry import GROUP_ROWS, TILE_KV, DecodeGeometry
from ..pair_edge import own_rank, publish_to_both
from ..storage import Shared
from .stored import StoredStream
from .stream import Keys

LANES = 32 // GROUP_ROWS
"""Lanes that have a key."""
PATTERNS = 2
"""Swizzle patterns side by side in a converted strip."""
GROUP_BYTES = GROUP_ROWS * SWIZZLE_BYTES * PATTERNS
"""Bytes of a warp's keys in a converted strip."""
BOXES = TILE_KV // BOX_KEYS
"""Boxes of a tile."""


class Lane(NamedTuple):
    """What this lane has of a tile: which box its warp's keys are in, and which key of the box is its own; which
    of every LANES vectors of the key's row is its own; and where the first such lies in a strip, in bytes."""

    box: Int32
    key: Int32
    vector: Int32
    made: Int32


class StoredKey(NamedTuple):
    """A key of a tile: the address of this lane's first vector of it, and of its scales; and whether it is there and
    some row sees it."""

    vector: Int64
    scales: Int64
    there: Boolean


class PairedStream(StoredStream):
    """The stream of rows of which each CTA of a pair converts half, for both."""

    def help(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        convert_for_both(shared, self, keys, view, heads)

    def wanted(self, keys: Keys, lane: Lane, task: Task, viewers: Viewers) -> Any:
        """What `find` asks of a task."""
        return wanted_of(keys.source, task, BOXES)

    def begin(self, wanted: Any) -> Any:
        """Look up where the first keys of a task lie."""
        return look_up(wanted)

    def move_on(self, wanted: Any, lookup: Any, index: Int32) -> Any:
        """Move the lookup on to tile `index` of the task, the next one."""
        return follow(wanted, lookup, index * BOXES)

    def find(self, keys: Keys, lane: Lane, wanted: Any, viewers: Viewers, lookup: Any, index: Int32) -> StoredKey:
        """Find this lane's key of tile `index` of the task, to which the lookup has moved on."""
        return _find(self.geometry, keys.cache, lane, wanted, viewers, lookup, index * BOXES)


@cute.jit
def convert_for_both(
    shared: Shared, stream: cutlass.Constexpr[PairedStream], keys: Keys, view: Visibility, heads: Divisor
) -> None:
    """Convert this warp's keys of every task."""
    for_each_task(shared.dealt, functools.partial(_convert_if_any, shared, stream, keys, view, heads))


@cute.jit
def _convert_if_any(
    shared: Shared, stream: cutlass.Constexpr[PairedStream], keys: Keys, view: Visibility, heads: Divisor,
    number: Int32, task: Task,
) -> None:  # fmt: skip
    if task.tiles > 0:  # else there may be no rows that could see a key
        _convert_task(shared, stream, keys, task, view, heads)


@cute.jit
def _convert_task(
    shared: Shared, stream: cutlass.Constexpr[PairedStream], keys: Keys, task: Task, view: Visibility, heads: Divisor
) -> None:
    """Convert a warp's keys of every tile of a task, and give both CTAs the result. Keys that no row sees become zeros,
    so that a probability of 0 times such a value is 0."""
    geometry, move_on, find = stream.geometry, stream.move_on, stream.find
    lane, viewers = _lane(geometry), viewers_of(view, task, heads)
    wanted = stream.wanted(keys, lane, task, viewers)
    strips, half = geometry.latent_strips, geometry.latent_strips // 2
    lookup = stream.begin(wanted)
    row = find(keys, lane, wanted, viewers, lookup, Int32(0))
    coming = ()
    for strip in cutlass.range_constexpr(strips):
        coming += _load(geometry, row, strip)
    words = len(coming) // strips
    for index in cutlass.range(task.tiles, unroll=1):
        count, following = task.first_count + index, index + 1
        lookup = move_on(wanted, lookup, following)
        row = find(keys, lane, wanted, viewers, lookup, following)
        next_of_first_half, next_of_second = (), ()
        places = ()
        for strip in cutlass.range_constexpr(strips):
            edge = shared.edges.kv[strip]
            edge.wait_empty(count)
            first = shared.keys.loaded[strip] + edge.stage(count) * geometry.strip_bytes[strip]
            _write(_multiplied(geometry, coming[strip * words : (strip + 1) * words]), first + lane.made)
            if const_expr(strip < half):
                next_of_first_half += _load(geometry, row, strip)
                next_of_second += _load(geometry, row, strip + half)
            places += (first + (lane.made & -GROUP_BYTES),)
            if const_expr(strip % 2 == 1):  # for each strip, its fence would take a tenth of the time of this role
                publish_to_both(shared.edges.kv[strip - 1 : strip + 1], count, places[strip - 1 :], GROUP_BYTES)
        coming = next_of_first_half + next_of_second


@cute.jit
def _lane(geometry: cutlass.Constexpr[DecodeGeometry]) -> Lane:
    number = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % (WARPGROUP // 32)
    key, vector = number // LANES, number % LANES
    first = own_rank() * geometry.own_keys + warp * GROUP_ROWS
    made = first // GROUP_ROWS * GROUP_BYTES + key * SWIZZLE_BYTES + ((vector * 2) ^ key) * VECTOR_BYTES
    return Lane(first // BOX_KEYS, first % BOX_KEYS + key, vector, made)


@cute.jit
def _find(
    geometry: cutlass.Constexpr[DecodeGeometry], cache: cute.Tensor, lane: Lane, wanted: Wanted, viewers: Viewers,
    lookup: Lookup, first: Int32,
) -> StoredKey:  # fmt: skip
    """This lane's key of the tile that begins with box `first`."""
    page, box_key = lookup.page_of(first + lane.box), wanted.key_of(first + lane.box)
    seen = seen_bits(viewers, box_key, BOX_KEYS) >> lane.key
    place = (box_key & (wanted.source.page_size - 1)) + lane.key
    row = cache.iterator.toint() + Int64(page) * cache.stride[0] + Int64(place) * geometry.stored.bytes
    there = exists(wanted.source, page) & (seen & 1 != 0)
    return stored_key(geometry, lane, row, there)


def stored_key(geometry: DecodeGeometry, lane: Lane, row: Int64, there: Boolean) -> StoredKey:
    """What this lane has of the key whose row is at address `row`."""
    return StoredKey(row + lane.vector * VECTOR_BYTES, row + geometry.stored.scales_offset, there)


@cute.jit
def _load(geometry: cutlass.Constexpr[DecodeGeometry], row: StoredKey, strip: cutlass.Constexpr[int]) -> tuple:
    """Start loading this lane's share of a strip: words as they are stored, the scale behind them, all 0 where the key
    is not there."""
    words = []
    for pattern in cutlass.range_constexpr(PATTERNS):
        words += load_if(
            row.there, row.vector, strip * geometry.d_strip + pattern * (VECTOR_BYTES * LANES), VECTOR_WORDS
        )
    words += load_if(row.there, row.scales, strip * SCALE_BYTES, 1)
    return tuple(words)


def _multiplied(geometry: DecodeGeometry, words: tuple) -> tuple:
    """Multiply what was loaded of a strip by its scale: two numbers in a word."""
    stored, made = (numeric(format.piece("latent").dtype) for format in (geometry.stored, geometry.row))
    (scale,) = Vector.from_elements(words[-1:], Int32).bitcast(Float32).to_elements()
    values = Vector.from_elements(words[:-1], Int32).bitcast(stored)
    return multiplied(values, scale, made).bitcast(Int32).to_elements()


@cute.jit
def _write(words: tuple, first: Int32) -> None:
    """Write a lane's share of a strip: in each pattern, two vectors side by side."""
    for vector in cutlass.range_constexpr(2 * PATTERNS):
        mine = cute.make_rmem_tensor(VECTOR_WORDS, Int32)
        for i in cutlass.range_constexpr(VECTOR_WORDS):
            mine[i] = words[vector * VECTOR_WORDS + i]
        place = (first ^ vector % 2 * VECTOR_BYTES) + vector // 2 * (GROUP_ROWS * SWIZZLE_BYTES)
        cute.autovec_copy(mine, shared_vector(Int32, place))
