"""The stream of 8-bit rows: warps turn each value tile, as loaded, into one whose keys are contiguous."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .....limits import WARPGROUP
from .....parts.hopper.transpose import transpose_pattern
from ...work.task import Task, for_each_task
from ..geometry import GROUP_ROWS, PATTERN_COLUMNS, DecodeGeometry
from ..storage import Shared


@cute.jit
def transpose_values(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry]) -> None:
    """Transpose the values of every task."""
    for_each_task(shared.dealt, functools.partial(_transpose_task, shared, geometry), Int32(0))


@cute.jit
def _transpose_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], number: Int32, task: Task, kept: Int32
) -> Int32:
    """Transpose both halves of every tile of a task, by one warpgroup. A warp takes 64 dims of either half."""
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % (WARPGROUP // 32)
    for index in cutlass.range(task.tiles, unroll=1):
        count = task.first_count + index
        pattern, transposed = GROUP_ROWS * PATTERN_COLUMNS, PATTERN_COLUMNS * geometry.tile_kv
        for half in cutlass.range_constexpr(2):
            loaded, values = shared.edges.kv[half], shared.edges.values[half]
            loaded.wait_full(count)
            values.wait_empty(count)
            transpose_pattern(
                shared.keys.values[0].element_type,
                shared.keys.loaded[half] + loaded.stage(count) * geometry.strip_bytes[half] + warp * pattern,
                GROUP_ROWS * geometry.d_strip,
                shared.keys.made[half] + values.stage(count) * geometry.values_bytes + warp * transposed,
                geometry.tile_kv,
            )
            values.publish(count)
            loaded.release(count)
    return kept
