"""Rows of a decode's cache for `tsmla selftest`: the tensors that hold them, and the numbers that these stand for."""

from __future__ import annotations

import torch

from ..identity.row_format import LARGEST_E4M3, RowFormat
from ..identity.support import LATENT_DIM
from ..operators.checks import TORCH_DTYPE_OF

Apart = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Stored = torch.Tensor | Apart


def stored_as(row: RowFormat, numbers: torch.Tensor) -> Stored:
    """Return rows [.., 576] of numbers as a cache of `row`s holds them, with powers of two for scales. Numbers behind
    those that a row has are left out."""
    if row.scales is None:
        return numbers[..., : row.columns].to(TORCH_DTYPE_OF[row.dtype])
    return stored(numbers) if row.apart else _whole(row, numbers)


def numbers_in(row: RowFormat, rows: Stored) -> torch.Tensor:
    """Return the numbers [.., columns] that stored rows stand for. Where rows have scales, bf16 holds them exactly."""
    if isinstance(rows, tuple):
        return numbers_of(rows)
    if row.scales is None:
        return rows
    codes, scales, rope = rows.split([LATENT_DIM, row.offset("rope") - LATENT_DIM, row.piece("rope").bytes], -1)
    factors = scales.contiguous().view(torch.float32)
    latent = codes.float().unflatten(-1, (row.scales_per_row, -1)) * factors[..., None]
    return torch.cat((latent.flatten(-2).to(torch.bfloat16), rope.contiguous().view(torch.bfloat16)), -1)


def random_numbers(*shape: int, magnitude: float, one_sign: bool) -> torch.Tensor:
    """Return normally distributed numbers of a magnitude in float32, or their magnitudes plus half of that."""
    numbers = torch.randn(shape, device="cuda") * magnitude
    return numbers.abs() + magnitude / 2 if one_sign else numbers


def _whole(row: RowFormat, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows [.., 656] of e4m3, with all that a key has side by side. NaN makes its scale NaN."""
    latent = numbers[..., :LATENT_DIM].float().unflatten(-1, (row.scales_per_row, -1))
    largest = latent.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, torch.exp2(torch.ceil(torch.log2(largest / LARGEST_E4M3))))
    codes = (latent / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rope = numbers[..., LATENT_DIM:].to(torch.bfloat16).contiguous()
    return torch.cat([x.view(torch.uint8) for x in (codes, scales, rope)], -1).view(torch.float8_e4m3fn)


def stored(numbers: torch.Tensor) -> Apart:
    """Return latent piece, rope piece and scales (powers of two) of rows [.., 576]. NaN makes its row's scale NaN."""
    latent, rope = numbers[..., :LATENT_DIM].float(), numbers[..., LATENT_DIM:].float()
    largest = latent.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, torch.exp2(torch.ceil(torch.log2(largest / LARGEST_E4M3))))
    each = scales[..., None]
    return (latent / each).to(torch.float8_e4m3fn), (rope / each).to(torch.bfloat16), scales


def numbers_of(rows: Apart) -> torch.Tensor:
    """Return the numbers [.., 576] of rows in pieces, in bf16, which holds each of them exactly."""
    latent, rope, scales = rows
    return (torch.cat((latent.float(), rope.float()), -1) * scales[..., None]).to(torch.bfloat16)
