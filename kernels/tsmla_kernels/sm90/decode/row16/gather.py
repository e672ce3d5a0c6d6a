"""Role `gather_few` of the Hopper decode of few rows: two or three warps that bring rows one by one, 16 bytes a lane.

Rows lie one behind the other in shared memory, as they are stored; pieces that lie apart, as bulk copies would put
them, and their scales in a place of their own. A key that is not there is zeros, its scales too. Between bf16 rows are
16 bytes that nobody reads.
(One warp that issues a bulk copy for each row takes 5,500 clk a tile; these copies take less time than memory.)"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_
from tsmla.identity.row_format import Piece

from ....limits import VECTOR_BYTES
from ....parts.division import Divisor
from ....parts.keys.listed import (
    Lines,
    ListedKeys,
    Rows,
    for_each_tile,
    gather,
    gather_whole,
    lane_keys,
    place_of,
    tell_there,
)
from ....parts.keys.scales import copy_slot_scale
from ....parts.keys.visible import Visibility, viewers_of
from ....parts.ptx import copy_vector
from ..work.task import Task, for_each_task, in_smaller_tiles
from .geometry import STRIP, FewRowsGeometry
from .scales import key_scale_at
from .schedule import PLAIN_GATHER_WARPS
from .storage import Shared, there_of

SHARE = 32
"""Keys of a tile that a warp brings, one in each lane."""
AT_ONCE = 8
"""Steps of a tile's copies that stand in the code one behind the other."""


@cute.jit
def gather_few(
    source: ListedKeys, scales: cute.Tensor | None, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    view: Visibility, heads: Divisor, gatherer: cutlass.Constexpr[int],
) -> None:  # fmt: skip
    """Gather a share of every tile's rows, as warp number `gatherer`. scales: those of keys, where they lie apart."""
    act = functools.partial(_gather_task, source, scales, shared, geometry, view, heads, gatherer)
    for_each_task(shared.dealt, act)


@cute.jit
def _gather_task(
    source: ListedKeys, scales: cute.Tensor | None, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    view: Visibility, heads: Divisor, gatherer: cutlass.Constexpr[int], number: Int32, dealt: Task,
) -> None:  # fmt: skip
    task = in_smaller_tiles(dealt, geometry.halves)
    viewers = viewers_of(view, task, heads)
    first = 0 if geometry.plain else gatherer * SHARE
    mine = lane_keys(source, viewers, task.first_tile * geometry.tile_kv + first + cute.arch.lane_idx(), SHARE)
    act = functools.partial(_gather_tile, source, scales, shared, geometry, gatherer)
    for_each_tile(mine, task.tiles, geometry.tile_kv, task.first_count, act)


@cute.jit
def _gather_tile(
    source: ListedKeys, scales: cute.Tensor | None, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    gatherer: cutlass.Constexpr[int], count: Int32, slots: tuple,
) -> None:  # fmt: skip
    """Gather rows of tile number `count`, and tell which keys are there; where scales come by themselves, those of
    the others, which are 0, say it. bf16 rows: all warps have the same keys, and the first one tells."""
    (slot,) = slots
    edge = shared.kv_edge
    edge.wait_empty(count)
    stage = edge.stage(count)
    if const_expr(not geometry.brings_scales):
        if const_expr(geometry.plain):
            if const_expr(gatherer == 0):
                tell_there(there_of(geometry, shared, stage), slots)
        else:
            tell_there(there_of(geometry, shared, stage, gatherer), slots)
        edge.hand_over(count)
    target = shared.stages + stage * geometry.stage_bytes
    place = place_of(source, source.rows, slot)
    if const_expr(geometry.brings_scales):
        latent, rope = (Lines(STRIP, geometry.stored.piece(name).bytes // STRIP) for name in ("latent", "rope"))
        first = gatherer * SHARE
        copy_slot_scale(source, scales, slot, key_scale_at(shared, stage, first + cute.arch.lane_idx()))
        gather(source.rows.start, place, latent, target, first, SHARE)
        behind = target + geometry.rope_at
        gather(source.rope.start, place_of(source, source.rope, slot), rope, behind, first, SHARE)
    elif const_expr(geometry.plain):
        for piece in geometry.stored.pieces:
            rows = source.rows if piece.name == "latent" else source.rope
            _gather_third(geometry, rows, place_of(source, rows, slot), target, piece, gatherer)
    else:
        target = target + gatherer * (SHARE * geometry.row_bytes)
        gather_whole(source.rows.start, place, geometry.row_bytes // VECTOR_BYTES, target, AT_ONCE)
    edge.arrive_behind_copies(count)


@cute.jit
def _gather_third(
    geometry: cutlass.Constexpr[FewRowsGeometry], rows: Rows, place: Int32, target: Int32,
    piece: cutlass.Constexpr[Piece], gatherer: cutlass.Constexpr[int],
) -> None:  # fmt: skip
    """Start copying every third step of 512 bytes of a piece of 32 rows, of which each lane has one's `place`; where
    there is none, zeros are written."""
    lane, row_vectors = cute.arch.lane_idx(), piece.bytes // VECTOR_BYTES
    target = target + geometry.stored.offset(piece.name)
    for step in cutlass.range_constexpr(gatherer, row_vectors, len(PLAIN_GATHER_WARPS)):
        vector = step * 32 + lane
        key = vector // row_vectors
        found = cute.arch.shuffle_sync(place, key)
        size = Int32(select_(found < 0, Int32(0), Int32(VECTOR_BYTES)))
        within = (vector - key * row_vectors) * VECTOR_BYTES
        source = rows.start + Int64(cutlass.max(found, 0)) * VECTOR_BYTES + within
        copy_vector(target + key * geometry.row_bytes + within, 0, source, 0, size)
