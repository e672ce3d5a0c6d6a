"""Online softmax whose reference follows the row maximum only when it must.

Exponentials are taken against a reference that stays where it is until a score exceeds it by more than 2^slack: output
rows are then rarely rescaled, and exponentials stay below 2^(bias + slack), which their type holds
(`precision.Probabilities`). (Skipped rescaling: FlashAttention-4, arXiv 2603.05451.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.cutlass_dsl import select_

from ..precision import Probabilities
from .softmax import quad_max

NO_KEYS = -1.0e30
"""The reference of a prefill's 8-bit rows before their first visible key: finite, so that no difference of references
is NaN, and below any product of such numbers. A prefill's 16-bit rows begin with -inf, and steps that may leave it
there are told `may_hide_row`; those of the decode of up to 64 rows begin with `lowest_reference`."""
NO_ROW = Float32.inf
"""The reference of rows that are not the segment's, whatever they hold: no score exceeds it, so no other reference
moves."""


def lowest_reference(scale_log2: Float32) -> Float32:
    """The reference before the first visible key, whatever type the numbers have: finite, as is its product with the
    scale, and below any product that is finite with the scale."""
    return cute.arch.rcp_approx(cute.arch.fmax(scale_log2, Float32(1.0))) * -3.0e38


@cute.jit
def exceeds(
    scores: cute.Tensor, reference: cute.Tensor, scale_log2: Float32, probabilities: cutlass.Constexpr[Probabilities]
) -> Boolean:
    """Whether one of this lane's `scores` (rows, columns) must move its row's reference, which is rare."""
    assert probabilities.heavy is None, probabilities
    beyond = Boolean(False)
    for row in cutlass.range_constexpr(cute.size(reference)):
        highest = scores[row, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        above = (highest - reference[row]) * scale_log2
        beyond = beyond or above > probabilities.slack
    return beyond


@cute.jit
def move_reference(
    scores: cute.Tensor,
    reference: cute.Tensor,
    row_sum: cute.Tensor | None,
    rescale: cute.Tensor,
    scale_log2: Float32,
    may_hide_row: cutlass.Constexpr = False,
) -> None:
    """Move the references of `scores` (rows, columns) to the rows' maxima. `reference` is unscaled and equal on the
    quad; `row_sum` is this lane's share, or None for a caller that rescales it by itself. `rescale` is the factor that
    earlier output rows must be multiplied by, 1 where nothing moved."""
    for row in cutlass.range_constexpr(cute.size(reference)):
        highest = quad_max(scores[row, None].load().reduce(cute.ReductionOp.MAX, reference[row], 0))
        _rescale(row, highest, reference, row_sum, rescale, scale_log2, may_hide_row)


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    exponentials: cute.Tensor,
    reference: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32,
    probabilities: cutlass.Constexpr[Probabilities],
    may_hide_row: cutlass.Constexpr = False,
) -> cute.Tensor:
    """Set `exponentials` to 2**bias exp(scale * (score - reference)) of `scores` (rows, columns), and return `row_sum`
    plus them. `scores` and `row_sum` stay as they are, so that it can be done again where references turn out to move.
    """
    sums = cute.make_rmem_tensor_like(row_sum)
    for row in cutlass.range_constexpr(cute.size(reference)):
        base = _finite(reference[row]) if const_expr(may_hide_row) else reference[row]
        shift = base * scale_log2
        if const_expr(probabilities.bias):
            shift = cute.math.fma(base, scale_log2, Float32(-probabilities.bias))
        values = cute.math.exp2(_exponents(scores[row, None].load(), scale_log2, shift), fastmath=True)
        exponentials[row, None].store(values)
        sums[row] = values.reduce(cute.ReductionOp.ADD, row_sum[row], 0)
    return sums


@cute.jit
def _exponents(scores: cute.TensorSSA, scale_log2: Float32, shift: Float32) -> cute.TensorSSA:
    """`scores` * scale_log2 - shift, as an FMA by name: the compiler would fuse only some of these, and variants would
    differ in their last bits."""
    return cute.math.fma(scores, cute.full_like(scores, scale_log2), cute.full_like(scores, -shift))


@cute.jit
def is_ahead(received: cute.Tensor, reference: cute.Tensor) -> Boolean:
    """Whether a `received` reference of one of this lane's rows has moved on. Rows that are not the segment's never
    count, even where theirs has become NaN."""
    ahead = Boolean(False)
    for row in cutlass.range_constexpr(cute.size(reference)):
        ahead = ahead or received[row] > reference[row]
    return ahead


@cute.jit
def follow_reference(received: cute.Tensor, reference: cute.Tensor, rescale: cute.Tensor, scale_log2: Float32) -> None:
    """Take over the references that another warp has moved to, as `move_reference` without sums would have."""
    for row in cutlass.range_constexpr(cute.size(reference)):
        _rescale(row, received[row], reference, None, rescale, scale_log2)


def _finite(reference: Float32) -> Float32:
    """The reference that exponentials use: 0 where no key has been seen, as any number does for scores of -inf."""
    return Float32(select_(reference == -Float32.inf, Float32(0.0), reference))


@cute.jit
def _rescale(
    row: cutlass.Constexpr,
    now: Float32,
    reference: cute.Tensor,
    row_sum: cute.Tensor | None,
    rescale: cute.Tensor,
    scale_log2: Float32,
    may_hide_row: cutlass.Constexpr = False,
) -> None:
    base = _finite(now) if const_expr(may_hide_row) else now
    factor = cute.math.exp2((reference[row] - base) * scale_log2, fastmath=True)
    rescale[row] = factor
    if const_expr(row_sum is not None):
        row_sum[row] = row_sum[row] * factor
    reference[row] = now
