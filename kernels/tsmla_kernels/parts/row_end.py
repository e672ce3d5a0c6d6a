"""The end of a row: from the sum of its exponentials to its output's factor and its log-sum-exp.

A row's exponentials exp(scale (score - reference)), times 2^bias, add up to `total`. Their products with values carry
the same factor, so the output is these divided by `total`. A row that sees no key has a total of 0: its output is 0 and
its log-sum-exp -inf.

A head's sink is a logit without a value: its exponential is in the denominator of the output, and in the log-sum-exp
only if the call says so. Of a row that is computed in parts it enters once, where these are combined.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .division import remainder
from .logarithm import LN_2

NATURAL, BASE_2 = LN_2, 1.0
"""Logarithms, each as that of 2."""


class Ending(NamedTuple):
    """What a call says of the ends of its rows: what their outputs are multiplied by; the heads' sinks, natural
    logarithms, [heads] or [0] when there are none; and whether log-sum-exps count these."""

    output_scale: Float32
    sinks: cute.Tensor
    lse_includes_sink: Int32


def ending_of(given) -> Ending:
    """On the host: of a call's arguments, by name."""
    return Ending(given.output_scale, given.sinks, given.lse_includes_sink)


class RowEnd(NamedTuple):
    """What a row's products with values are multiplied by, and the logarithm of its sum of exponentials."""

    factor: Float32
    log_sum: Float32


@cute.jit
def end_of_row(
    ending: Ending,
    row: Int32,
    reference: Float32,
    scale: Float32 | float,
    total: Float32,
    bias: cutlass.Constexpr[int],
    logarithm: cutlass.Constexpr[float],
    whole: Boolean | bool = True,
    output_scale: Float32 | None = None,
) -> RowEnd:
    """`row` counts the heads of all query tokens, or of one; `scale` makes of scores the logarithms asked for. `whole`
    is false for partial results, which count no sink. The factor is `output_scale`, or 1, divided by what exponentials
    add up to."""
    divisor = total
    log_sum = _log_sum(reference, scale, total, bias, logarithm)
    if Boolean(ending.sinks.shape[0] > 0) & Boolean(whole):
        sink = ending.sinks[remainder(row, Int32(ending.sinks.shape[0]))] * (logarithm / LN_2)
        above = cute.math.fma(reference, Float32(-scale), sink) * (1.0 / logarithm)
        # inf if the sink is far above the reference: the factor is then 0.
        divisor = total + cute.math.exp2(above + bias if const_expr(bias) else above, fastmath=True)
        if ending.lse_includes_sink != 0:
            log_sum = sink if total == 0.0 else _log_of_both(log_sum, sink, logarithm)
    return RowEnd(_factor(total, divisor, output_scale), log_sum)


@cute.jit
def _factor(total: Float32, divisor: Float32, scale: Float32 | None) -> Float32:
    factor = Float32(0.0)
    if const_expr(scale is None):
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(divisor)
    else:
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(divisor) * scale
    return factor


@cute.jit
def _log_sum(
    reference: Float32,
    scale: Float32 | float,
    total: Float32,
    bias: cutlass.Constexpr[int],
    logarithm: cutlass.Constexpr[float],
) -> Float32:
    log_total = cute.math.log2(total, fastmath=True)
    if const_expr(logarithm != BASE_2):
        log_total = (log_total - bias if const_expr(bias) else log_total) * logarithm
    log_total = reference * scale + log_total
    if const_expr(bias and logarithm == BASE_2):
        log_total -= bias
    return -Float32.inf if total == 0.0 else log_total


@cute.jit
def _log_of_both(a: Float32, b: Float32, logarithm: cutlass.Constexpr[float]) -> Float32:
    """The logarithm of the sum of two numbers given by theirs, of which one may be infinite. NaN leads to NaN."""
    apart = cute.arch.fmax(a - b, b - a)
    smaller = cute.math.exp2(apart * (-1.0 / logarithm), fastmath=True)
    return cute.arch.fmax(a, b) + cute.math.log2(smaller + 1.0, fastmath=True) * logarithm
