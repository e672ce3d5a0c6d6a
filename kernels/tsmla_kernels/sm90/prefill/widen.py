"""Role `widen_values` of the Hopper prefill: warps that turn each 8-bit value tile, as loaded, into float16."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...parts.hopper.widen import widen
from .storage import Shared
from .tasks import Tasks


@cute.jit
def widen_values(shared: Shared, warp: Int32, warps: cutlass.Constexpr, tasks: Tasks):
    """Widen the values of every tile that is visited from `shared.v` to `shared.values`, as warp `warp` of `warps`."""
    tiles = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tiles += tasks.work(task, tasks.tile(task)).tiles
    for count in cutlass.range(tiles, unroll=1):
        _widen_tile(shared, warp, warps, count)


@cute.jit
def _widen_tile(shared: Shared, warp: Int32, warps: cutlass.Constexpr, count: Int32):
    shared.v_edge.wait_full(count)
    shared.values_edge.wait_empty(count)
    source = shared.v[None, None, shared.v_edge.stage(count)]
    target = shared.values[None, None, shared.values_edge.stage(count)]
    widen(source, target, warp, warps)
    shared.values_edge.publish(count)
    shared.v_edge.release(count)
