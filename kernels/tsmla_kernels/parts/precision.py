"""Element types as data: what the DSL calls each dtype of a variant, and what attention probabilities become."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
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


class Probability(NamedTuple):
    """Probabilities, at most 1, are multiplied by 2 ** bias and rounded to `dtype` before the value product."""

    dtype: type[Numeric]
    bias: int


def probability(dtype: Dtype) -> Probability:
    """Of inputs of `dtype`. e4m3 has numbers from 2**-9 to 448 and more digits than e5m2, also beside e5m2 values;
    the bias brings probabilities down to 2**-17 into its range."""
    return Probability(numeric(Dtype.E4M3), 8) if dtype.bits == 8 else Probability(numeric(dtype), 0)
