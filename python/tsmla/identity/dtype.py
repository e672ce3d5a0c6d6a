"""Element types, named as in PTX. Standard library only."""

from __future__ import annotations

import enum


class Dtype(str, enum.Enum):
    """Element type of a tensor, named as in PTX."""

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"

    __str__ = str.__str__

    @property
    def bits(self) -> int:
        return 8 if self in (Dtype.E4M3, Dtype.E5M2) else 16
