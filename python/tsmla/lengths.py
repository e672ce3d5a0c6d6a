"""Lengths of 64 bits, as callers give them, in the 32 bits that kernels read."""

from __future__ import annotations

import torch

_LARGEST_INT = 2**31 - 1


def is_wide(lengths: torch.Tensor | None) -> bool:
    return lengths is not None and lengths.dtype is torch.int64


def narrowed(lengths: torch.Tensor) -> torch.Tensor:
    """int64 lengths as int32, those that it cannot hold as the nearest that it can: the low half of each, which comes
    first."""
    lengths = lengths.clamp(0, _LARGEST_INT)
    return lengths.view(torch.int32)[::2]
