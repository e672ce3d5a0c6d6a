"""Role `clean` of the Hopper decode: one warp that wipes keys that no row may see."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....parts.alignment import wipe_vector
from ....parts.division import Divisor, quotient, remainder
from ....parts.keys.source import BOX_KEYS
from ....parts.keys.visible import Viewers, Visibility, hides, seen_by_any, viewers_of
from ..work.task import Task, border_tile, count_over_tasks
from .geometry import GROUP_ROWS, DecodeGeometry
from .storage import Shared


@cute.jit
def clean(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility, heads: Divisor) -> None:
    """Clean the border tiles of every task."""
    count_over_tasks(shared.dealt, functools.partial(_clean_task, shared, geometry, view, heads))


@cute.jit
def _clean_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility, heads: Divisor, number: Int32,
    task: Task, borders: Int32,
) -> Int32:  # fmt: skip
    """Write zeros over the keys of a task's border tiles that no row may see, so that a probability of 0 times such a
    row is 0; by one warp. Without `visible`, only the first and the last tile of a task can be border tiles. Returns
    the number of border tiles so far, `borders` of which came before."""
    lane = cute.arch.lane_idx()
    hidden = hides(view)
    viewers = viewers_of(view, task, heads)
    visits, step = cutlass.min(task.tiles, 2), task.tiles - 1
    if hidden:
        visits, step = task.tiles, Int32(1)
    for visit in cutlass.range(visits, unroll=1):
        index = visit * step
        if border_tile(task, task.first_tile + index, geometry.tile_kv) | hidden:
            clean_tile(shared, geometry, task, viewers, index, borders, lane)
            borders += 1
    return borders


@cute.jit
def clean_tile(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    task: Task,
    viewers: Viewers,
    index: Int32,
    borders: Int32,
    lane: Int32,
) -> None:
    """Wipe what no row may see of tile `index` of the task, once its copies have landed, and hand its strips over."""
    stages = Int32(geometry.stages)
    count = task.first_count + index
    shared.edges.landed.wait_full(remainder(borders, stages), quotient(borders, stages))
    first_key = (task.first_tile + index) * geometry.tile_kv
    stage = shared.edges.kv[0].stage(count)
    for start in cutlass.range(0, geometry.tile_kv, 32, unroll=1):
        key = first_key + start + lane
        seen = seen_by_any(viewers, key)
        # Boxes without a key that counts have been copied from where everything is zero.
        copied = ((key | (BOX_KEYS - 1)) >= task.first_key) & ((key & -BOX_KEYS) < task.end_key)
        rows = cute.arch.vote_ballot_sync(copied & (not seen))
        if const_expr(geometry.scaled):
            _wipe_rows(shared.keys.vectors[: geometry.latent_strips], stage, start, rows, lane)
            _wipe_rows(shared.keys.vectors[geometry.latent_strips :], stage, start, rows, lane)
        else:
            _wipe_rows(shared.keys.vectors, stage, start, rows, lane)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    for strip in cutlass.range_constexpr(geometry.latent_strips):
        shared.edges.kv[strip].hand_over(count)


@cute.jit
def _wipe_rows(strips, stage: Int32, start: Int32, rows: Int32, lane: Int32) -> None:
    """Zero the rows from `start` on whose bit is set in `rows`, in strips whose rows have equally many vectors."""
    at_once = 32 // cute.size(strips[0], mode=[2])
    while rows != 0:
        first = cute.arch.popc((rows & -rows) - 1) // at_once * at_once
        _wipe(strips, stage, start + first, rows >> first, lane)
        rows &= ~(((1 << at_once) - 1) << first)


@cute.jit
def _wipe(strips, stage: Int32, first: Int32, rows: Int32, lane: Int32) -> None:
    """Zero those rows of a stage from row `first` on whose bit is set in `rows`; as many rows as lanes have one 16-byte
    vector of each. `strips` are `Layouts.vectors`."""
    line = cute.size(strips[0], mode=[2])
    row = first + lane // line
    if rows >> (lane // line) & 1 != 0:
        for strip in cutlass.range_constexpr(len(strips)):
            for pattern in cutlass.range_constexpr(cute.size(strips[strip], mode=[3])):
                place = strips[strip][None, row % GROUP_ROWS, lane % line, pattern, row // GROUP_ROWS, stage]
                wipe_vector(place)
