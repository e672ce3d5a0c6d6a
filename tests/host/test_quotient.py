"""The quotients of `tsmla_kernels.cache.quotient`, step by step in NumPy: the e4m3 that divisions give.

The kernel itself is held against divisions in `tests/emulated/test_cache.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tsmla.identity.row_format import LEAST_AMAX, LEAST_SCALE

F32, WIDE = np.float32, np.longdouble
SCALES, SPECIAL = 20_000, 512


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: 64 bits hold the sum of a product of 32 bits and what is 24 bits smaller, and a remainder."""
    return (WIDE(a) * WIDE(b) + WIDE(c)).astype(F32)


def neighbours(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last float32 that is not above the reciprocal, and the next: rcp.approx.ftz.f32, off by less than a unit of
    the last place (PTX: 1 at most), gives one of them, but for powers of two, whose reciprocals it gives."""
    nearest = 1 / scale
    below = (nearest.view(np.int32) - (fma(-nearest, scale, np.ones_like(scale)) < 0)).astype(np.int32)
    return below.view(F32), (below + 1).view(F32)


def reciprocal(scale: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one = np.ones_like(scale)
    above = (near.view(np.int32) + ~(fma(-near, scale, one) < 0)).astype(np.int32)
    high = (above - 1).astype(np.int32).view(F32)
    return high, np.fmax(fma(-high, scale, one) * above.view(F32), high * F32(2.0**-60))


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
    high, low = reciprocal(scale, 1 / scale)
    for near in neighbours(scale):
        assert all(map(np.array_equal, reciprocal(scale, near), (high, low)))
    x = (F32(1) + np.arange(2 ** (bits - 1), dtype=F32) * F32(2.0 ** (1 - bits)))[:: 1 if bits == 8 else 7]
    got = fma(x, high, (x * low).astype(F32))
    assert np.array_equal(decision(got), decision(x / scale))
    assert not np.array_equal(decision(x * (1 / scale)), decision(x / scale)), "products alone would do"


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0, 2 - 2.0**-23])
def test_zeros_and_infinities_stay_what_they_are(scale):
    high, low = (torch.from_numpy(x) for x in reciprocal(np.array([scale], F32), 1 / np.array([scale], F32)))
    for x in (0.0, -0.0, float("inf"), -float("inf")):
        product = torch.tensor(x) * low
        assert torch.equal(torch.tensor(x) * high + product, torch.tensor([x]) / scale)
        assert torch.signbit(torch.tensor(x) * high + product) == torch.signbit(torch.tensor(x))


def sevenths(x: np.ndarray) -> np.ndarray:
    seventh = F32(float.fromhex("0x1.249248p-3"))
    return fma(x, seventh, x * F32(1 / 7 - float(seventh)))


def of_all_bits(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits that are not negative, as float32."""
    every = torch.arange(2**15, dtype=torch.int16).view(dtype).float()
    return every[~every.isnan()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_448ths_of_all_numbers_are_those_of_a_division(dtype):
    x = of_all_bits(dtype).numpy()
    got = sevenths(x) * F32(1 / 64)
    assert np.array_equal(np.fmax(got, F32(LEAST_SCALE)), np.fmax(x / F32(448), F32(LEAST_SCALE)))
    x = np.fmax(x, F32(LEAST_AMAX))
    assert np.array_equal(sevenths(x) * F32(1 / 64), x / F32(448))


def in_bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16().view(torch.int16)


def short_quotients(x: np.ndarray, scale: np.float32, up: float) -> np.ndarray:
    factor = F32(2.0**-64) if scale >= 2.0**64 else F32(1)
    one = np.array([scale * factor], F32)
    high, low = reciprocal(one, 1 / one)
    small = np.abs(x) < 1
    y = np.where(small, x * F32(up), x) * factor
    found = fma(y, high, y * low)
    return np.where(small, found * F32(1 / up), found)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_all_bf16_by_the_scale_of_a_row_become_the_bf16_of_a_division(power_of_two):
    every = of_all_bits(torch.bfloat16)
    x = torch.cat([every, -every]).numpy()
    drawn = every.numpy()[np.random.default_rng().integers(0, len(every), 60)]
    amax = np.concatenate([drawn, every[-3:].numpy(), F32([LEAST_AMAX, 0.87, 1, 448])])
    scales = np.fmax(amax, F32(LEAST_AMAX)) / F32(448)
    if power_of_two:
        scales = ((scales.view(np.int32) + 0x7FFFFF) & ~0x7FFFFF).astype(np.int32).view(F32)
    with np.errstate(all="ignore"):
        for scale in scales:
            assert torch.equal(in_bf16(short_quotients(x, scale, 2.0**32)), in_bf16(x / scale)), scale


def test_small_bf16_lose_their_last_bit_where_they_are_not_made_large():
    x, scale = F32([1.53125 * 2.0**-128]), F32(float.fromhex("0x1.24924ap-9"))
    assert not torch.equal(in_bf16(short_quotients(x, scale, 1.0)), in_bf16(x / scale))
