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
    """`q`, `k` and `v` are (copy atom, one head's rows). V runs one tile behind K, in the order they are used.

    The first warpgroup's rows of Q and the first K come before the other rows: so it starts sooner, and softmax of one
    warpgroup falls together with products of another, not with its softmax."""
    groups = geometry.tile_q // 64
    q_shared, q_global = tma.tiles_of(q[0], q[1], (64, geometry.d_qk), shared.q)
    k_shared, k_global = tma.tiles_of(k[0], k[1], (geometry.tile_kv, geometry.d_qk), shared.k)
    v_shared, v_global = tma.tiles_of(v[0], v[1], (geometry.tile_kv, geometry.d_v), shared.v)
    if work.tiles > 0:
        for group in cutlass.range_constexpr(groups):
            barrier = shared.q_edge.announce(Int32(group))
            cute.copy(q[0], q_global[None, query_tile * groups + group], q_shared[None, group], tma_bar_ptr=barrier)
            if const_expr(group == 0):
                _copy(k[0], k_global, k_shared, shared.k_edge, Int32(0), work, shared.k_edge.announce(Int32(0)))
        for count in cutlass.range(1, work.tiles, unroll=1):
            _fill(k[0], k_global, k_shared, shared.k_edge, count, work)
            _fill(v[0], v_global, v_shared, shared.v_edge, count - 1, work)
        _fill(v[0], v_global, v_shared, shared.v_edge, work.tiles - 1, work)


@cute.jit
def _fill(atom, tiles: cute.Tensor, stages: cute.Tensor, edge, count: Int32, work: WorkRange):
    _copy(atom, tiles, stages, edge, count, work, edge.acquire(count))


@cute.jit
def _copy(
    atom, tiles: cute.Tensor, stages: cute.Tensor, edge, count: Int32, work: WorkRange, barrier: cute.Pointer
) -> None:
    cute.copy(atom, tiles[None, tile_at(work, count)], stages[None, edge.stage(count)], tma_bar_ptr=barrier)
