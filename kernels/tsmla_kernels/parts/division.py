"""Integer division in kernels, of numbers that are not negative.

Dividing by a number that only the kernel knows takes some twenty instructions, and where a CTA begins these are in no
cache yet. For whatever the host knows it makes a `Divisor`: then a division is a product and a shift."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64, const_expr


class Divisor(NamedTuple):
    """A number from 1 to 2^31 - 1, and what floor(n / value) = (2 n x multiplier >> 32) >> shift needs for n < 2^31.

    With shift = ceil(log2(value)) and multiplier = floor(2^(31 + shift) / value) + 1, n x multiplier / 2^(31 + shift)
    is above n / value by less than 1 / value. (T. Granlund, P. Montgomery: Division by invariant integers using
    multiplication, PLDI 1994.)"""

    value: Int32
    multiplier: Uint32
    shift: Uint32


@cute.jit
def divisor_of(value: Int32) -> Divisor:
    """Prepare, on the host, division by `value`."""
    shift = Int64(0)
    while Int64(1) << shift < value:
        shift += 1
    return Divisor(Int32(value), Uint32((Int64(1 << 31) << shift) // value + 1), Uint32(shift))


@cute.jit
def quotient(dividend: Int32, divisor: Int32 | Divisor) -> Int32:
    """Divide, rounding down. Unsigned: half of the instructions that signed division takes."""
    if const_expr(isinstance(divisor, Divisor)):
        product = Uint64(Uint32(dividend) * 2) * Uint64(divisor.multiplier)
        result = Int32(Uint32(product >> 32) >> divisor.shift)
    else:
        result = Int32(Uint32(dividend) // Uint32(divisor))
    return result


@cute.jit
def quotient_up(dividend: Int32, divisor: Int32 | Divisor) -> Int32:
    """Divide, rounding up."""
    value = divisor.value if const_expr(isinstance(divisor, Divisor)) else divisor
    return quotient(dividend + value - 1, divisor)


@cute.jit
def remainder(dividend: Int32, divisor: Int32 | Divisor) -> Int32:
    """What `quotient` leaves."""
    if const_expr(isinstance(divisor, Divisor)):
        result = dividend - quotient(dividend, divisor) * divisor.value
    else:
        result = Int32(Uint32(dividend) % Uint32(divisor))
    return result
