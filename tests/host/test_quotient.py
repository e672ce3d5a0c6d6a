"""The quotients of `tsmla_kernels.cache.quotient`, step by step in NumPy: the e4m3 that divisions give.

The kernel itself is held against divisions in `tests/emulated/test_cache.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

F32, WIDE = np.float32, np.longdouble
SCALES, SPECIAL = 20_000, 512


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: 64 bits hold the sum of a product of 32 bits and what is 24 bits smaller, and a remainder."""
    return (WIDE(a) * WIDE(b) + WIDE(c)).astype(F32)


def reciprocal(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one = np.ones_like(scale)
    nearest = one / scale
    high = (nearest.view(np.int32) - (fma(-nearest, scale, one) < 0)).astype(np.int32).view(F32)
    return high, np.maximum(fma(-high, scale, one) * nearest, F32(2.0**-149))


def decision(quotient: np.ndarray) -> np.ndarray:
    """On which side of numbers of 5 significant bits, or which of them: what an e4m3 follows from."""
    bits = quotient.view(np.int32)
    return bits >> 19 << 1 | (bits & 0x7FFFF != 0)


@pytest.mark.parametrize("bits", [8, 11], ids=["bf16", "fp16"])
def test_quotients_lie_where_those_of_divisions_do(bits):
    generator = np.random.default_rng()
    random = generator.integers(0, 2**23, SCALES)
    short = np.arange(2**7) << 16  # of few bits, by which numbers of few bits can be divided exactly
    significands = np.concatenate([random, np.arange(SPECIAL), 2**23 - 1 - np.arange(SPECIAL), short])
    scale = (significands.astype(np.int32) | 0x3F800000).view(F32)[:, None]
    high, low = reciprocal(scale)
    x = (F32(1) + np.arange(2 ** (bits - 1), dtype=F32) * F32(2.0 ** (1 - bits)))[:: 1 if bits == 8 else 7]
    got = fma(x, high, (x * low).astype(F32))
    assert np.array_equal(decision(got), decision(x / scale))
    assert not np.array_equal(decision(x * (1 / scale)), decision(x / scale)), "products alone would do"


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0, 2 - 2.0**-23])
def test_zeros_and_infinities_stay_what_they_are(scale):
    high, low = (torch.from_numpy(x) for x in reciprocal(np.array([scale], F32)))
    for x in (0.0, -0.0, float("inf"), -float("inf")):
        product = torch.tensor(x) * low
        assert torch.equal(torch.tensor(x) * high + product, torch.tensor([x]) / scale)
        assert torch.signbit(torch.tensor(x) * high + product) == torch.signbit(torch.tensor(x))
