"""Online softmax of a row that one thread holds whole: no lane talks to another.

Scores stay unscaled; exponentials are base 2 with the softmax scale times log2(e) folded into one FMA per two
elements. A row keeps its old maximum until exponentials would grow beyond a stated bound, so that what has been
accumulated rarely needs rescaling (FlashAttention-4, arXiv 2603.05451).

A row's values are Python lists of registers: what is stored to a register tensor and read back in other sizes costs
moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op, select_

from .exp2 import exp2_x2

EMULATION_PERIOD = 16
"""Couples of elements among which a schedule's `emulated` ones are spread evenly."""
_CHAINS = 4


class RowState(NamedTuple):
    """Unscaled maximum that exponentials refer to (-inf before the first visible key), and their sum so far."""

    maximum: Float32
    total: Float32


def mask_row(scores: list, end: Int32) -> list:
    """The scores, those of columns `end` and beyond replaced by -inf."""
    hidden = Float32(-Float32.inf)
    return [Float32(select_(end > column, score, hidden)) for column, score in enumerate(scores)]


def mask_outside(scores: list, first: Int32, end: Int32) -> list:
    """The scores, those of columns outside of `first` .. `end` - 1 replaced by -inf."""
    hidden = Float32(-Float32.inf)
    return [Float32(select_((first <= column) & (end > column), score, hidden)) for column, score in enumerate(scores)]


