"""The end of a row: from the sum of its exponentials to its output's factor and its log-sum-exp.

A row's exponentials exp(scale (score - reference)), times 2^bias, add up to `total`. Their products with values carry
the same factor, so the output is these divided by `total`. A row that sees no key has a total of 0: its output is 0 and
its log-sum-exp -inf.

A head's sink is a logit without a value: its exponential is in the denominator of the output, and in the log-sum-exp
only if the call says so. A row with the log-sum-exp L keeps the share 1 / (1 + exp(sink - L)) of its output. Where
partial results are combined, the sink counts once, in the combined row.

A call may continue from an earlier result over other keys. Each of both outputs then keeps its share of the sum of
exponentials of all keys, which follows from the log-sum-exps alone."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .division import Divisor, divisor_of, quotient, remainder
from .logarithm import LN_2, LOG2_E

NATURAL, BASE_2 = LN_2, 1.0
"""Kinds of logarithms, each as the factor that makes it of a logarithm of base 2."""


class Ending(NamedTuple):
    """What a call says of the ends of its rows.

    output_scale: outputs are multiplied by it. sinks: natural logarithms, [heads], or [0] where there are none. heads:
    of the query, 1 at least. lse_includes_sink: whether log-sum-exps count the sinks. lse_factor: turns log-sum-exps as
    kernels compute them into those of the base that the call asks for."""

    output_scale: Float32
    sinks: cute.Tensor
    heads: Divisor
    lse_includes_sink: Int32
    lse_factor: Float32


def ending_of(given, heads: Int32) -> Ending:
    """Collect, on the host, what a call's arguments, by name, say of the ends of its rows."""
    heads = divisor_of(cutlass.max(Int32(heads), 1))
    return Ending(given.output_scale, given.sinks, heads, given.lse_includes_sink, given.lse_factor)


class LogSums(NamedTuple):
    """Where a decode's log-sum-exps go: `target` [batch, q_len, heads] with any strides, and its q_len, 1 at least."""

    target: cute.Tensor
    q_len: Divisor


def log_sums_of(target: cute.Tensor | None) -> LogSums | None:
    """Prepare, on the host, the tensor that log-sum-exps go to, if there is one."""
    if target is None:
        return None
    return LogSums(target, divisor_of(cutlass.max(Int32(target.shape[1]), 1)))


@cute.jit
def write_log_sum(sums: LogSums, ending: Ending, row: Int32, log_sum: Float32) -> None:
    """Write a decode row's log-sum-exp of base 2 in the base asked for. `row` counts the heads of all query tokens."""
    token = quotient(row, ending.heads)
    request = quotient(token, sums.q_len)
    place = (request, token - request * sums.q_len.value, row - token * ending.heads.value)
    sums.target[place] = log_sum * ending.lse_factor


class Earlier(NamedTuple):
    """The result that a call continues from if `merges` is not 0. It lies where the call's own goes: `out` [tokens,
    heads, dim]; its natural log-sum-exps in the call's."""

    merges: Int32
    out: cute.Tensor


class RowEnd(NamedTuple):
    """What a row's products with values are multiplied by, and the logarithm of its sum of exponentials."""

    factor: Float32
    log_sum: Float32


@cute.jit
def end_of_row(
    reference: Float32,
    scale: Float32 | float,
    total: Float32,
    bias: cutlass.Constexpr[int],
    logarithm: cutlass.Constexpr[float],
    output_scale: Float32 | None = None,
) -> RowEnd:
    """The end of a row without a sink. `scale` turns scores into the logarithms asked for; the factor is
    `output_scale`, or 1, divided by `total`."""
    return RowEnd(_factor(total, output_scale), _log_sum(reference, scale, total, bias, logarithm))


@cute.jit
def count_earlier(end: RowEnd, earlier: Float32) -> tuple[RowEnd, Float32]:
    """The end of a row over its keys and those of an earlier result with the natural log-sum-exp `earlier`, and what
    the earlier output is multiplied by. Where one of both has no keys, or next to none, the other stays as it is."""
    top = cute.arch.fmax(end.log_sum, earlier)
    base = Float32(0.0) if top == -Float32.inf else top
    mine = cute.math.exp2((end.log_sum - base) * LOG2_E, fastmath=True)
    theirs = cute.math.exp2((earlier - base) * LOG2_E, fastmath=True)
    total = mine + theirs
    share = cute.arch.rcp_approx(total)
    factor, kept = end.factor * (mine * share), theirs * share
    if theirs == 0.0:
        factor, kept = end.factor, Float32(0.0)
    elif mine == 0.0:
        factor, kept = Float32(0.0), Float32(1.0)
    return RowEnd(factor, top + cute.math.log2(total, fastmath=True) * LN_2), kept


@cute.jit
def with_earlier(value: Float32, earlier: Float32, factor: Float32, kept: Float32) -> Float32:
    """An output times `factor`, which counts unless that is 0, plus an earlier one times `kept`, which is not 0. Adding
    to -0 changes nothing."""
    return (Float32(-0.0) if factor == 0.0 else value) + kept * earlier


@cute.jit
def count_sink(
    ending: Ending, row: Int32, end: RowEnd, logarithm: cutlass.Constexpr[float], logged: cutlass.Constexpr[bool]
) -> RowEnd:
    """The end of a whole row, whose head may have a sink. `row` counts the heads of all query tokens, or of one. The
    log-sum-exp is of use only where it is `logged`.

    Separate from `end_of_row`: inlined there, ptxas reorders 8-bit decode loops (1 to 2 % slower)."""
    factor, log_sum = end.factor, end.log_sum
    if ending.sinks.shape[0] > 0:
        sink = ending.sinks[remainder(row, ending.heads)] * (logarithm / LN_2)
        above = (sink - end.log_sum) * (1.0 / logarithm)
        # A sink far above makes exp2 inf and the share 0. NaN where neither keys nor a sink count: the factor is 0.
        share = cute.arch.rcp_approx(cute.math.exp2(above, fastmath=True) + 1.0)
        factor = factor if factor == 0.0 else factor * share
        if const_expr(logged):
            if ending.lse_includes_sink != 0:
                log_sum = sink if end.log_sum == -Float32.inf else _log_of_both(end.log_sum, sink, logarithm)
    return RowEnd(factor, log_sum)


@cute.jit
def _factor(total: Float32, scale: Float32 | None) -> Float32:
    factor = Float32(0.0)
    if const_expr(scale is None):
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
    else:
        factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total) * scale
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
    """The logarithm of the sum of two numbers given by their logarithms, one of which may be infinite. NaN leads to
    NaN."""
    apart = cute.arch.fmax(a - b, b - a)
    smaller = cute.math.exp2(apart * (-1.0 / logarithm), fastmath=True)
    return cute.arch.fmax(a, b) + cute.math.log2(smaller + 1.0, fastmath=True) * logarithm
