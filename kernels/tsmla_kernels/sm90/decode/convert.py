"""Role `convert` of the Hopper decode: warps that make rows that are multiplied of rows as they are stored, in place.

A warp has 16 keys of every tile, strip by strip. What is stored of a strip lies where keys of other warps will: all
warps read theirs before any of them writes. A lane has one key and half of a strip's columns, so that the scales of its
key stay in its registers. Both sides are rows of 128 bytes whose vectors of 16 are swizzled; lanes of the second half
take theirs in another order, so that eight lanes always meet all banks.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...limits import WARPGROUP
from ...parts.alignment import shared_vector
from ...parts.division import Divisor
from ...parts.key_source import BOX_KEYS
from ...parts.pipeline import TmaEdge, WarpEdge, one_of
from ...parts.precision import numeric
from ...parts.visible import Visibility, hides, seen_by_any, viewers_of
from .geometry import GROUP_ROWS, PATTERN_COLUMNS, DecodeGeometry
from .schedule import CONVERT_BARRIER
from .storage import Shared
from .task import Task, edge_tile

VECTOR = 16
"""Bytes that a lane reads or writes at a time."""
LINE = 128
"""Bytes of a row of either side."""
VECTORS = LINE // VECTOR // 2
"""That a lane reads of a strip: one of two halves of a row."""


class Lane(NamedTuple):
    """Where a lane's vectors and its key's scales lie, in bytes from their strip on. Vectors follow by exclusive or
    with multiples of VECTOR: addresses that are sums would all be kept in registers."""

    stored: Int32
    made: Int32
    scales: Int32


class Piece(NamedTuple):
    """One strip of a tile: the tile's number in the rings, where the strip begins, and the edges that say that it is
    loaded, and that it is ready."""

    count: Int32
    first: Int32
    loaded: TmaEdge
    ready: WarpEdge


@cute.jit
def convert(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], task: Task, view: Visibility, heads: Divisor
) -> None:
    """One warpgroup: every tile of a task, each strip as soon as it is there, and read while the one before is
    converted, if it is there by then. Values of keys that no row may see become zeros, so that a probability of 0 times
    such a value is 0; their rope parts only reach scores, which are hidden."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32) % (WARPGROUP // 32)
    row = cute.arch.lane_idx() // 2
    lane = _lane(geometry, warp)
    viewers = viewers_of(view, task, heads)
    scales = cute.make_rmem_tensor(geometry.latent_strips, Float32)
    words = cute.make_rmem_tensor((VECTOR // 4, VECTORS), Int32)
    scales.fill(0.0)
    unseen = ahead = Boolean(False)
    pieces = task.tiles * geometry.latent_strips
    for number in cutlass.range(pieces, unroll=1):
        piece = _piece(shared, geometry, task, number)
        if not ahead:
            piece.loaded.wait_full(piece.count)
            for i in cutlass.range_constexpr(VECTORS):
                _read(words, piece.first + lane.stored, i)
        if number % geometry.latent_strips == 0:
            tile = task.first_tile + number // geometry.latent_strips
            unseen = Boolean(False)
            if edge_tile(task, tile, geometry.tile_kv) | hides(view):
                unseen = not seen_by_any(viewers, tile * geometry.tile_kv + warp * BOX_KEYS + row)
            read = cute.make_rmem_tensor(geometry.latent_strips, Float32)
            cute.autovec_copy(shared_vector(Float32, piece.first + lane.scales), read)
            for place, strip in enumerate(geometry.converted_strips):
                scales[place] = read[strip]
        cute.arch.barrier(barrier_id=CONVERT_BARRIER, number_of_threads=WARPGROUP)  # all have read the piece
        following = _piece(shared, geometry, task, number + 1)
        ahead = (number + 1 < pieces) & following.loaded.is_full(following.count)
        for i in cutlass.range_constexpr(VECTORS):
            _write(geometry, words[None, i], scales[0], piece.first + lane.made, i)
            if ahead:
                _read(words, following.first + lane.stored, i)
        if unseen:
            _write_zeros(piece.first + lane.made)
        piece.ready.publish(piece.count)
        for place in cutlass.range_constexpr(geometry.latent_strips - 1):
            scales[place] = scales[place + 1]


def _piece(shared: Shared, geometry: DecodeGeometry, task: Task, number: Int32) -> Piece:
    """Number `number` of a task, strip by strip of each tile in the order in which they are converted."""
    count = task.first_count + number // geometry.latent_strips
    strip = geometry.converted_strip(number % geometry.latent_strips)
    loaded, ready = one_of(shared.kv_edges, strip), one_of(shared.ready_edges, strip)
    first = shared.loaded[0] + (strip * geometry.stages + loaded.stage(count)) * geometry.strip_bytes[0]
    return Piece(count, first, loaded, ready)


@cute.jit
def _lane(geometry: cutlass.Constexpr[DecodeGeometry], warp: Int32) -> Lane:
    """A half of a strip as it is made is a pattern of its own."""
    lane = cute.arch.lane_idx()
    keys = warp * BOX_KEYS
    row, half = lane // 2, lane % 2
    line = row % GROUP_ROWS
    patterns = geometry.d_strip // PATTERN_COLUMNS
    pattern = (row // GROUP_ROWS * patterns + half) * (GROUP_ROWS * LINE)
    return Lane(
        stored=geometry.stored_at + (keys + row) * LINE + (half * (VECTORS + VECTORS // 2) ^ line) * VECTOR,
        made=warp * geometry.box_bytes + pattern + line * LINE + (half * VECTORS ^ line) * VECTOR,
        scales=(keys + row) * geometry.scales_bytes,
    )


@cute.jit
def _read(words: cute.Tensor, first: Int32, i: cutlass.Constexpr) -> None:
    cute.autovec_copy(shared_vector(Int32, first ^ i * VECTOR), words[None, i])


@cute.jit
def _write(
    geometry: cutlass.Constexpr[DecodeGeometry], words: cute.Tensor, scale: Float32, first: Int32, i: cutlass.Constexpr
) -> None:
    """Vector `i` of what was read, times its scale, rounded: as `mla_read_cache` does."""
    stored, made = (numeric(format.piece("latent").dtype) for format in (geometry.stored, geometry.row))
    values = cute.recast_tensor(words, stored).load().to(Float32)
    rounded = cute.make_rmem_tensor((VECTOR * 8 // made.width, made.width // stored.width), made)
    rounded.store((values * scale).to(made).reshape(rounded.shape))
    for part in cutlass.range_constexpr(cute.size(rounded, mode=[1])):
        vector = i * cute.size(rounded, mode=[1]) + part
        cute.autovec_copy(rounded[None, part], shared_vector(made, first ^ vector * VECTOR))


@cute.jit
def _write_zeros(first: Int32) -> None:
    zeros = cute.make_rmem_tensor(VECTOR // 4, Int32)
    zeros.fill(0)
    for vector in cutlass.range(LINE // VECTOR, unroll=1):  # a loop: eight stores more would stand in every piece's way
        cute.autovec_copy(zeros, shared_vector(Int32, first ^ vector * VECTOR))
