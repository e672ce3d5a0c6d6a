"""Role `load` of the Hopper prefill: one warp that fills Q once, and the K and V rings in the work range's order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...parts import tma
from ...parts.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .storage import Shared


@cute.jit
def load(
    q, k, v, shared: Shared, geometry: cutlass.Constexpr[PrefillGeometry], query_tile: Int32, work: WorkRange
):
    """`q` and `k` are pieces, each, as `v`, (copy atom, one head's rows). V runs one tile behind K, in the order they
    are used.

    The first warpgroup's rows of Q and the first K come before the other rows: so it starts sooner, and softmax of one
    warpgroup falls together with products of another, not with its softmax."""
    groups = geometry.tile_q // 64
    q_boxes = _boxes(q, shared.q, (64, geometry.box_columns))
    k_boxes = _boxes(k, shared.k, (geometry.tile_kv, geometry.box_columns))
    v_box = ((v[0], *tma.tiles_of(v[0], v[1], (geometry.tile_kv, geometry.d_v), shared.v)),)
    if work.tiles > 0:
        for group in cutlass.range_constexpr(groups):
            barrier = shared.q_edge.announce(Int32(group))
            for atom, stages, tiles in q_boxes:
                cute.copy(atom, tiles[None, query_tile * groups + group], stages[None, group], tma_bar_ptr=barrier)
            if const_expr(group == 0):
                _copy(k_boxes, shared.k_edge, Int32(0), work, shared.k_edge.announce(Int32(0)))
        for count in cutlass.range(1, work.tiles, unroll=1):
            _fill(k_boxes, shared.k_edge, count, work)
            _fill(v_box, shared.v_edge, count - 1, work)
        _fill(v_box, shared.v_edge, work.tiles - 1, work)


def _boxes(pieces: tuple, shared: cute.Tensor, shape: tuple[int, int]) -> tuple:
    """For each box of a tile: the copy atom, the box in all stages of `shared`, and the pieces' tiles."""
    stages = cute.size(shared, mode=[2])
    boxes = enumerate(tma.boxes(pieces, shape[1]))
    return tuple(
        (atom, *tma.tiles_of(atom, rows, shape, cute.local_tile(shared, (*shape, stages), (0, number, 0)), box))
        for number, (atom, rows, box) in boxes
    )


@cute.jit
def _fill(boxes, edge, count: Int32, work: WorkRange):
    _copy(boxes, edge, count, work, edge.acquire(count))


@cute.jit
def _copy(boxes, edge, count: Int32, work: WorkRange, barrier: cute.Pointer) -> None:
    for atom, stages, tiles in boxes:
        cute.copy(atom, tiles[None, tile_at(work, count)], stages[None, edge.stage(count)], tma_bar_ptr=barrier)
