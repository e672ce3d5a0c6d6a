"""Element types as data: what the DSL calls each dtype of a variant."""

from __future__ import annotations

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
