"""Integer division in kernels."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def quotient(dividend: Int32, divisor: Int32) -> Int32:
    """Of numbers that are not negative, rounded down: half of the instructions that signed ones take."""
    return Int32(Uint32(dividend) // Uint32(divisor))


@cute.jit
def quotient_up(dividend: Int32, divisor: Int32) -> Int32:
    """The same rounded up."""
    return quotient(dividend + divisor - 1, divisor)


@cute.jit
def remainder(dividend: Int32, divisor: Int32) -> Int32:
    """What `quotient` leaves."""
    return Int32(Uint32(dividend) % Uint32(divisor))
