"""What mla_kv_pack_quantize_fp8 must write, found among the 256 numbers that an 8-bit format has."""

from __future__ import annotations

import functools

import torch


def quantized(values: torch.Tensor, scale: float, fp8: torch.dtype) -> torch.Tensor:
    """Codes (uint8) of values x scale: one float32 product, clamped to the finite range, rounded to nearest even. NaN
    gives -1 in int16's terms, which stands for any NaN code."""
    # A product of a 16-bit and a float32 number is exact in float64, so that it is rounded once here, too.
    factor = torch.tensor(scale, dtype=torch.float64).float().double()
    product = (values.double() * factor).float().double()
    numbers, codes = _finite(fp8)
    magnitude = product.abs().clamp_max(float(numbers[-1]))
    above = torch.searchsorted(numbers, magnitude).clamp_max(len(numbers) - 1)
    below = (above - 1).clamp_min(0)
    to_above, to_below = numbers[above] - magnitude, magnitude - numbers[below]
    nearest = torch.where(
        (to_below < to_above) | ((to_below == to_above) & (codes[below] % 2 == 0)), codes[below], codes[above]
    )
    signed = nearest + 128 * product.signbit().to(torch.int16)
    return torch.where(product.isnan(), -1, signed).to(torch.int16)


@functools.cache
def _finite(fp8: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The finite numbers from 0 on, in order, and their codes."""
    codes = torch.arange(128, dtype=torch.uint8)
    numbers = codes.view(fp8).double()
    finite = numbers.isfinite()
    return numbers[finite], codes[finite].to(torch.int16)


def differences(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which elements of an 8-bit tensor are not what `quantized` says."""
    codes = got.view(torch.uint8).to(torch.int16)
    return torch.where(wanted == -1, ~got.double().isnan(), codes != wanted)
