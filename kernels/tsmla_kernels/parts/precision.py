"""Element types as data: what the DSL calls each dtype of a variant."""

from __future__ import annotations

import dataclasses
import enum
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Vector
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of
from tsmla.identity.variant import Dtype

from . import ptx
from .warp import QUAD

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


LIFTED_COLUMNS = 128
LIFTED_TO = 2.0**14
"""Less than half of the largest float16: lifted rows reach from here to twice as much."""
LEAST_LIFTED = 2.0**-110
"""Largest magnitude of a row below which it is lifted no further, so that neither the power nor its inverse leaves the
normal numbers."""


class Lifted(enum.Enum):
    """Which of a row's four 128-column blocks share a factor. WHOLE_ROW: all. EVEN_AND_ODD: 0, 2 and 1, 3. NONE: one
    each. Value: index of block 1's factor, and of block 2's."""

    WHOLE_ROW = 0, 0
    EVEN_AND_ODD = 1, 0
    NONE = 1, 2

    @property
    def factors(self) -> int:
        """Factors that a row of four blocks has."""
        return 1 + sum(self.value)

    def of(self, block: int) -> int:
        """Index of a block's factor."""
        second, third = self.value
        return block % 2 * second + block // 2 * third


@dataclasses.dataclass(frozen=True)
class PartialRows:
    """The form in which rows of partial results are kept: `dtype`, times 2 ** `bias`, which the combine takes out
    again.

    `in_quads`: each 32 columns are stored in the order in which a quad holds them in wgmma's accumulator: of four
    blocks of four times two columns, number l of block m as number m of block l. A lane then stores 16 bytes, and a
    quad two sectors.

    `lifted`: blocks of LIFTED_COLUMNS columns have factors that make them fit in float16, which of them share one
    `Lifted` says; what takes a factor out again lies beside the row's LSE. Where the largest value is in the upper half
    of float16's exponents anyway, the factor only normalises the row. Elsewhere it also has a power of two that brings
    the largest finite value to LIFTED_TO or up to twice that. This lets float16 hold values of any magnitude: what is
    2^-14 of the largest has the bits of a bf16 at least."""

    dtype: type[Numeric] = Float32
    bias: int = 0
    in_quads: bool = False
    lifted: Lifted | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row in the workspace, with its LSE and the factors that take out by how much it is lifted."""
        return bytes_of(self.dtype.width, columns) + 4 * (1 + (self.lifted.factors if self.lifted else 0))

    @classmethod
    def of(cls, values: Dtype) -> PartialRows:
        """The form for averages of `values`, not lifted: float16 for e4m3 values, float32 for others.

        Averages of e4m3 values take half of the bytes as float16, which has 3 bits more than the bf16 that they end as.
        Probabilities are rounded up to less than twice, so averages are below 2 x 448, which times 2^6 is below 65,504;
        and what is lost of small ones is 2^-31, the smallest value being 2^-9. e5m2 reaches as far down as float16
        does: averages of its small values are lost."""
        return cls(cutlass.Float16, 6) if values is Dtype.E4M3 else cls()


def larger_magnitudes(word: Int32, other: Int32, dtype: type[Numeric] = cutlass.Float16) -> Int32:
    """The larger of each two magnitudes in two words of two 16-bit floats; of NaN and a number, the number. `word`
    holds magnitudes already."""
    return ptx.max_x2(word, ptx.abs_x2(other, dtype), dtype)


LEAST_FITTING, FLOAT16_INFINITE = 0x3400, 0x7C00
"""Bits of float16: of 1/4, where what is 2^-14 as large has the 9 bits of a bf16, and of infinity."""


@cute.jit
def fits_float16(largest: Int32) -> Boolean:
    """Whether the largest of a quad's magnitudes, of which each lane has two, lies where rows need not be lifted."""
    for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
        largest = larger_magnitudes(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    top = cutlass.max(largest & 0xFFFF, largest >> 16)
    return (top >= LEAST_FITTING) & (top < FLOAT16_INFINITE)


@cute.jit
def largest_finite(tensors: list) -> Float32:
    """The largest magnitude of finite numbers, NaN where none are. Times 0, what is not finite becomes NaN, which a
    maximum leaves out."""
    largest = [Float32(0.0) for _ in range(4)]
    for numbers in tensors:
        for i in cutlass.range_constexpr(cute.size(numbers)):
            value = numbers[i]
            finite = cute.math.absf(cute.math.fma(value, Float32(0.0), value))
            largest[i % 4] = cute.arch.fmax(largest[i % 4], finite)
    return cute.arch.fmax(cute.arch.fmax(*largest[:2]), cute.arch.fmax(*largest[2:]))


def lift_of(largest: Float32) -> tuple[Float32, Float32]:
    """The power of two that lifts values of up to this magnitude, as `PartialRows` says, and its inverse."""
    exponents = 0x7F800000
    one, to, least = (_exponent(value) for value in (1.0, LIFTED_TO, LEAST_LIFTED))
    exponent = cutlass.max(largest.bitcast(Int32) & exponents, Int32(least))
    down = exponent - (to - one)
    return Int32(2 * one - down).bitcast(Float32), down.bitcast(Float32)


def _exponent(power: float) -> int:
    """The bits of a power of two as a float32."""
    return struct.unpack("<i", struct.pack("<f", power))[0]
