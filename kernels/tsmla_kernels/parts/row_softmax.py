"""Online softmax of a row that one thread holds whole: no lane talks to another.

Scores stay unscaled; exponentials are base 2 with the softmax scale times log2(e) folded into one FMA per pair of
elements. A row keeps its old maximum while the new one is not more than 2 ** `slack` times larger, so that what has been
accumulated rarely needs rescaling (FlashAttention-4, arXiv 2603.05451).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .exp2 import exp2_pair
from .softmax import LN_2

EMULATION_PERIOD = 16
"""Pairs of elements among which a schedule's `emulated_pairs` are spread evenly."""
_CHAINS = 4


class RowState(NamedTuple):
    """Unscaled maximum that exponentials refer to (-inf before the first visible key), and their sum so far."""

    maximum: Float32
    total: Float32


@cute.jit
def mask_row(scores: cute.Tensor, end: Int32) -> None:
    """Set the scores of columns `end` and beyond to -inf."""
    for column in cutlass.range_constexpr(cute.size(scores)):
        scores[column] = scores[column] if column < end else -Float32.inf


@cute.jit
def row_maximum(scores: cute.Tensor) -> Float32:
    """The largest score, in several chains so that latencies overlap."""
    best = [scores[chain] for chain in range(_CHAINS)]
    for column in cutlass.range_constexpr(_CHAINS, cute.size(scores)):
        best[column % _CHAINS] = cute.arch.fmax(best[column % _CHAINS], scores[column])
    return cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))


@cute.jit
def new_maximum(old: Float32, seen: Float32, scale_log2: Float32, slack: cutlass.Constexpr) -> Float32:
    """The maximum to refer to from now on: `old` unless the largest score exceeds it by more than `slack`."""
    return seen if (seen - old) * scale_log2 > Float32(slack) else old


@cute.jit
def shift_of(maximum: Float32, scale_log2: Float32, bias: cutlass.Constexpr) -> Float32:
    """What exponents are lowered by; a row that has seen only -inf stays finite."""
    base = Float32(0.0) if maximum == -Float32.inf else maximum
    return base * scale_log2 - Float32(bias)


@cute.jit
def exponentials(
    scores: cute.Tensor, first: cutlass.Constexpr, end: cutlass.Constexpr, scale_log2: Float32, shift: Float32,
    emulated: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Replace scores[first:end] by 2 ** (score * scale_log2 - shift)."""
    for column in cutlass.range_constexpr(first, end, 2):
        x = cute.arch.fma_packed_f32x2(
            (scores[column], scores[column + 1]), (scale_log2, scale_log2), (-shift, -shift)
        )
        if const_expr(_is_emulated(column // 2, emulated)):
            x = exp2_pair(x)
        else:
            x = (cute.math.exp2(x[0], fastmath=True), cute.math.exp2(x[1], fastmath=True))
        scores[column], scores[column + 1] = x


def _is_emulated(pair: int, emulated: int) -> bool:
    """True for `emulated` of every EMULATION_PERIOD pairs, evenly spread; never for the first pair."""
    return (pair % EMULATION_PERIOD * emulated) % EMULATION_PERIOD >= EMULATION_PERIOD - emulated


@cute.jit
def sum_of(values: cute.Tensor, start: Float32) -> Float32:
    """start + all values, in several chains of pairs."""
    sums = [(start, Float32(0.0))] + [(Float32(0.0), Float32(0.0)) for _ in range(_CHAINS - 1)]
    for column in cutlass.range_constexpr(0, cute.size(values), 2):
        chain = column // 2 % _CHAINS
        sums[chain] = cute.arch.add_packed_f32x2(sums[chain], (values[column], values[column + 1]))
    low = cute.arch.add_packed_f32x2(sums[0], sums[1])
    high = cute.arch.add_packed_f32x2(sums[2], sums[3])
    both = cute.arch.add_packed_f32x2(low, high)
    return both[0] + both[1]


@cute.jit
def natural_lse(state: RowState, scale: Float32, bias: cutlass.Constexpr) -> Float32:
    """Natural log of the row's sum of exponentials of scaled scores; -inf for a row that saw no key."""
    log_total = (cute.math.log2(state.total, fastmath=True) - Float32(bias)) * LN_2
    return -Float32.inf if state.total == 0.0 else state.maximum * scale + log_total
