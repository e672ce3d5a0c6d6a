"""Element types on the device, and how probabilities enter value products."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Vector
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.variant import Dtype

from . import ptx

NUMERIC: dict[Dtype, type[Numeric]] = {
    Dtype.BF16: cutlass.BFloat16,
    Dtype.FP16: cutlass.Float16,
    Dtype.E4M3: cutlass.Float8E4M3FN,
    Dtype.E5M2: cutlass.Float8E5M2,
}


def numeric(dtype: Dtype) -> type[Numeric]:
    """The DSL's element type of a dtype."""
    return NUMERIC[dtype]


def multiplied(stored, scale: Float32, dtype: type[Numeric]):
    """Stored numbers, a vector of them, times their scale, in float32 and then rounded to nearest: what readers and
    kernels make of rows with scales."""
    return (stored.to(Float32) * scale).to(dtype)


def widened(word: Int32, dtype: type[Numeric]) -> tuple[Int32, Int32]:
    """Four 8-bit numbers as float16, which holds all of them: two words of two."""
    numbers = Vector.from_elements((word,), Int32).bitcast(dtype)
    low, high = numbers.to(cutlass.Float16).bitcast(Int32).to_elements()
    return low, high


def packed_words(values: list[Float32], dtype: type[Numeric]) -> list[Int32]:
    """The values rounded to nearest, to `dtype`, and packed into 32-bit words, the first in the low bits."""
    return list(Vector.from_elements(tuple(values), Float32).to(dtype).bitcast(Int32).to_elements())


def larger_magnitudes(word: Int32, other: Int32, dtype: type[Numeric] = cutlass.Float16) -> Int32:
    """The larger of each two magnitudes in two words of two 16-bit floats; of NaN and a number, the number. `word`
    holds magnitudes already."""
    return ptx.max_x2(word, ptx.abs_x2(other, dtype), dtype)


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """How probabilities enter the product with values that are stored as `values`: as `dtype`, times 2 ** `bias`.

    A row's maximum may grow by `slack` powers of two before what was computed with the old one is rescaled, so
    probabilities reach 2 ** (bias + slack), which the type must hold. The bias cancels: the row's sum has it, too. It
    moves the smallest normal number of e4m3 (2 ** -6), or of float16 (2 ** -14), away from probabilities that matter.

    `heavy`: the maximum may grow by less where the key that it grows by would have this share or more of the row's sum.
    8 bits round a probability by up to 1/16, unless it is a power of two, as the maximum's is. Where few keys have the
    weight, outputs would be off by that much; where many do, errors cancel, and growth is frequent
    (kernels/log/hopper-decode.md, 24)."""

    dtype: Dtype
    values: Dtype
    bias: int
    slack: float
    heavy: float | None = None

    @classmethod
    def of(cls, values: Dtype, widens: bool = False) -> Probabilities:
        """How probabilities enter the product with `values`. With 8 bits they are e4m3 whatever the values are: they
        need its precision more than the range of e5m2. widens: those of 8 bits are multiplied as float16."""
        if values.bits == 16:
            return cls(values, values, 0, 8)
        return cls(Dtype.FP16, values, 10, 4) if widens else cls(Dtype.E4M3, values, 6, 2, 1 / 16)

    @property
    def operands(self) -> tuple[Dtype, Dtype]:
        """Types of the value product's operands: of probabilities and of values."""
        return self.dtype, self.values if self.values.bits == self.dtype.bits else self.dtype

    def growth(self, total: Float32, shares: int) -> Float32:
        """The powers of two by which a score may exceed its row's reference before that moves. `total` is the sum of
        one of `shares` shares of the row's exponentials, all about as large."""
        if self.heavy is None:
            return Float32(self.slack)
        one = 2.0**self.bias
        heavy = total * (shares * self.heavy)
        largest = cute.arch.fmax(cute.arch.fmin(heavy, one * 2.0**self.slack), one)
        return cute.math.log2(largest, fastmath=True) - self.bias
