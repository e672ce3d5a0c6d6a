"""What a row of a cache must hold, number by number in float64 and NumPy, and the numbers that it stands for."""

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


def codes(numbers: np.ndarray) -> np.ndarray:
    """The e4m3 code nearest to each number, ties to the even one, saturated; 0x7f for NaN."""
    numbers = np.asarray(numbers, np.float64)
    magnitudes = np.minimum(np.abs(numbers), 448.0)
    above = np.clip(np.searchsorted(_NUMBERS, magnitudes), 1, 126)
    down, up = magnitudes - _NUMBERS[above - 1], _NUMBERS[above] - magnitudes
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return np.where(np.isnan(numbers), 0x7F, nearest | np.where(np.signbit(numbers), 0x80, 0))


def scale_of(block: np.ndarray, whole_row: bool, rounded: bool) -> np.float32:
    """The scale of the numbers that share it."""
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
    if format in ("e4m3", "latent_e4m3"):
        return {"codes": codes(quotients(c if format.startswith("latent_") else key, scale))}
    if format == "snapmla":
        s = scale_of(c, True, rounded)
        return {"codes": codes(quotients(c, s)), "scales": np.array([s]), "rope": quotients(r, s)}
    scales = np.array([scale_of(block, False, rounded) for block in c.reshape(4, 128)], np.float32)
    divided = quotients(c.reshape(4, 128), scales[:, None]).ravel()
    return {"codes": codes(divided), "scales": scales}


def numbers(format: str, rows: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """[..., 576 or 512] in float64 that rows stand for, told by their bytes [..., bytes] in each of the cache's
    tensors."""
    first = rows["cache"].contiguous()
    if format.endswith("16"):
        return first.view(torch.float16 if format.endswith("fp16") else torch.bfloat16).double()
    if format.endswith("e4m3"):
        return first.view(E4M3).double() * torch.tensor(scale).double()
    latent = first[..., :512].contiguous().view(E4M3).double()
    if format == "snapmla":
        scales = rows["scale_cache"].contiguous().view(torch.float32).double()
        rope = rows["rope_cache"].contiguous().view(torch.bfloat16).double()
        return torch.cat([latent, rope], -1) * scales
    scales, rope = first[..., 512:528].contiguous().view(torch.float32), first[..., 528:].contiguous()
    return torch.cat([latent * scales.double().repeat_interleave(128, -1), rope.view(torch.bfloat16).double()], -1)
