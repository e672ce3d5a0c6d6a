"""What a row of a cache must hold, number by number in float64 and NumPy, and what it is read as."""

from __future__ import annotations

import math

import numpy as np
import torch

E4M3 = torch.float8_e4m3fn
_CODES = torch.arange(127, dtype=torch.uint8)
_NUMBERS = _CODES.view(E4M3).double().numpy()
"""The numbers from 0 to 448 that e4m3 has, in the order of their codes."""


def quotients(values: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Rounded to float32, as one division there gives: float64 has more than twice as many bits, so that rounding twice
    is rounding once, but for subnormal results."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float32) / np.asarray(scale, np.float32)


def code(number: float) -> int:
    """The e4m3 code nearest to a number, ties to the even one, saturated; 0x7f for NaN."""
    if math.isnan(number):
        return 0x7F
    magnitude = min(abs(number), 448.0)
    above = int(np.searchsorted(_NUMBERS, magnitude))
    best = min((i for i in (above - 1, above) if 0 <= i < 127), key=lambda i: (abs(_NUMBERS[i] - magnitude), i % 2))
    return best | (0x80 if math.copysign(1.0, number) < 0 else 0)


def scale_of(block: np.ndarray, whole_row: bool, rounded: bool) -> np.float32:
    """Of the numbers that one scale is for."""
    known = [abs(float(x)) for x in block if not math.isnan(x)]
    largest = np.float32(max(known, default=0.0))
    if whole_row and largest == 0:
        return np.float32(1)
    limit = np.float32(448)
    scale = max(largest, np.float32(1e-26)) / limit if whole_row else max(largest / limit, np.float32(2.0**-126))
    if rounded and math.isfinite(scale):
        fraction, exponent = math.frexp(float(scale))
        scale = np.float32(math.ldexp(1.0, exponent - (fraction == 0.5)))
    return np.float32(scale)


def rotated(rope: np.ndarray, cos: np.ndarray, sin: np.ndarray, neighbours: bool) -> np.ndarray:
    """[64] float32 turned by 32 angles, pair by pair: every product and every sum rounded to float32."""
    turned = np.empty(64, np.float32)
    with np.errstate(all="ignore"):
        for i in range(32):
            first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + 32)
            x, y = rope[first], rope[second]
            turned[first] = x * cos[i] - y * sin[i]
            turned[second] = y * cos[i] + x * sin[i]
    return turned


def stored(key: np.ndarray, format: str, scale: float, rounded: bool) -> dict[str, np.ndarray]:
    """The numbers of one row ([576] float32) as the format has them: codes, scales, and quotients of the rope part."""
    c, r = key[:512], key[512:]
    if format == "e4m3":
        return {"codes": np.array([code(float(x)) for x in quotients(key, scale)])}
    if format == "snapmla":
        s = scale_of(c, True, rounded)
        return {"codes": np.array([code(float(x)) for x in quotients(c, s)]), "scales": np.array([s]),
                "rope": quotients(r, s)}  # fmt: skip
    scales = np.array([scale_of(block, False, rounded) for block in c.reshape(4, 128)], np.float32)
    divided = quotients(c.reshape(4, 128), scales[:, None]).ravel()
    return {"codes": np.array([code(float(x)) for x in divided]), "scales": scales}
