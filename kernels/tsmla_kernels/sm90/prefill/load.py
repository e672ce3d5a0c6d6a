"""Role `load` of the Hopper prefill: one warp that fills Q, and the K and V rings in the work ranges' order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...parts.division import quotient
from ...prefill import tma
from ...prefill.call import Copied
from ...prefill.tile_scheduler import QueryTile
from ...prefill.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .key_mask import KeyMask, seen_and_whole
from .storage import Shared
from .tasks import Tasks
from .visits import END, tell, visit_of


@cute.jit
def load(copied: Copied, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tasks: Tasks):
    """Load Q, K and V of all tasks."""
    filled = Int32(0)
    tiles_before = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tile = tasks.tile(task)
        work = tasks.work(tile)
        if work.tiles > 0:
            kv_head = quotient(tile.head, tasks.heads_per_kv_head)
            load_task(
                tuple((atom, tma.head_rows(piece, tile.head, tile.q)) for atom, piece in copied.q),
                tuple((atom, tma.head_rows(piece, kv_head, tile.kv)) for atom, piece in copied.k),
                (copied.v.atom, tma.clipped_head_rows(copied.v.view, kv_head, tile.kv)),
                shared,
                geometry,
                tile.tile,
                work,
                filled,
                tiles_before,
            )
            filled += 1
            tiles_before += work.tiles
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_masked(
    copied: Copied, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tasks: Tasks, mask: KeyMask
):
    """Load, of all tasks, Q and those tiles of K and V of which some row sees a key by the mask, and tell which."""
    filled = Int32(0)
    tiles_before = Int32(0)
    words = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tile = tasks.tile(task)
        work = tasks.work(tile)
        if work.tiles > 0:
            kv_head = quotient(tile.head, tasks.heads_per_kv_head)
            visited = load_seen_tiles(
                tuple((atom, tma.head_rows(piece, tile.head, tile.q)) for atom, piece in copied.q),
                tuple((atom, tma.head_rows(piece, kv_head, tile.kv)) for atom, piece in copied.k),
                (copied.v.atom, tma.clipped_head_rows(copied.v.view, kv_head, tile.kv)),
                shared,
                geometry,
                tile,
                work,
                mask,
                filled,
                tiles_before,
                words,
            )
            filled += cutlass.min(visited, 1)
            tiles_before += visited
            words += visited + 1
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_seen_tiles(
    q, k, v, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], tile: QueryTile, work: WorkRange,
    mask: KeyMask, filled: Int32, tiles_before: Int32, words: Int32,
) -> Int32:  # fmt: skip
    """Load Q of one task, if any tile is visited, and K and V of these tiles, V one tile behind K. Return how many they
    are. `words` were told of earlier tasks' tiles; others as `load_task` has them."""
    groups = geometry.tile_q // 64
    q_boxes = _boxes(q, shared.q, (64, geometry.box_columns))
    k_boxes = _boxes(k, shared.k, (geometry.tile_kv, geometry.box_columns))
    v_box = ((v[0], *tma.tiles_of(v[0], v[1], (geometry.tile_kv, geometry.d_v), shared.v)),)
    visited, last = Int32(0), Int32(0)
    for index in cutlass.range(work.tiles, unroll=1):
        number = tile_at(work, index)
        seen, whole = seen_and_whole(mask, geometry, tile.q, tile.tile, number)
        if seen:
            count = tiles_before + visited
            tell(shared.visits, words + visited, visit_of(number, (index < work.masked) | ~whole))
            if visited == 0:
                for group in cutlass.range_constexpr(groups):
                    barrier = shared.q_edge.acquire(filled * groups + group)
                    for atom, stages, tiles in q_boxes:
                        cute.copy(
                            atom, tiles[None, tile.tile * groups + group], stages[None, group], tma_bar_ptr=barrier
                        )
            _fill_tile(k_boxes, shared.k_edge, count, number)
            if visited > 0:
                _fill_tile(v_box, shared.v_edge, count - 1, last)
            last = number
            visited += 1
    if visited > 0:
        _fill_tile(v_box, shared.v_edge, tiles_before + visited - 1, last)
    tell(shared.visits, words + visited, Int32(END))
    return visited


