"""Widening values to float16: warps do it with each tile of 8-bit rows that have a scale each, as it was loaded."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .....limits import WARPGROUP
from .....parts.hopper.widen import PATTERN_BYTES, widen_patterns
from ...work.task import Task, for_each_task
from ..geometry import PATTERN_COLUMNS, DecodeGeometry
from ..storage import Shared


@cute.jit
def widen_values(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry]) -> None:
    """Widen the values of every task."""
    for_each_task(shared.dealt, functools.partial(_widen_task, shared, geometry), Int32(0))


@cute.jit
def _widen_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], number: Int32, task: Task, kept: Int32
) -> Int32:
    """Widen all blocks of every tile of a task, by one warpgroup. A warp takes a quarter of the keys."""
    warps = WARPGROUP // 32
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % warps
    values, blocks, patterns = shared.edges.values[0], geometry.value_blocks, geometry.d_strip // PATTERN_COLUMNS
    in_block = geometry.value_columns // PATTERN_COLUMNS
    for index in cutlass.range(task.tiles, unroll=1):
        count = task.first_count + index
        for block in cutlass.range_constexpr(blocks):
            strip, first = divmod(block * in_block, patterns)
            loaded = shared.edges.kv[strip]
            if const_expr(first == 0):
                loaded.wait_full(count)
            number_of_block = count * blocks + block
            values.wait_empty(number_of_block)
            own = warp * (geometry.tile_kv // warps)
            widen_patterns(
                shared.keys.strips[0].element_type,
                shared.keys.loaded[strip]
                + (loaded.stage(count) * geometry.strip_bytes[strip] + own * geometry.d_strip + first * PATTERN_BYTES),
                geometry.d_strip,
                shared.keys.made[0]
                + (values.stage(number_of_block) * geometry.values_bytes + own * 2 * geometry.value_columns),
                in_block,
                geometry.tile_kv // warps,
            )
            values.publish(number_of_block)
            if const_expr(first + in_block == patterns):
                loaded.release(count)
    return kept
