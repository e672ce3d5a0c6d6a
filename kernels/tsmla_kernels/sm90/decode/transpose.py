"""Role `transpose` of the Hopper decode: warps that turn each 8-bit value tile, as loaded, into keys contiguous."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...limits import WARPGROUP
from ...parts.hopper.transpose import transpose_pattern
from .geometry import GROUP_ROWS, PATTERN_COLUMNS, DecodeGeometry
from .storage import Shared
from .task import Task


@cute.jit
def transpose_values(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], task: Task) -> None:
    """Transpose both halves of every tile of a task, by one warpgroup. A warp takes 64 dims of either half."""
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % (WARPGROUP // 32)
    for index in cutlass.range(task.tiles, unroll=1):
        count = task.first_count + index
        pattern, transposed = GROUP_ROWS * PATTERN_COLUMNS, PATTERN_COLUMNS * geometry.tile_kv
        for half in cutlass.range_constexpr(2):
            loaded, values = shared.kv_edges[half], shared.v_edges[half]
            loaded.wait_full(count)
            values.wait_empty(count)
            transpose_pattern(
                shared.values[0].element_type,
                shared.loaded[half] + loaded.stage(count) * geometry.strip_bytes[half] + warp * pattern,
                GROUP_ROWS * geometry.d_strip,
                shared.transposed[half] + values.stage(count) * geometry.values_bytes + warp * transposed,
                geometry.tile_kv,
            )
            values.publish(count)
            loaded.release(count)
