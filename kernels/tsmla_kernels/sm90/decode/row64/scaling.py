"""Scores and sums of rows with a scale each (`parts/keys/scales`): what threads that score do with the scales."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....parts.alignment import aligned
from ....parts.division import Divisor
from ....parts.keys.scales import query_scale
from ....parts.warp import QUAD
from ..work.ring import TASK_RING
from ..work.task import Task


class Scaling(NamedTuple):
    """What rows need besides where they have scales; scores are then exponents as soon as their product is done, so
    that `scale_log2` is 1.

    factors: what a query row's products with stored keys are multiplied by, but for the keys' scales. totals: the sums
    of rows' exponentials; `RowStates.total` are those of their shares of the output."""

    factors: cute.Tensor
    totals: cute.Tensor


@cute.jit
def query_scales_of(queries: cute.Tensor, task: Task, heads: Divisor, coordinates: cute.Tensor) -> cute.Tensor:
    """The scales of this thread's query rows. Rows that the task does not have get another's: a branch would make the
    loads wait."""
    rows = cute.size(coordinates, mode=[0])
    found = cute.make_rmem_tensor(rows, Float32)
    for row in cutlass.range_constexpr(rows):
        position = cutlass.max(cutlass.min(coordinates[row, 0][0], task.rows - 1), 0)
        found[row] = query_scale(queries, task.request, task.first_row + position, heads)
    return found


@cute.jit
def scaling_of(query_scales: cute.Tensor, scale_log2: Float32) -> Scaling:
    """What a task's rows need of their queries' scales, and what they add up beside `RowStates.total`."""
    factors, totals = (cute.make_rmem_tensor_like(query_scales) for _ in range(2))
    totals.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(factors)):
        factors[row] = query_scales[row] * scale_log2
    return Scaling(factors, totals)


@cute.jit
def scale_products(view: cute.Tensor, factors: cute.Tensor, folded: cute.Tensor, quad_lane: Int32) -> None:
    """Turn products (rows, columns) with a tile's keys into exponents: multiply by the scales of query and key, and add
    the logarithm of the key's. folded: `Exchange.folded` of scores and the tile's stage."""
    for two in cutlass.range_constexpr(cute.size(view, mode=[1]) // 2):
        scales = cute.make_rmem_tensor(4, Float32)  # of two keys, and their logarithms
        place = folded[None, quad_lane + QUAD * two].iterator
        cute.autovec_copy(cute.make_tensor(aligned(place, 16), 4), scales)
        for i in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(cute.size(view, mode=[0])):
                product = view[row, 2 * two + i]
                view[row, 2 * two + i] = cute.math.fma(product, scales[i] * factors[row], scales[2 + i])


@cute.jit
def anchor_of_task(anchors: cute.Tensor, number: Int32, tiles: Int32) -> Float32:
    """The anchor of task `number`, which was told before the scales of its first tile, if it has one."""
    anchor = Float32(1.0)
    if tiles > 0:
        anchor = anchors[number & TASK_RING - 1]
    return anchor
