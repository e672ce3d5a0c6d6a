"""Role `load` of the Hopper prefill: one warp that fills Q, and the K and V rings in the work ranges' order."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...parts.division import quotient
from ...prefill import tma
from ...prefill.call import Copied, rows_of
from ...prefill.tile_scheduler import QueryTile
from ...prefill.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .key_mask import KeyMask, seen_and_whole
from .storage import Shared
from .tasks import Tasks
from .visits import END, tell, visit_of


class TaskBoxes(NamedTuple):
    """What a task's copies take and fill: for each box of a tile of queries, of keys and of values the copy atom, the
    box in all stages in shared memory, and the tiles of the head's rows."""

    q: tuple
    k: tuple
    v: tuple


@cute.jit
def load(
    copied: Copied,
    shared: Shared,
    geometry: cutlass.Constexpr[PrefillGeometry],
    tasks: Tasks,
    mask: KeyMask | None,
):
    """Load Q, K and V of all tasks; with a key mask, those of tiles of which some row sees a key, and tell which."""
    filled = Int32(0)
    tiles_before = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tile = tasks.tile(task)
        work = tasks.work(tile)
        if work.tiles > 0:
            q, k, v = rows_of(copied, tile, quotient(tile.head, tasks.heads_per_kv_head))
            boxes = TaskBoxes(
                q=_boxes(q, shared.q, (64, geometry.box_columns)),
                k=_boxes(k, shared.k, (geometry.tile_kv, geometry.box_columns)),
                v=((v[0], *tma.tiles_of(*v, (geometry.tile_kv, geometry.d_v), shared.v)),),
            )
            loaded = work.tiles
            if const_expr(mask is None):
                load_task(boxes, shared, geometry, tile.tile, work, filled, tiles_before)
            else:
                loaded = load_seen_tiles(boxes, shared, geometry, tile, work, mask, filled, tiles_before, task)
            filled += cutlass.min(loaded, 1)
            tiles_before += loaded
        if const_expr(mask is not None):
            tell(shared.visits, tiles_before + task, Int32(END))
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_seen_tiles(
    boxes: TaskBoxes, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tile: QueryTile, work: WorkRange,
    mask: KeyMask, filled: Int32, tiles_before: Int32, task: Int32,
) -> Int32:  # fmt: skip
    """Load, with a key mask, Q of one task, if any tile is visited, and K and V of these tiles. Return how many they
    are. `task` is the task's number; others as `load_task` has them."""
    count, last = tiles_before, Int32(0)
    for index in cutlass.range(work.tiles, unroll=1):
        number = tile_at(work, index)
        seen, whole = seen_and_whole(mask, geometry, tile.q, tile.tile, number)
        if seen:
            tell(shared.visits, count + task, visit_of(number, (index < work.masked) | ~whole))
            if count == tiles_before:
                for group in cutlass.range_constexpr(geometry.tile_q // 64):
                    _fill_query(boxes.q, shared, geometry, tile.tile, filled, group)
            _fill(boxes.k, shared.k_edge, count, number)
            if count > tiles_before:
                _fill(boxes.v, shared.v_edge, count - 1, last)
            last = number
            count += 1
    if count > tiles_before:
        _fill(boxes.v, shared.v_edge, count - 1, last)
    return count - tiles_before


@cute.jit
def load_task(
    boxes: TaskBoxes, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, work: WorkRange,
    filled: Int32, tiles_before: Int32,
):  # fmt: skip
    """Load Q, K and V of one task. V runs one tile behind K, in the order they are used. Q has been `filled` so often
    before, and `tiles_before` tiles of K and V have been loaded.

    The first warpgroup's rows of Q and the first two K come before the other rows: this warpgroup starts sooner, and
    softmax of one warpgroup falls together with products of another, not with its softmax. Where it `starts_early`, the
    first K comes before all rows of Q, whose place is released later, and the first V, to be transposed, before the
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
def _fill(boxes, edge, count: Int32, number: Int32, work: WorkRange | None = None):
    """Load tile `number` of the sequence, or, if `work` is given, the tile that it visits as number `number`, as number
    `count` of all that the CTA loads. The tile of `work` is found behind the wait, where kernels were timed with it."""
    barrier = edge.acquire(count)
    if const_expr(work is not None):
        number = tile_at(work, number)
    for atom, stages, tiles in boxes:
        cute.copy(atom, tiles[None, number], stages[None, edge.stage(count)], tma_bar_ptr=barrier)
