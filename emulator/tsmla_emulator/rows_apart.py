"""Keys and queries of decodes whose rows lie in three tensors, latent, rope and scale: from numbers, and as numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tsmla.checks import TORCH_DTYPE_OF
from tsmla.row_format import LARGEST_E4M3, RowFormat


class Stored(NamedTuple):
    """[..., 512], [..., 64], and [...] float32, as the operator takes them."""

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor

    @property
    def numbers(self) -> torch.Tensor:
        """[..., 576], rounded as they are stored."""
        return torch.cat([self.latent.double(), self.rope.double()], -1) * self.scales.double()[..., None]


def stored(row: RowFormat, numbers: torch.Tensor) -> Stored:
    """Scales that bring the latent part of each row to the range of e4m3; NaN stays NaN."""
    latent, rope = numbers.float().split([piece.columns for piece in row.pieces], -1)
    scales = latent.abs().amax(-1) / LARGEST_E4M3
    scales = torch.where(scales == 0, 1.0, scales)
    types = (TORCH_DTYPE_OF[piece.dtype] for piece in row.pieces)
    parts = ((part / scales[..., None]).to(dtype) for part, dtype in zip((latent, rope), types, strict=True))
    return Stored(*parts, scales)
