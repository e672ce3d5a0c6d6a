"""Rows with a scale each, as `tsmla selftest` makes them: the tensors that hold them, and the numbers of these."""

from __future__ import annotations

import torch

from ..row_format import LARGEST_E4M3
from ..support import LATENT_DIM

Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def stored(numbers: torch.Tensor) -> Stored:
    """Latent piece, rope piece and scales, powers of two, of rows [.., 576]. What is NaN makes its row's scale NaN."""
    latent, rope = numbers[..., :LATENT_DIM].float(), numbers[..., LATENT_DIM:].float()
    largest = latent.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, torch.exp2(torch.ceil(torch.log2(largest / LARGEST_E4M3))))
    each = scales[..., None]
    return (latent / each).to(torch.float8_e4m3fn), (rope / each).to(torch.bfloat16), scales


def numbers_of(rows: Stored) -> torch.Tensor:
    """[.., 576] bf16, which holds each of them exactly."""
    latent, rope, scales = rows
    return (torch.cat((latent.float(), rope.float()), -1) * scales[..., None]).to(torch.bfloat16)
