"""Online softmax whose reference follows the row maximum only when it must.

Exponentials are taken against a reference that stays where it is until a score exceeds it by more than 2^slack: output
rows are then rarely rescaled, and exponentials stay below 2^(bias + slack), which their type holds
(`precision.Probabilities`). (Skipped rescaling: FlashAttention-4, arXiv 2603.05451.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from .precision import Probabilities
from .softmax import _quad_max

NO_KEYS = -1.0e30
"""The reference before the first visible key: finite, so that no difference of references is NaN."""


@cute.jit
def move_reference(
    scores: cute.Tensor,
    reference: cute.Tensor,
    row_sum: cute.Tensor,
    rescale: cute.Tensor,
    scale_log2: Float32,
    probabilities: cutlass.Constexpr[Probabilities],
) -> None:
    """Move the reference to the maximum of `scores` (rows, columns) where it must, before `exponentiate`.

    `reference` is unscaled and equal on the quad; `row_sum` is this lane's part. `rescale` receives the factor that
    earlier output rows must be multiplied by, exactly 1 where the reference stayed.
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        highest = _quad_max(scores[row, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        before = reference[row]
        now = highest if (highest - before) * scale_log2 > probabilities.slack else before
        factor = cute.math.exp2((before - now) * scale_log2, fastmath=True)
        rescale[row] = factor
        row_sum[row] = row_sum[row] * factor
        reference[row] = now


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    reference: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32,
    probabilities: cutlass.Constexpr[Probabilities],
) -> None:
    """Replace `scores` (rows, columns) by 2**bias exp(scale * (score - reference)) and add them to the sums."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        shift = reference[row] * scale_log2
        if const_expr(probabilities.bias):
            shift -= probabilities.bias
        exponentials = cute.math.exp2(scores[row, None].load() * scale_log2 - shift, fastmath=True)
        scores[row, None].store(exponentials)
        row_sum[row] = exponentials.reduce(cute.ReductionOp.ADD, row_sum[row], 0)


@cute.jit
def follow_reference(
    received: cute.Tensor, reference: cute.Tensor, row_sum: cute.Tensor, rescale: cute.Tensor, scale_log2: Float32
) -> None:
    """Take over the reference that another warp has moved to, as `move_reference` would have."""
    for row in cutlass.range_constexpr(cute.size(reference)):
        factor = cute.math.exp2((reference[row] - received[row]) * scale_log2, fastmath=True)
        rescale[row] = factor
        row_sum[row] = row_sum[row] * factor
        reference[row] = received[row]


@cute.jit
def moved(rescale: cute.Tensor) -> Boolean:
    """Whether any row of the warp must be rescaled."""
    any_row = rescale[0] != 1.0
    for row in cutlass.range_constexpr(1, cute.size(rescale)):
        any_row = any_row or rescale[row] != 1.0
    return cute.arch.vote_any_sync(any_row)
