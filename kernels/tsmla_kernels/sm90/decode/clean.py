"""Role `clean` of the Hopper decode: one warp that wipes what no row may see."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...parts.division import Divisor, quotient, remainder
from ...parts.key_source import BOX_KEYS
from ...parts.visible import Visibility, hides, seen_by_any, viewers_of
from .geometry import GROUP_ROWS, DecodeGeometry
from .storage import Shared
from .task import Task, edge_tile


@cute.jit
def clean(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    task: Task,
    view: Visibility,
    heads: Divisor,
    edges: Int32,
) -> Int32:
    """One warp. Writes zeros over the rows of edge tiles that no row may see, so that a probability of 0 times such a
    row is 0. Returns how many edge tiles it has seen so far. Without `visible`, only the first and the last tile of a
    task can be one."""
    lane = cute.arch.lane_idx()
    stages = Int32(geometry.stages)
    at_once = 32 // cute.size(shared.vectors[0], mode=[2])
    hidden = hides(view)
    viewers = viewers_of(view, task, heads)
    visits, step = cutlass.min(task.tiles, 2), task.tiles - 1
    if hidden:
        visits, step = task.tiles, Int32(1)
    for visit in cutlass.range(visits, unroll=1):
        index = visit * step
        tile = task.first_tile + index
        if edge_tile(task, tile, geometry.tile_kv) | hidden:
            count = task.first_count + index
            shared.landed.wait_full(remainder(edges, stages), quotient(edges, stages))
            first_key = tile * geometry.tile_kv
            stage = shared.kv_edges[0].stage(count)
            for start in cutlass.range(0, geometry.tile_kv, 32, unroll=1):
                key = first_key + start + lane
                seen = seen_by_any(viewers, key)
                # Boxes without a key that counts have been copied from where everything is zero.
                copied = ((key | (BOX_KEYS - 1)) >= task.first_key) & ((key & -BOX_KEYS) < task.end_key)
                rows = cute.arch.vote_ballot_sync(copied & (not seen))
                while rows != 0:
                    first = cute.arch.popc((rows & -rows) - 1) // at_once * at_once
                    _wipe(shared.vectors, stage, start + first, rows >> first, lane)
                    rows &= ~(((1 << at_once) - 1) << first)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            for strip in cutlass.range_constexpr(geometry.latent_strips):
                shared.kv_edges[strip].hand_over(count)
            edges += 1
    return edges


@cute.jit
def _wipe(strips, stage: Int32, first: Int32, rows: Int32, lane: Int32) -> None:
    """Zero those rows of a stage from row `first` on whose bit is set in `rows`, as many as lanes have a 16-byte vector
    of one line each; `strips` are Layouts.vectors."""
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    line = cute.size(strips[0], mode=[2])
    row = first + lane // line
    if rows >> (lane // line) & 1 != 0:
        for strip in cutlass.range_constexpr(len(strips)):
            for pattern in cutlass.range_constexpr(cute.size(strips[strip], mode=[3])):
                place = strips[strip][None, row % GROUP_ROWS, lane % line, pattern, row // GROUP_ROWS, stage]
                cute.autovec_copy(zeros, place)
