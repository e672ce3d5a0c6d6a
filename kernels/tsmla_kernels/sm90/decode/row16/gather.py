"""Role `gather_few` of the Hopper decode of few rows: one warp that brings rows one by one, a bulk copy for each.

Rows lie one behind the other in shared memory, as they are stored, so that a row is one run of bytes on both sides."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....parts.alignment import shared_vector
from ....parts.division import Divisor
from ....parts.keys.listed import VECTOR, ListedKeys, entries_of, row_of, tell_there
from ....parts.keys.source import EVICT_NORMAL
from ....parts.keys.visible import Visibility, viewers_of
from ....parts.ptx import bulk_copy
from ..work.task import Task, for_each_task
from .geometry import TILE_KV, FewRowsGeometry
from .storage import Shared, there_of

HALVES = TILE_KV // 32
"""Keys of a tile that a lane has."""


@cute.jit
def gather_few(
    cache: cute.Tensor, source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    view: Visibility, heads: Divisor,
) -> None:  # fmt: skip
    """Gather every task's rows of `cache` [pages, page size, bytes of a row], by one warp."""
    act = functools.partial(_gather_task, cache, source, shared, geometry, view, heads)
    for_each_task(shared.dealt, act, Int32(0))


@cute.jit
def _gather_task(
    cache: cute.Tensor, source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    view: Visibility, heads: Divisor, number: Int32, task: Task, kept: Int32,
) -> Int32:  # fmt: skip
    """Gather every tile of a task, and tell which keys are there. Entries of the table are read a tile ahead."""
    viewers, base, edge = viewers_of(view, task, heads), cache.iterator.toint(), shared.kv_edge
    lane = cute.arch.lane_idx()
    first_key = task.first_tile * TILE_KV + lane
    ahead = entries_of(source, viewers, first_key, TILE_KV)
    for index in cutlass.range(task.tiles, unroll=1):
        count, key = task.first_count + index, first_key + index * TILE_KV
        rows = tuple(row_of(source, ahead[half], key + 32 * half) for half in range(HALVES))
        ahead = entries_of(source, viewers, key + TILE_KV, TILE_KV)
        found = tuple(cute.arch.vote_ballot_sync(row >= 0) for row in rows)
        edge.wait_empty(count)
        stage = shared.stages + edge.stage(count) * geometry.stage_bytes + lane * geometry.row_bytes
        full, size = edge.full(edge.stage(count)), Int32(0)
        tell_there(there_of(shared, edge.stage(count)), rows)
        for half in cutlass.range_constexpr(HALVES):
            size += cute.arch.popc(found[half]) * geometry.row_bytes
            if found[half] != -1:
                if rows[half] < 0:
                    _write_nothing(stage + half * 32 * geometry.row_bytes, geometry)
                cute.arch.fence_view_async_shared()  # copies will write there
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        for half in cutlass.range_constexpr(HALVES):
            if rows[half] >= 0:
                source_row = base + Int64(rows[half]) * VECTOR
                target = stage + half * 32 * geometry.row_bytes
                bulk_copy(target, source_row, geometry.row_bytes, full.toint(), EVICT_NORMAL)
    return kept


@cute.jit
def _write_nothing(row: Int32, geometry: cutlass.Constexpr[FewRowsGeometry]) -> None:
    """Write what stands for a key that is not there: numbers that are 0, and scales of 1."""
    values, ones = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Float32)
    values.fill(0)
    ones.fill(1.0)
    for vector in cutlass.range(geometry.row_bytes // VECTOR, unroll=1):
        cute.autovec_copy(values, shared_vector(Int32, row + vector * VECTOR))
    cute.autovec_copy(ones, shared_vector(Float32, row + geometry.scales_at))

