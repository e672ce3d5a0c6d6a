"""The beginning of a task for threads that score: which keys its rows see, their scales, the state of its sums."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ....decode.results import Results
from ....limits import WARPGROUP
from ....parts.division import Divisor, quotient
from ....parts.hopper import mma
from ....parts.hopper.fragment import rows_columns
from ....parts.hopper.lazy_softmax import NO_ROW, lowest_reference
from ....parts.keys.scales import RowScales
from ....parts.keys.visible import Visibility, VisibleKeys, keys_of_row, seen_by_all, seen_by_both
from ....parts.logarithm import LOG2_E
from ....parts.warp import QUAD
from ..work.task import Task
from .geometry import DecodeGeometry
from .scaling import query_scales_of, scaling_of
from .state import DecodeState, Place, RowStates
from .storage import Shared


class Attending(NamedTuple):
    """What warpgroups that score or attend need of a call."""

    products: object
    view: Visibility
    heads: Divisor
    results: Results
    softmax_scale: Float32
    scales: RowScales | None


@cute.jit
def begin(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending, mine: Int32 | int, task: Task
) -> DecodeState:
    """Begin a task as a warpgroup that scores, number `mine` of such: without outputs."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    products, view, heads, _, softmax_scale, scales = attending
    mma_qk, mma_rope, mma_pv = products
    if const_expr(mma_rope is None):
        mma_rope = mma_qk
    qk, rope, pv = (product.get_slice(0) for product in (mma_qk, mma_rope, mma_pv))
    of_strip = (*(qk for _ in range(geometry.latent_strips)), *(rope for _ in geometry.behind_latent))
    coordinates = rows_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((64, geometry.tile_kv))))
    rows = cute.size(coordinates, mode=[0])
    query_scales = None
    if const_expr(scales is not None):
        query_scales = query_scales_of(scales.queries, task, heads, coordinates)  # on their way while the rest begins
    reference, total, rescale = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
    row_keys = shared.exchange.row_keys[None, None, mine]
    scale_log2 = softmax_scale * LOG2_E if const_expr(scales is None) else Float32(1.0)
    reference.fill(lowest_reference(scale_log2))
    total.fill(0.0)
    all_keys = _tell_keys(view, task, heads, coordinates, reference, row_keys)
    scaling = None
    if const_expr(scales is not None):
        scaling = scaling_of(query_scales, softmax_scale * LOG2_E)
    cute.arch.sync_warp()  # all four lanes of a quad read what its first has written
    operands = mma.Operands(
        qk_op=mma_qk.op,
        pv_op=mma_pv.op,
        q=tuple(x.make_fragment_A(x.partition_A(rows)) for x, rows in zip(of_strip, shared.query.strips, strict=True)),
        k=tuple(x.make_fragment_B(x.partition_B(rows)) for x, rows in zip(of_strip, shared.keys.strips, strict=True)),
        v=tuple(pv.make_fragment_B(pv.partition_B(values)) for values in shared.keys.values),
        scores_shape=mma_qk.partition_shape_C((64, geometry.tile_kv)),
    )
    return DecodeState(
        operands=operands,
        rope_op=mma_rope.op,
        multiplying=None,
        rows=RowStates(reference, total, rescale),
        place=Place(
            coordinates,
            thread,
            quad_lane=thread % QUAD,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32),
        ),
        row_keys=row_keys,
        all_keys=seen_by_all(all_keys),
        shared=shared,
        first_count=task.first_count,
        first_tile=task.first_tile,
        scale_log2=scale_log2,
        scaling=scaling,
        geometry=geometry,
    )


@cute.jit
def _tell_keys(
    view: Visibility, task: Task, heads: Divisor, coordinates: cute.Tensor, reference: cute.Tensor,
    row_keys: cute.Tensor,
) -> VisibleKeys:  # fmt: skip
    """Tell the other lanes of each quad which keys its rows see, and give rows that the task does not have a reference
    of their own. Returns the keys that all rows of this thread see."""
    leader = coordinates[0, 0][1] == 0
    all_keys = VisibleKeys.everything()
    for row in cutlass.range_constexpr(cute.size(reference)):
        position = coordinates[row, 0][0]
        keys = VisibleKeys.everything()
        if position < task.rows:
            keys = keys_of_row(view, task.request, task.end_token, quotient(task.first_row + position, heads))
        else:
            reference[row] = NO_ROW
        if leader:
            row_keys[0, position] = keys.first
            row_keys[1, position] = keys.end
        all_keys = seen_by_both(all_keys, keys)
    return all_keys
