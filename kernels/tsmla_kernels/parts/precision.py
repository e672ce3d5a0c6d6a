"""Element types as data: what the DSL calls each dtype of a variant."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Float32, Int32, Vector
from cutlass.cutlass_dsl import Numeric
from tsmla.variant import Dtype

NUMERIC: dict[Dtype, type[Numeric]] = {
    Dtype.BF16: cutlass.BFloat16,
    Dtype.FP16: cutlass.Float16,
    Dtype.E4M3: cutlass.Float8E4M3FN,
    Dtype.E5M2: cutlass.Float8E5M2,
}


def numeric(dtype: Dtype) -> type[Numeric]:
    """The DSL's element type of a dtype."""
    return NUMERIC[dtype]


def packed_words(values: list[Float32], dtype: type[Numeric]) -> list[Int32]:
    """The values rounded to nearest, to `dtype`, and packed into 32-bit words, the first in the low bits."""
    return list(Vector.from_elements(tuple(values), Float32).to(dtype).bitcast(Int32).to_elements())


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """How probabilities enter the value product: as `dtype`, times 2 ** `bias`.

    A row's maximum may grow by `slack` powers of two before what was computed with the old one is rescaled, so values
    reach 2 ** (bias + slack), which the type must hold. The bias cancels: the row's sum has it, too. It moves the
    smallest normal number of e4m3 (2 ** -6) away from probabilities that matter.

    `heavy`: it may grow by less where the key that it grows by would have this share or more of the row's sum. 8 bits
    round a probability by up to 1/16, unless it is a power of two, as the maximum's is. Where few keys have the weight,
    outputs would be off by that much; where many do, errors cancel, and growth is frequent (kernels/NOTES.md).
    """

    dtype: Dtype
    bias: int
    slack: int
    heavy: float | None = None

    @classmethod
    def of(cls, dtype: Dtype) -> Probabilities:
        return cls(Dtype.E4M3, 6, 2, 1 / 16) if dtype.bits == 8 else cls(dtype, 0, 8)
