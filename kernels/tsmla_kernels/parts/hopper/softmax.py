"""Online softmax over rows held by four neighbouring lanes (Milakov and Gimelshein, arXiv 1805.02867).

Scores stay unscaled; exponentials are base 2 with the softmax scale times log2(e) folded into one FMA per element.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from ..logarithm import LN_2
from .fragment import QUAD


@cute.jit
def _quad_max(value: Float32) -> Float32:
    for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
    return value


@cute.jit
def _quad_sum(value: Float32) -> Float32:
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
    first: cutlass.Constexpr,
    may_hide_row: cutlass.Constexpr,
) -> None:
    """Replace `scores` (rows, columns) by exp(scale * (score - new row maximum)) and update the running state.

    `row_max` is unscaled and equal on the quad; `row_sum` is this lane's part. `rescale` receives the factor that
    earlier output rows must be multiplied by (not written when `first`). With `may_hide_row`, rows that have seen only
    -inf stay finite: their maximum counts as 0.
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        mine = scores[row, None].load()
        start = -Float32.inf if const_expr(first) else row_max[row]
        new_max = _quad_max(mine.reduce(cute.ReductionOp.MAX, start, 0))
        base = new_max
        if const_expr(may_hide_row):
            base = Float32(0.0) if new_max == -Float32.inf else new_max
        exponentials = cute.math.exp2(mine * scale_log2 - base * scale_log2, fastmath=True)
        scores[row, None].store(exponentials)
        if const_expr(first):
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


@cute.jit
def finish_rows(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    factor: cute.Tensor,
    lse: cute.Tensor,
    scale: Float32,
    output_scale: Float32,
    bias: cutlass.Constexpr = 0,
) -> None:
    """Per row: the output's last factor, output_scale / sum (0 for a row that saw no key), and the natural-log LSE of
    the scores times `scale` (-inf for such a row). `bias` as in `lazy_softmax.exponentiate`: sum and output carry the
    same factor.
    """
    for row in cutlass.range_constexpr(cute.size(row_sum)):
        total = _quad_sum(row_sum[row])
        empty = total == 0.0
        factor[row] = Float32(0.0) if empty else cute.arch.rcp_approx(total) * output_scale
        log_total = cute.math.log2(total, fastmath=True)
        log_total = (log_total - bias if const_expr(bias) else log_total) * LN_2
        lse[row] = -Float32.inf if empty else row_max[row] * scale + log_total
