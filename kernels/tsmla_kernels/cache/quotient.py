"""Quotients for rows of a cache without a division: one of float32 that is rounded to nearest takes some ten
instructions, a branch, and a routine for numbers that few rows have.

A reciprocal is known as the sum of two float32, and an element takes a product and a fused multiply-add. Of what
becomes e4m3 it only matters on which side of a number of 5 significant bits the quotient lies, or that it is this
number; there, the result is that of the division. It was tried for the significands of all scales (2^23) with those of
all bf16 and of all fp16. So were all bf16 with all scales that a row of bf16 can have, for the bf16 of their quotients,
and all bf16 and fp16 for their 448ths.
`tests/host/test_quotient.py` tries some again."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_
from tsmla.identity.row_format import LARGEST_E4M3

_LARGE = 2.0**64
"""Scale from which on the second part of its reciprocal would be subnormal."""
_LEAST_LOW = 2.0**-60
"""The second part of an exact reciprocal, of the first: it changes no sum."""
_UP = 2.0**32
"""Factor of small elements, so that what a reciprocal's second part adds to them is not lost."""
_SEVENTH = float.fromhex("0x1.249248p-3")
"""The last float32 below 1 / 7."""


class Reciprocal(NamedTuple):
    """A reciprocal in two parts: 1 / scale = factor * (high + low). high is not above it, so that low is positive: then
    zeros keep their signs, and infinite elements stay infinite."""

    factor: Float32
    high: Float32
    low: Float32


def reciprocal_of(scale: Float32) -> Reciprocal:
    """The reciprocal of a positive normal number; 0 for infinity. Both parts are the same for an approximation above it
    and one below it, of less than 2^-23 of it."""
    factor = Float32(select_(scale >= _LARGE, Float32(1 / _LARGE), Float32(1.0)))
    scale = scale * factor
    near = cute.arch.rcp_approx(scale)
    next_up = Int32(select_(cute.math.fma(-near, scale, Float32(1.0)) < 0.0, Int32(0), Int32(1)))
    above = near.bitcast(Int32) + next_up
    high = (above - 1).bitcast(Float32)
    low = cute.math.fma(-high, scale, Float32(1.0)) * above.bitcast(Float32)
    return Reciprocal(factor, high, cute.arch.fmax(low, high * _LEAST_LOW))


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


def short_quotients(values: cute.TensorSSA, reciprocal: Reciprocal) -> cute.TensorSSA:
    """values / scale as float32, such that their bf16 are those of a division rounded to float32. values: bf16. scale:
    of a row of bf16, above 2^-96."""
    numbers = values.to(Float32)
    small = cute.math.abs(numbers) < 1.0
    found = quotients(cute.where(small, numbers * _UP, numbers), reciprocal)
    return cute.where(small, found * (1 / _UP), found)


def of_largest_e4m3(value: Float32) -> Float32:
    """value / 448, rounded to nearest, of a bf16 or fp16 that is not below 0."""
    sevenths = cute.math.fma(value, Float32(_SEVENTH), value * (1 / 7 - _SEVENTH))
    return sevenths * (7 / LARGEST_E4M3)
