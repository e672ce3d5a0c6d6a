"""The forms in which rows of partial results are kept, and what brings a row into the range of float16."""

from __future__ import annotations

import dataclasses
import enum
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of
from tsmla.identity.variant import Dtype

from ..parts.precision import larger_magnitudes
from ..parts.warp import QUAD

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
