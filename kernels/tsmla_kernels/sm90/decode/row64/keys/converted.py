"""The stream of rows that are converted in place: in the role `convert`, warps turn stored rows into the rows that are
multiplied.

A warpgroup has every other strip, and takes it in two halves of 32 keys. The stored strip lies where the converted keys
of the second half will: all warps read theirs before any of them writes these. A lane has one key of each half and a
quarter of a strip's columns, so that the scales of its keys stay in its registers. Both sides are rows of 128 bytes
whose vectors of 16 are swizzled; lanes of the last two quarters take theirs in another order, so that eight lanes
always meet all banks. (CTAs that come in pairs: `paired.py`.)"""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from tsmla.identity.row_format import SCALE_BYTES

from .....limits import SWIZZLE_BYTES, VECTOR_BYTES, VECTOR_WORDS, WARPGROUP
from .....parts.alignment import shared_vector, shared_word, wipe_vector
from .....parts.division import Divisor
from .....parts.keys.visible import Visibility, hides, seen_by_any, viewers_of
from .....parts.pipeline import TmaEdge, WarpEdge, one_of
from .....parts.precision import multiplied, numeric
from .....parts.ptx import pinned
from ...work.task import Task, for_each_task, look
from ..geometry import GROUP_ROWS, PATTERN_COLUMNS, TILE_KV, DecodeGeometry
from ..schedule import CONVERT_BARRIER
from ..storage import Shared
from .stored import StoredStream
from .stream import Keys

KEY_HALVES = 2
"""Halves of a strip's keys, converted one after the other."""
HALF_KEYS = TILE_KV // KEY_HALVES
LANES = 32 // GROUP_ROWS
"""Lanes that have a key: a warp has a group of rows of each half."""
VECTORS = SWIZZLE_BYTES // VECTOR_BYTES // LANES
"""Vectors that a lane reads of a key in a strip."""


class Lane(NamedTuple):
    """Where a lane's stored and converted vectors lie, in bytes from their half of a strip on, and the scales of its
    key in the first half, from their strip on. A lane's further vectors are at its address exclusive or multiples of
    VECTOR_BYTES: addresses that are sums would all be kept in registers."""

    stored: Int32
    made: Int32
    scales: Int32


class Strip(NamedTuple):
    """One strip of a tile: the tile's number in the rings, where the strip begins, and the edges that say that it is
    loaded, and that it is ready."""

    count: Int32
    first: Int32
    loaded: TmaEdge
    ready: WarpEdge


class ConvertedStream(StoredStream):
    """The stream of rows that helping warpgroups convert where copies have put them."""

    def help(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        convert(shared, self.geometry, view, heads)


@cute.jit
def convert(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility, heads: Divisor) -> None:
    """Convert the strips that this warpgroup has of every task."""
    converter = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32) - 3
    for_each_task(shared.dealt, functools.partial(_convert_task, shared, geometry, converter, view, heads))


