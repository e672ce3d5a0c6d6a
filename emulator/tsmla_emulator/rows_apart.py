"""Keys and queries of a decode from numbers [..., 576]: one tensor or, where rows lie apart, latent, rope and scale."""

from __future__ import annotations

from typing import Any

import torch
from tsmla.checks import TORCH_DTYPE_OF
from tsmla.row_format import LARGEST_E4M3
from tsmla.variant import DecodeVariant


def given(variant: DecodeVariant, numbers: torch.Tensor) -> Any:
    """As the operator takes them."""
    return _pieces(variant, numbers) if variant.row.apart else numbers.to(TORCH_DTYPE_OF[variant.dtype])


def rounded(variant: DecodeVariant, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers that the operator is then given."""
    if not variant.row.apart:
        return numbers.to(TORCH_DTYPE_OF[variant.dtype])
    *pieces, scales = _pieces(variant, numbers)
    return torch.cat([piece.double() for piece in pieces], -1) * scales.double()[..., None]


def _pieces(variant: DecodeVariant, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales bring the latent part of each row to the range of e4m3; NaN stays NaN."""
    pieces = numbers.float().split([piece.columns for piece in variant.row.pieces], -1)
    scales = pieces[0].abs().amax(-1) / LARGEST_E4M3
    scales = torch.where(scales == 0, 1.0, scales)
    dtypes = (TORCH_DTYPE_OF[piece.dtype] for piece in variant.row.pieces)
    return (*((x / scales[..., None]).to(dtype) for x, dtype in zip(pieces, dtypes, strict=True)), scales)
