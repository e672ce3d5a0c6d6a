"""Element types: what a variant's Dtype is on the device."""

from __future__ import annotations

import cutlass

from tsmla.variant import Dtype

_NUMERIC = {
    Dtype.BF16: cutlass.BFloat16,
    Dtype.FP16: cutlass.Float16,
    Dtype.E4M3: cutlass.Float8E4M3FN,
    Dtype.E5M2: cutlass.Float8E5M2,
}


def numeric(dtype: Dtype) -> type[cutlass.Numeric]:
    """The DSL's numeric type."""
    return _NUMERIC[dtype]
