"""Quotients for rows of a cache, whose elements become e4m3, without a division of each.

A division of float32 that is rounded to nearest takes some ten instructions and a branch. Here 1 / scale is known as
the sum of two float32, once for all elements of a scale, and an element takes a product and a fused multiply-add. Which
e4m3 an element becomes depends only on which side of a number of 5 significant bits the quotient lies, or that it is
this number; there, the result is that of the division. It was tried for the significands of all scales (2^23) with
those of all bf16 and of all fp16; other quotients may differ in their last bit, and 7 of the 2^30 with bf16 do.
`tests/host/test_quotient.py` tries some again."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

_LARGE = 2.0**64
"""Scale from which on the second part of its reciprocal would be subnormal."""
_LEAST_LOW = 2.0**-149


class Reciprocal(NamedTuple):
    """A reciprocal in two parts: 1 / scale = factor * (high + low). high is not above it, so that low is positive: then
    zeros keep their signs, and infinite elements stay infinite."""

    factor: Float32
    high: Float32
    low: Float32


def reciprocal_of(scale: Float32) -> Reciprocal:
    """The reciprocal of a positive normal number; 0 for infinity."""
    factor = Float32(select_(scale >= _LARGE, Float32(1 / _LARGE), Float32(1.0)))
    scale = scale * factor
    nearest = Float32(1.0) / scale
    beyond = Int32(select_(cute.math.fma(-nearest, scale, Float32(1.0)) < 0.0, Int32(1), Int32(0)))
    high = (nearest.bitcast(Int32) - beyond).bitcast(Float32)
    low = cute.math.fma(-high, scale, Float32(1.0)) * nearest
    return Reciprocal(factor, high, cute.arch.fmax(low, _LEAST_LOW))


@cute.jit
def quotients(values: cute.TensorSSA, reciprocal: Reciprocal) -> cute.TensorSSA:
    """values / scale as float32, such that their e4m3 are those of a division rounded to float32."""
    numerators = cute.make_rmem_tensor(values.shape, Float32)
    numerators.store(values.to(Float32))
    if reciprocal.factor != 1.0:
        numerators.store(numerators.load() * reciprocal.factor)
    found = numerators.load()
    high, low = (cute.full_like(found, number) for number in (reciprocal.high, reciprocal.low))
    return cute.math.fma(found, high, found * low)