@cute.jit
def load_task(
    q, k, v, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, work: WorkRange,
    filled: Int32, tiles_before: Int32,
):  # fmt: skip
    """Load Q, K and V of one task. `q` and `k` are tuples of pieces; each piece, and `v`, is (copy atom, one head's
    rows). V runs one tile behind K, in the order they are used. Q has been `filled` so often before, and `tiles_before`
    tiles of K and V have been loaded.

    The first warpgroup's rows of Q and the first two K come before the other rows: this warpgroup starts sooner, and
    softmax of one warpgroup falls together with products of another, not with its softmax. Where it `starts_early`, the
    first K comes before all rows of Q, whose place is released later, and the first V, to be transposed, before the
    second K."""
    groups = geometry.tile_q // 64
    early = geometry.policy.starts_early
    q_boxes = _boxes(q, shared.q, (64, geometry.box_columns))
    k_boxes = _boxes(k, shared.k, (geometry.tile_kv, geometry.box_columns))
    v_box = ((v[0], *tma.tiles_of(v[0], v[1], (geometry.tile_kv, geometry.d_v), shared.v)),)
    if const_expr(early):
        _fill(k_boxes, shared.k_edge, tiles_before, Int32(0), work)
    for group in cutlass.range_constexpr(groups):
        barrier = shared.q_edge.acquire(filled * groups + group)
        for atom, stages, tiles in q_boxes:
            cute.copy(atom, tiles[None, query_tile * groups + group], stages[None, group], tma_bar_ptr=barrier)
        if const_expr(group == 0):
            if const_expr(early):
                _fill(v_box, shared.v_edge, tiles_before, Int32(0), work)
            else:
                _fill(k_boxes, shared.k_edge, tiles_before, Int32(0), work)
            if work.tiles > 1:
                _fill(k_boxes, shared.k_edge, tiles_before, Int32(1), work)
    if const_expr(not early):
        if work.tiles > 1:
            _fill(v_box, shared.v_edge, tiles_before, Int32(0), work)
    for count in cutlass.range(2, work.tiles, unroll=1):
        _fill(k_boxes, shared.k_edge, tiles_before, count, work)
        _fill(v_box, shared.v_edge, tiles_before, count - 1, work)
    if const_expr(early):
        if work.tiles > 1:
            _fill(v_box, shared.v_edge, tiles_before, work.tiles - 1, work)
    else:
        _fill(v_box, shared.v_edge, tiles_before, work.tiles - 1, work)


def _boxes(pieces: tuple, shared: cute.Tensor, shape: tuple[int, int]) -> tuple:
    """For each box of a tile: the copy atom, the box in all stages of `shared`, and the pieces' tiles."""
    stages = cute.size(shared, mode=[2])
    boxes = enumerate(tma.boxes(pieces, shape[1]))
    return tuple(
        (atom, *tma.tiles_of(atom, rows, shape, cute.local_tile(shared, (*shape, stages), (0, number, 0)), box))
        for number, (atom, rows, box) in boxes
    )


@cute.jit
def _fill(boxes, edge, tiles_before: Int32, count: Int32, work: WorkRange):
    """Load the tile that a task visits as number `count`. Its number in the sequence is found behind the wait, where
    kernels were timed with it."""
    barrier = edge.acquire(tiles_before + count)
    for atom, stages, tiles in boxes:
        cute.copy(
            atom, tiles[None, tile_at(work, count)], stages[None, edge.stage(tiles_before + count)], tma_bar_ptr=barrier
        )


@cute.jit
def _fill_tile(boxes, edge, count: Int32, number: Int32):
    """Load tile `number` of the sequence as number `count` of all that the CTA loads."""
    barrier = edge.acquire(count)
    for atom, stages, tiles in boxes:
        cute.copy(atom, tiles[None, number], stages[None, edge.stage(count)], tma_bar_ptr=barrier)
