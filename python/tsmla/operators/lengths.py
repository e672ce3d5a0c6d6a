"""Lengths that callers give in 64 bits, for kernels that read 32."""

from __future__ import annotations

import torch

from .checks import LARGEST_INT


def narrowed(lengths: torch.Tensor) -> torch.Tensor:
    """Clamp int64 lengths to int32 and return them as a strided view of their low words."""
    lengths = lengths.clamp(0, LARGEST_INT)
    return lengths.view(torch.int32)[::2]
