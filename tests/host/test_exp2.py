"""The polynomial that replaces the exponential unit, in float32 as the kernel evaluates it, against float64."""

from __future__ import annotations

import numpy as np
from tsmla_kernels.parts.blackwell import exp2, row_softmax


def evaluate(x: np.ndarray) -> np.ndarray:
    """parts/blackwell/exp2.exp2_x2 step by step; every product and sum is rounded once, as an FMA is."""
    single = np.float32
    x = np.maximum(x.astype(single), single(exp2.SMALLEST))
    shifted = x + single(exp2._ROUND)
    f = x - (shifted - single(exp2._ROUND))
    value = np.full_like(x, single(exp2.POLYNOMIAL[0]))
    for coefficient in (*exp2.POLYNOMIAL[1:], 1.0):
        value = (value.astype(np.float64) * f + single(coefficient)).astype(single)
    with np.errstate(over="ignore"):
        bits = value.view(np.int32) + (shifted.view(np.int32) << 23)
    return bits.view(single)


def test_error_of_the_polynomial():
    x = np.linspace(-125, 100, 2_000_001).astype(np.float32)
    relative = np.abs(evaluate(x) / np.exp2(x.astype(np.float64)) - 1).max()
    assert relative < 3.2e-6, relative
    assert relative > 1e-6, "better than documented: say so"


def test_exact_where_it_matters():
    whole = np.arange(-126, 120).astype(np.float32)
    assert (evaluate(whole) == np.exp2(whole)).all(), "the row's maximum itself must give exactly its power of two"
    hidden = np.array([-np.inf, -1e30, -128.0, -127.0], dtype=np.float32)
    assert (evaluate(hidden) == 0).all(), "a hidden key must add nothing"


def test_emulated_pairs_are_as_many_as_the_schedule_says_and_spread():
    for emulated in range(row_softmax.EMULATION_PERIOD + 1):
        chosen = [pair for pair in range(64) if row_softmax._is_emulated(pair, emulated)]
        assert len(chosen) == 4 * emulated
        if emulated and emulated < row_softmax.EMULATION_PERIOD:
            gaps = {b - a for a, b in zip(chosen, chosen[1:], strict=False)}
            assert max(gaps) - min(gaps) <= 1 and 0 not in chosen
