"""Online softmax over rows held by four neighbouring lanes (Milakov and Gimelshein, arXiv 1805.02867).

Scores stay unscaled; exponentials are base 2 with the softmax scale times log2(e) folded into one FMA per element.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from ..warp import QUAD


@cute.jit
def quad_max(value: Float32) -> Float32:
    for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
    return value


@cute.jit
def quad_sum(value: Float32) -> Float32:
    for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
        value += cute.arch.shuffle_sync_bfly(value, 1 << step)
    return value


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    rescale: cute.Tensor,
    scale_log2: Float32,
    is_first: cutlass.Constexpr,
    may_hide_row: cutlass.Constexpr,
) -> None:
    """Replace `scores` (rows, columns) by exp(scale * (score - new row maximum)) and update the running state.

    `row_max` is unscaled and equal on the quad; `row_sum` is this lane's share. `rescale` receives the factor that
    earlier output rows must be multiplied by (not written when `is_first`). With `may_hide_row`, rows that have seen
    only -inf stay finite: their maximum counts as 0.
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        mine = scores[row, None].load()
        start = -Float32.inf if const_expr(is_first) else row_max[row]
        new_max = quad_max(mine.reduce(cute.ReductionOp.MAX, start, 0))
        base = new_max
        if const_expr(may_hide_row):
            base = Float32(0.0) if new_max == -Float32.inf else new_max
        exponentials = cute.math.exp2(mine * scale_log2 - base * scale_log2, fastmath=True)
        scores[row, None].store(exponentials)
        if const_expr(is_first):
            row_sum[row] = exponentials.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        else:
            factor = cute.math.exp2((row_max[row] - base) * scale_log2, fastmath=True)
            rescale[row] = factor
            row_sum[row] = exponentials.reduce(cute.ReductionOp.ADD, row_sum[row] * factor, 0)
        row_max[row] = new_max


@cute.jit
def scale_rows(accumulator: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiply each row of a (rows, columns) view by its factor."""
    for row in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        accumulator[row, None].store(accumulator[row, None].load() * factors[row])
