"""Role `convert` of the Hopper decode: warps that make rows that are multiplied of rows as they are stored, in place.

A warp has 16 keys of every tile, strip by strip: its lanes read all that is stored of these before they write, and
nobody else touches it. A lane has one key and half of a strip's columns, so that the scales of its key stay in its
registers. Both sides are rows of 128 bytes whose vectors of 16 are swizzled; lanes of the second half take theirs in
another order, so that eight lanes always meet all banks.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...limits import WARPGROUP
from ...parts.alignment import shared_vector
from ...parts.division import Divisor
from ...parts.key_source import BOX_KEYS
from ...parts.precision import numeric
from ...parts.visible import Visibility, hides, seen_by_any, viewers_of
from .geometry import GROUP_ROWS, PATTERN_COLUMNS, DecodeGeometry
from .storage import Shared
from .task import Task, edge_tile

VECTOR = 16
"""Bytes that a lane reads or writes at a time."""
LINE = 128
"""Bytes of a row of either side."""
VECTORS = LINE // VECTOR // 2
"""That a lane reads of a strip: one of two halves of a row."""


class Lane(NamedTuple):
    """Where a lane's vectors and its key's scales lie, in bytes from their boxes on. Vectors follow by
    exclusive or with multiples of VECTOR: addresses that are sums would all be kept in registers."""

    stored: Int32
    made: Int32
    scales: Int32


@cute.jit
def convert(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], task: Task, view: Visibility, heads: Divisor
) -> None:
    """One warpgroup: every tile of a task, each strip as soon as it is there. Values of keys that no row may see become
    zeros, so that a probability of 0 times such a value is 0; their rope parts only reach scores, which are hidden."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32) % (WARPGROUP // 32)
    row = cute.arch.lane_idx() // 2
    lane = _lane(geometry)
    viewers = viewers_of(view, task, heads)
    scales = cute.make_rmem_tensor(geometry.latent_strips, Float32)
    for index in cutlass.range(task.tiles, unroll=1):
        count, tile = task.first_count + index, task.first_tile + index
        stage = shared.kv_edges[0].stage(count)
        unseen = Boolean(False)
        if edge_tile(task, tile, geometry.tile_kv) | hides(view):
            unseen = not seen_by_any(viewers, tile * geometry.tile_kv + warp * BOX_KEYS + row)
        for strip in cutlass.range_constexpr(geometry.latent_strips):
            shared.kv_edges[strip].wait_full(count)
            box = shared.loaded[strip] + stage * geometry.strip_bytes[strip] + warp * geometry.box_bytes
            if const_expr(strip == 0):
                cute.autovec_copy(shared_vector(Float32, box + lane.scales), scales)
            words = cute.make_rmem_tensor((VECTOR // 4, VECTORS), Int32)
            for i in cutlass.range_constexpr(VECTORS):
                cute.autovec_copy(shared_vector(Int32, (box + lane.stored) ^ i * VECTOR), words[None, i])
            if unseen:
                words.fill(0)
                scales.fill(0.0)
            cute.arch.sync_warp()  # all lanes have read what they now write over
            _write(geometry, words, scales[strip], box + lane.made)
            shared.ready_edges[strip].publish(count)


@cute.jit
def _lane(geometry: cutlass.Constexpr[DecodeGeometry]) -> Lane:
    """A half of a strip as it is made is a pattern of its own."""
    lane = cute.arch.lane_idx()
    row, half = lane // 2, lane % 2
    line = row % GROUP_ROWS
    patterns = geometry.d_strip // PATTERN_COLUMNS
    pattern = (row // GROUP_ROWS * patterns + half) * (GROUP_ROWS * LINE)
    return Lane(
        stored=geometry.stored_at + row * LINE + (half * (VECTORS + VECTORS // 2) ^ line) * VECTOR,
        made=pattern + line * LINE + (half * VECTORS ^ line) * VECTOR,
        scales=row * geometry.scales_bytes,
    )


@cute.jit
def _write(geometry: cutlass.Constexpr[DecodeGeometry], words: cute.Tensor, scale: Float32, first: Int32) -> None:
    """What was read, times its scale, rounded: as `mla_read_cache` does."""
    stored, made = (numeric(format.piece("latent").dtype) for format in (geometry.stored, geometry.row))
    for i in cutlass.range_constexpr(VECTORS):
        values = cute.recast_tensor(words[None, i], stored).load().to(Float32)
        rounded = cute.make_rmem_tensor((VECTOR * 8 // made.width, made.width // stored.width), made)
        rounded.store((values * scale).to(made).reshape(rounded.shape))
        for part in cutlass.range_constexpr(cute.size(rounded, mode=[1])):
            vector = i * cute.size(rounded, mode=[1]) + part
            cute.autovec_copy(rounded[None, part], shared_vector(made, first ^ vector * VECTOR))
