"""Role `transpose` of the Hopper prefill: warps that turn each 8-bit value tile, as loaded, into keys contiguous."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...parts.hopper.transpose import transpose
from .storage import Shared
from .tasks import Tasks


@cute.jit
def transpose_values(shared: Shared, part: Int32, parts: cutlass.Constexpr, tasks: Tasks):
    """Transpose the values of every tile that is visited from `shared.v` to `shared.values`: warp `part` of `parts` all
    dims of 32 keys of each."""
    assert cute.size(shared.v, mode=[0]) == 32 * parts, parts
    tiles = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tiles += tasks.work(task, tasks.tile(task)).tiles
    for count in cutlass.range(tiles, unroll=1):
        _transpose_tile(shared, part, count)


@cute.jit
def _transpose_tile(shared: Shared, part: Int32, count: Int32):
    shared.v_edge.wait_full(count)
    shared.values_edge.wait_empty(count)
    source = shared.v[None, None, shared.v_edge.stage(count)]
    target = shared.values[None, None, shared.values_edge.stage(count)]
    transpose(source, target, part, 1)
    shared.values_edge.publish(count)
    shared.v_edge.release(count)
