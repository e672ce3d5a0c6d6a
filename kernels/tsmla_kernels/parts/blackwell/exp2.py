"""exp2 on the FMA pipes, two values at a time, for a part of the elements where the exponential unit is the bound.

2 ** x = 2 ** n * 2 ** f with n the nearest integer and f in [-1/2, 1/2]: n comes from adding 1.5 * 2 ** 23, whose unit
in the last place is 1; 2 ** f from a polynomial; n is added to the exponent field (Cody and Waite; on Blackwell:
FlashAttention-4, arXiv 2603.05451, with degree 3). The polynomial is of degree 4, constant term 1: fitted by Lawson's
iteration to the relative error, which is at most 2.9e-6; degree 3 (1e-4) is too coarse for an LSE good to 1e-5.
"""

from __future__ import annotations

from collections.abc import Generator

import cutlass.cute as cute
from cutlass import Float32, Int32

POLYNOMIAL = (0.009582853095201321, 0.055906424597164196, 0.24024098609910527, 0.6931241934177153)
"""Coefficients of f ** 4 .. f ** 1; tests/host/test_exp2.py states their error."""
SMALLEST = -127.0
"""Arguments below give 0: the smallest exponent field."""
_ROUND = 1.5 * 2.0**23


def exp2_x2(x: tuple[Float32, Float32]) -> Generator[None, None, tuple[Float32, Float32]]:
    """(2 ** x[0], 2 ** x[1]), for x up to 126; 0 for NaN. A generator, which yields after each step: every step needs
    the one before, so the caller puts other instructions between them."""
    x = (cute.arch.fmax(x[0], SMALLEST), cute.arch.fmax(x[1], SMALLEST))
    yield
    shifted = cute.arch.add_packed_f32x2(x, (_ROUND, _ROUND))
    yield
    whole = cute.arch.sub_packed_f32x2(shifted, (_ROUND, _ROUND))
    yield
    f = cute.arch.sub_packed_f32x2(x, whole)
    value = (Float32(POLYNOMIAL[0]), Float32(POLYNOMIAL[0]))
    for coefficient in (*POLYNOMIAL[1:], 1.0):
        yield
        value = cute.arch.fma_packed_f32x2(value, f, (coefficient, coefficient))
    yield
    return _scaled(value[0], shifted[0]), _scaled(value[1], shifted[1])


def _scaled(value: Float32, shifted: Float32) -> Float32:
    """value * 2 ** n, n being the low bits of `shifted`."""
    bits = value.bitcast(Int32) + shifted.bitcast(Int32) * (1 << 23)
    return bits.bitcast(Float32)