@cute.jit
def _convert_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], converter: Int32, view: Visibility, heads: Divisor,
    number_of_task: Int32, task: Task,
) -> None:  # fmt: skip
    """Convert the strips that warpgroup `converter` has of every tile of a task, each as soon as it is there; a half is
    read while the half before is converted, if it is there by then. Values of keys that no row may see become zeros, so
    that a probability of 0 times such a value is 0; their rope pieces only reach scores, which are hidden."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32) % (WARPGROUP // 32)
    half_bytes = HALF_KEYS * geometry.d_strip * geometry.element_bytes
    lane = _lane(geometry, warp)
    scales = cute.make_rmem_tensor((geometry.converted_strips, KEY_HALVES), Float32)
    words = cute.make_rmem_tensor((VECTOR_WORDS, VECTORS), Int32)
    scales.fill(0.0)
    unseen = [Boolean(False)] * KEY_HALVES
    ahead = Boolean(False)
    strips = task.tiles * geometry.converted_strips
    for number in cutlass.range(strips, unroll=1):
        current = _strip_at(shared, geometry, converter, task, number)
        if not ahead:
            current.loaded.wait_full(current.count)
            for i in cutlass.range_constexpr(VECTORS):
                _read(words, current.first + lane.stored, i)
            if number % geometry.converted_strips == 0:
                _read_scales(geometry, scales, converter, current.first + lane.scales)
        if number % geometry.converted_strips == 0:
            unseen = [Boolean(False)] * KEY_HALVES
            if const_expr(not geometry.gathers):  # else rows that nobody sees are zeros already
                if (number == 0) | (number == strips - geometry.converted_strips) | hides(view):  # maybe a border
                    # The task and the words are read again: there are not enough registers to keep them meanwhile.
                    known = look(shared.dealt, number_of_task)
                    first_key = (known.first_tile + number // geometry.converted_strips) * geometry.tile_kv
                    for half in cutlass.range_constexpr(KEY_HALVES):
                        at = first_key + half * HALF_KEYS + warp * GROUP_ROWS + cute.arch.lane_idx() // LANES
                        unseen[half] = not seen_by_any(viewers_of(view, known, heads), at)
                    for i in cutlass.range_constexpr(VECTORS):
                        _read(words, current.first + lane.stored, i)
            _together(converter)  # all have read the scales, which lie where the first half will
        following = _strip_at(shared, geometry, converter, task, number + 1)
        for half in cutlass.range_constexpr(KEY_HALVES):
            stored, there = current.first + (half + 1) * HALF_KEYS * SWIZZLE_BYTES, Boolean(True)
            if const_expr(half + 1 == KEY_HALVES):
                _together(converter)  # all have read the strip
                there = (number + 1 < strips) & following.loaded.is_full(following.count)
                stored, ahead = following.first, there
            made = current.first + lane.made + half * half_bytes
            for i in cutlass.range_constexpr(VECTORS):
                _write(geometry, words[None, i], scales[0, half], made, i)
                if there:
                    _read(words, stored + lane.stored, i)
            if unseen[half]:
                _write_zeros(made)
        for half in cutlass.range_constexpr(KEY_HALVES):
            for place in cutlass.range_constexpr(geometry.converted_strips - 1):
                scales[place, half] = scales[place + 1, half]
        if ahead & ((number + 1) % geometry.converted_strips == 0):
            _read_scales(geometry, scales, converter, following.first + lane.scales)
        current.ready.publish(current.count)


def _together(converter: Int32) -> None:
    """Wait for all warps of the warpgroup."""
    cute.arch.barrier(barrier_id=CONVERT_BARRIER + converter, number_of_threads=WARPGROUP)


def _strip_at(shared: Shared, geometry: DecodeGeometry, converter: Int32, task: Task, number: Int32) -> Strip:
    """Number `number` of the strips that a warpgroup converts of a task, tile by tile."""
    count = task.first_count + number // geometry.converted_strips
    strip = geometry.converted_strip(converter, number % geometry.converted_strips)
    loaded, ready = one_of(shared.edges.kv, strip), one_of(shared.edges.ready, strip)
    first = shared.keys.loaded[0] + (strip * geometry.stages + loaded.stage(count)) * geometry.strip_bytes[0]
    return Strip(count, first, loaded, ready)


@cute.jit
def _lane(geometry: cutlass.Constexpr[DecodeGeometry], warp: Int32) -> Lane:
    """Where this lane's vectors lie. Half of a converted strip's columns are a pattern of their own, which two quarters
    share."""
    lane = pinned(cute.arch.lane_idx())  # for each task: registers that are kept from one to the next would be too many
    line, quarter = lane // LANES, lane % LANES
    side = quarter // 2
    patterns = geometry.d_strip // PATTERN_COLUMNS
    pattern = (warp * patterns + side) * (GROUP_ROWS * SWIZZLE_BYTES)
    key = warp * GROUP_ROWS + line
    return Lane(
        stored=geometry.stored_at + key * SWIZZLE_BYTES + (quarter * VECTORS + side ^ line) * VECTOR_BYTES,
        made=pattern + line * SWIZZLE_BYTES + (quarter % 2 * (2 * VECTORS) + side * 2 ^ line) * VECTOR_BYTES,
        scales=key * geometry.scales_bytes,
    )


@cute.jit
def _read_scales(
    geometry: cutlass.Constexpr[DecodeGeometry], scales: cute.Tensor, converter: Int32, first: Int32
) -> None:
    """Read the scales of a lane's key in each half, for the strips that its warpgroup converts."""
    for half in cutlass.range_constexpr(KEY_HALVES):
        for place in cutlass.range_constexpr(geometry.converted_strips):
            at = half * (HALF_KEYS * geometry.scales_bytes) + geometry.converted_strip(converter, place) * SCALE_BYTES
            scales[place, half] = shared_word(Float32, first + at)


@cute.jit
def _read(words: cute.Tensor, first: Int32, i: cutlass.Constexpr) -> None:
    cute.autovec_copy(shared_vector(Int32, first ^ i * VECTOR_BYTES), words[None, i])


@cute.jit
def _write(
    geometry: cutlass.Constexpr[DecodeGeometry], words: cute.Tensor, scale: Float32, first: Int32, i: cutlass.Constexpr
) -> None:
    """Multiply vector `i` of what was read by its scale, and write it."""
    stored, made = (numeric(format.piece("latent").dtype) for format in (geometry.stored, geometry.row))
    values = cute.recast_tensor(words, stored).load()
    rounded = cute.make_rmem_tensor((VECTOR_BYTES * 8 // made.width, made.width // stored.width), made)
    rounded.store(multiplied(values, scale, made).reshape(rounded.shape))
    for column in cutlass.range_constexpr(cute.size(rounded, mode=[1])):
        vector = i * cute.size(rounded, mode=[1]) + column
        cute.autovec_copy(rounded[None, column], shared_vector(made, first ^ vector * VECTOR_BYTES))


@cute.jit
def _write_zeros(first: Int32) -> None:
    for vector in cutlass.range(2 * VECTORS, unroll=1):  # a loop: unrolled, the stores would stand in every strip's way
        wipe_vector(shared_vector(Int32, first ^ vector * VECTOR_BYTES))