def mask_missing(scores: list, there: tuple[Int32, ...]) -> list:
    """The scores, those of columns whose bit in `there` is 0 replaced by -inf."""
    hidden = Float32(-Float32.inf)
    bits = [there[column // 32] >> column % 32 & 1 for column in range(len(scores))]
    return [Float32(select_(bit != 0, score, hidden)) for bit, score in zip(bits, scores, strict=True)]


def row_maximum(scores: list[Float32], nan: bool = False) -> Float32:
    """The largest score, in several chains so that latencies overlap. nan: NaN if one is, else NaN is ignored."""
    best = list(scores[:_CHAINS])
    for column in range(_CHAINS, len(scores), 2):
        chain = column // 2 % _CHAINS
        best[chain] = _maximum_of_three(best[chain], scores[column], scores[column + 1], nan)
    return cute.arch.fmax(_maximum_of_three(best[0], best[1], best[2], nan), best[3], nan=nan)


@dsl_user_op
def _maximum_of_three(a: Float32, b: Float32, c: Float32, nan: bool, *, loc=None, ip=None) -> Float32:
    """The largest of three numbers, by one instruction of Blackwell's."""
    a, b, c = (Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b, c))
    return Float32(nvvm.fmax(a, b, c=c, nan=nan, loc=loc, ip=ip))


def nan_or(value: Float32, seen: Float32) -> Float32:
    """NaN if `seen` is, else the value."""
    return Float32(select_(seen == seen, value, seen))


@dsl_user_op
def behind_waits(value: Float32, *, loc=None, ip=None) -> Float32:
    """Return the value so that ptxas does not make it above the waits before this. All lanes of the warp are here."""
    numbers = cute.arch.vote_any_sync(value == value, loc=loc, ip=ip)  # else all lanes' values are NaN
    return Float32(select_(numbers, value, Float32(float("nan"))))


def behind(value: Float32, exponential: Float32) -> Float32:
    """Return the value so that ptxas does not have it before the exponential, whose sign bit is 0: NaN that is made has
    none."""
    sign = exponential.bitcast(Int32) & Int32(-(1 << 31))
    return (value.bitcast(Int32) | sign).bitcast(Float32)


@cute.jit
def beyond(seen: Float32, state: RowState, growth: Float32, scale_log2: Float32) -> Float32:
    """The largest score of a tile, `seen`, if exponentials must refer to it from now on, else -inf. `growth` is what
    `Probabilities.growth` gives."""
    return seen if (seen - state.maximum) * scale_log2 > growth else -Float32.inf


@cute.jit
def rescale_factor(old: Float32, new: Float32, scale_log2: Float32, may_hide_row: cutlass.Constexpr) -> Float32:
    """What to multiply all that refers to the maximum `old` by. `may_hide_row`: rows may have seen only -inf."""
    factor = cute.math.exp2((old - new) * scale_log2, fastmath=True)
    if const_expr(may_hide_row):
        factor = Float32(1.0) if old == new else factor
    return factor


@cute.jit
def offset_of(
    maximum: Float32, scale_log2: Float32, bias: cutlass.Constexpr, may_hide_row: cutlass.Constexpr
) -> Float32:
    """What is added to scaled scores in exponents; a row that has seen only -inf stays finite."""
    base = maximum
    if const_expr(may_hide_row):
        base = Float32(0.0) if maximum == -Float32.inf else maximum
    return base * -scale_log2 + Float32(bias)


def exponentials(
    scores: list[Float32], scale_log2: Float32, offset: Float32, first: int, emulated: int,
    beside: Iterator[None] | None = None,
) -> list[Float32]:  # fmt: skip
    """2 ** (score * scale_log2 + offset) of an even number of scores, the first of which is in column `first`.
    `beside`: steps of other work; these and the steps of emulated exponentials are put between the others, which the
    exponential unit takes longest for. An emulated exponential makes 0 of NaN."""
    found: list[Float32] = list(scores)
    scale, offsets = (scale_log2, scale_log2), (offset, offset)

    def scaled_two(index: int) -> tuple[Float32, Float32]:
        return cute.arch.fma_packed_f32x2((scores[index], scores[index + 1]), scale, offsets)

    def emulate(index: int) -> Iterator[None]:
        found[index : index + 2] = yield from exp2_x2(scaled_two(index))

    places = range(0, len(scores), 2)
    apart = [index for index in places if _is_emulated((first + index) // 2, emulated)]
    steps = [*map(emulate, apart), beside] if beside else []
    for index in places:
        if index not in apart:
            for place, exponent in enumerate(scaled_two(index), index):
                _advance(steps)
                found[place] = cute.math.exp2(exponent, fastmath=True)
            _advance(steps)
        elif beside is None:
            run_out(emulate(index))
    for one in steps:
        run_out(one)
    return found


def run_out(steps: Iterator[None]) -> None:
    """Do all steps that are left."""
    for _ in steps:
        pass


def _advance(steps: list[Iterator[None]]) -> None:
    for one in steps:
        next(one, None)


def _is_emulated(couple: int, emulated: int) -> bool:
    """True for `emulated` of every EMULATION_PERIOD couples of elements, evenly spread; never for the first."""
    return (couple % EMULATION_PERIOD * emulated) % EMULATION_PERIOD >= EMULATION_PERIOD - emulated


def sum_of(values: list[Float32], start: Float32) -> Float32:
    """start + all values."""
    sums = Sums(start)
    sums.add(values)
    return sums.total()


class Sums:
    """start + all values added so far, two at a time, in several chains."""

    def __init__(self, start: Float32):
        self._chains = [(start, Float32(0.0))]
        self._added = 0

    def add(self, values: list[Float32]) -> None:
        run_out(self.adding(values))

    def adding(self, values: list[Float32]) -> Iterator[None]:
        """Add values as `add` does, a step for each two."""
        for index in range(0, len(values), 2):
            two, chain = values[index : index + 2], self._added % _CHAINS
            if chain == len(self._chains):
                self._chains.append(two)
            else:
                self._chains[chain] = cute.arch.add_packed_f32x2(self._chains[chain], two)
            self._added += 1
            yield

    def total(self) -> Float32:
        low = cute.arch.add_packed_f32x2(self._chains[0], self._chains[1])
        high = cute.arch.add_packed_f32x2(self._chains[2], self._chains[3])
        both = cute.arch.add_packed_f32x2(low, high)
        return both[0] + both[1]


def scaled(values: list[Float32], factor: Float32) -> list[Float32]:
    """Every value times `factor`."""
    products: list[Float32] = []
    for index in range(0, len(values), 2):
        products += cute.arch.mul_packed_f32x2(values[index : index + 2], (factor, factor))
    return products
