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


class ScaleDtype(str, enum.Enum):
    """Type of the scales in a row: a float32, or the eight bits of a power of two."""

    FP32 = "float32"
    UE8M0 = "ue8m0"

    __str__ = str.__str__

    @property
    def bits(self) -> int:
        return 8 if self is ScaleDtype.UE8M0 else 32


def bytes_of(bits: int, elements: int = 1) -> int:
    """Bytes of so many elements of `bits` bits without gaps; ValueError where they are not whole bytes."""
    if bits * elements % 8:
        raise ValueError(f"{elements} elements of {bits} bits are not whole bytes")
    return bits * elements // 8
