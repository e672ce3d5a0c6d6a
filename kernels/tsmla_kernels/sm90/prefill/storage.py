"""What lies where in a CTA's shared memory of the Hopper prefill, and who waits for whom there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float16, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of

from ...limits import swizzle_bytes
from ...parts.hopper.storage import BARRIER_BYTES
from ...parts.pipeline import Barriers, TmaEdge, WarpEdge
from .geometry import PrefillGeometry
from .schedule import PrefillSchedule

_SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


class Layouts(NamedTuple):
    """Layouts of tiles in shared memory. `q_box` and `k_box` are what one copy of a tile moves, some columns of its
    rows; `values` are V's tiles, widened to float16."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    q_box: cute.ComposedLayout
    k_box: cute.ComposedLayout
    v: cute.ComposedLayout
    values: cute.ComposedLayout | None


class Shared(NamedTuple):
    """Tiles as (rows, dim, stage or warpgroup) and the edges that fill them.

    `values` are V's tiles as (dim, rows, stage): copies in float16 when V has 8 bits, else `v` itself, on its edge.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    values: cute.Tensor
    q_edge: TmaEdge
    k_edge: TmaEdge
    v_edge: TmaEdge
    values_edge: TmaEdge | WarpEdge


def layouts_of(geometry: PrefillGeometry, groups: int, dtype: type[Numeric]) -> Layouts:
    """Swizzled tiles, innermost dimension contiguous, last mode the stage (or the warpgroup)."""

    def tile(rows, dim, swizzled=None, dtype=dtype):
        span = swizzle_bytes(bytes_of(dtype.width, swizzled or dim))
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(_SWIZZLES[span], dtype), (rows, dim), order=(0, 1))

    def repeated(layout, count, stride):
        steps = cute.make_layout(count, stride=stride)
        return cute.make_composed_layout(layout.inner, layout.offset, cute.append(layout.outer, steps))

    tile_kv, d_qk, d_v, stages = geometry.tile_kv, geometry.d_qk, geometry.d_v, geometry.stages
    box, wide = geometry.box_columns, geometry.wide_stages
    return Layouts(
        q=repeated(tile(64, d_qk, box), groups, 64 * d_qk),
        k=repeated(tile(tile_kv, d_qk, box), stages, tile_kv * d_qk),
        q_box=tile(64, box),
        k_box=tile(tile_kv, box),
        v=repeated(tile(tile_kv, d_v), stages, tile_kv * d_v),
        values=repeated(tile(tile_kv, d_v, dtype=Float16), wide, tile_kv * d_v) if wide else None,
    )


def shared_of(
    schedule: PrefillSchedule,
    layouts: Layouts,
    dtype: type[Numeric],
    base: cute.Pointer,
    barriers: Barriers,
) -> Shared:
    """Carve up shared memory from `base` on: barriers, Q, K ring, V ring, and the ring of widened values."""
    geometry = schedule.geometry

    def tensor(offset, layout, element):
        pointer = cute.recast_ptr(base + offset, layout.inner, element)
        return cute.make_tensor(pointer, layout.outer)

    k_offset = BARRIER_BYTES + geometry.q_bytes
    v_offset = k_offset + geometry.stages * geometry.k_bytes
    v = tensor(v_offset, layouts.v, dtype)
    v_edge = barriers.edge("v", TmaEdge)
    multiplied, values_edge = v, v_edge
    if const_expr(geometry.widens_values):
        multiplied = tensor(v_offset + geometry.stages * geometry.v_bytes, layouts.values, Float16)
        values_edge = barriers.edge("values", WarpEdge)
    values = cute.make_tensor(multiplied.iterator, cute.select(multiplied.layout, mode=[1, 0, 2]))
    return Shared(
        q=tensor(BARRIER_BYTES, layouts.q, dtype),
        k=tensor(k_offset, layouts.k, dtype),
        v=v,
        values=values,
        q_edge=barriers.edge("q", TmaEdge),
        k_edge=barriers.edge("k", TmaEdge),
        v_edge=v_edge,
        values_edge=values_edge,
    )
