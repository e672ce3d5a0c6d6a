"""The end of a row: from the sum of its exponentials to its output's factor and its log-sum-exp.

A row's exponentials 2^(bias + score - reference) add up to `total`, scores in powers of two. Their products with values
carry the same factor, so the output is these divided by `total`. A row that sees no key has a total of 0: its output is
0 and its log-sum-exp -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from .logarithm import LN_2

NATURAL, BASE_2 = LN_2, 1.0
"""Logarithms, each as that of 2."""


class Ending(NamedTuple):
    """What a call says of the ends of its rows: what their outputs are multiplied by."""

    output_scale: Float32


@cute.jit
def output_factor(total: Float32, scale: Float32 | None = None) -> Float32:
    """What a row's products with values are multiplied by: `scale`, or 1, divided by the row's total."""
    factor = Float32(0.0)
    if const_expr(scale is None):
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
    else:
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total) * scale
    return factor


@cute.jit
def log_sum(
    reference: Float32, total: Float32, bias: cutlass.Constexpr[int], logarithm: cutlass.Constexpr[float]
) -> Float32:
    """The logarithm of the row's sum of exponentials. `reference` is the logarithm of what they refer to."""
    log_total = cute.math.log2(total, fastmath=True)
    if const_expr(logarithm != BASE_2):
        log_total = (log_total - bias if const_expr(bias) else log_total) * logarithm
    log_total = reference + log_total
    if const_expr(bias and logarithm == BASE_2):
        log_total -= bias
    return -Float32.inf if total == 0.0 else log_total
