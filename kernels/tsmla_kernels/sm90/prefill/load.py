"""Role `load` of the Hopper prefill: one warp that fills Q, and the K and V rings in the work ranges' order."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...parts.division import quotient
from ...prefill import tma
from ...prefill.call import Copied, rows_of
from ...prefill.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .storage import Shared
from .tasks import Tasks


class TaskBoxes(NamedTuple):
    """What a task's copies take and fill: for each box of a tile of queries, of keys and of values the copy atom, the
    box in all stages in shared memory, and the tiles of the head's rows."""

    q: tuple
    k: tuple
    v: tuple


@cute.jit
def load(copied: Copied, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tasks: Tasks):
    """Load Q, K and V of all tasks."""
    filled = Int32(0)
    tiles_before = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tile = tasks.tile(task)
        work = tasks.work(task, tile)
        if work.tiles > 0:
            q, k, v = rows_of(copied, tile, quotient(tile.head, tasks.heads_per_kv_head))
            boxes = TaskBoxes(
                q=_boxes(q, shared.q, (64, geometry.box_columns)),
                k=_boxes(k, shared.k, (geometry.tile_kv, geometry.box_columns)),
                v=((v[0], *tma.tiles_of(*v, (geometry.tile_kv, geometry.d_v), shared.v)),),
            )
            load_task(boxes, shared, geometry, tile.tile, work, filled, tiles_before)
            filled += 1
            tiles_before += work.tiles
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_task(
    boxes: TaskBoxes, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, work: WorkRange,
    filled: Int32, tiles_before: Int32,
):  # fmt: skip
    """Load Q, K and V of one task. V runs one tile behind K, in the order they are used. Q has been `filled` so often
    before, and `tiles_before` tiles of K and V have been loaded.

    The first warpgroup's rows of Q and the first two K come before the other rows: this warpgroup starts sooner, and
    softmax of one warpgroup falls together with products of another, not with its softmax. Where it `starts_early`, the
    first K comes before all rows of Q, whose place is released later, and the first V, to be widened, before the
    second K."""
    early = geometry.policy.starts_early
    if const_expr(early):
        _fill(boxes.k, shared.k_edge, tiles_before, Int32(0), work)
    for group in cutlass.range_constexpr(geometry.tile_q // 64):
        _fill_query(boxes.q, shared, geometry, query_tile, filled, group)
        if const_expr(group == 0):
            if const_expr(early):
                _fill(boxes.v, shared.v_edge, tiles_before, Int32(0), work)
            else:
                _fill(boxes.k, shared.k_edge, tiles_before, Int32(0), work)
            if work.tiles > 1:
                _fill(boxes.k, shared.k_edge, tiles_before + 1, Int32(1), work)
    if const_expr(not early):
        if work.tiles > 1:
            _fill(boxes.v, shared.v_edge, tiles_before, Int32(0), work)
    for index in cutlass.range(2, work.tiles, unroll=1):
        _fill(boxes.k, shared.k_edge, tiles_before + index, index, work)
        _fill(boxes.v, shared.v_edge, tiles_before + (index - 1), index - 1, work)
    if const_expr(early):
        if work.tiles > 1:
            _fill(boxes.v, shared.v_edge, tiles_before + (work.tiles - 1), work.tiles - 1, work)
    else:
        _fill(boxes.v, shared.v_edge, tiles_before + (work.tiles - 1), work.tiles - 1, work)


def _boxes(pieces: tuple, shared: cute.Tensor, shape: tuple[int, int]) -> tuple:
    """For each box of a tile: the copy atom, the box in all stages of `shared`, and the pieces' tiles."""
    stages = cute.size(shared, mode=[2])
    boxes = enumerate(tma.boxes(pieces, shape[1]))
    return tuple(
        (atom, *tma.tiles_of(atom, rows, shape, cute.local_tile(shared, (*shape, stages), (0, number, 0)), box))
        for number, (atom, rows, box) in boxes
    )


@cute.jit
def _fill_query(
    boxes: tuple, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, filled: Int32,
    group: cutlass.Constexpr[int],
):  # fmt: skip
    """Load the rows of a query tile that warpgroup `group` attends."""
    groups = geometry.tile_q // 64
    barrier = shared.q_edge.acquire(filled * groups + group)
    for atom, stages, tiles in boxes:
        cute.copy(atom, tiles[None, query_tile * groups + group], stages[None, group], tma_bar_ptr=barrier)


@cute.jit
def _fill(boxes, edge, count: Int32, index: Int32, work: WorkRange):
    """Load the tile that a task visits as number `index`, as number `count` of all that the CTA loads. Its number in
    the sequence is computed behind the wait, where kernels were timed with it, but read before."""
    number = tile_at(work, index) if const_expr(work.listed is not None) else None
    barrier = edge.acquire(count)
    if const_expr(work.listed is None):
        number = tile_at(work, index)
    for atom, stages, tiles in boxes:
        cute.copy(atom, tiles[None, number], stages[None, edge.stage(count)], tma_bar_ptr=barrier)
