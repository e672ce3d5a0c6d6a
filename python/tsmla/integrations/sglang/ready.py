"""Loads kernels and allocates workspace when SGLang makes the backend, before it captures graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tsmla.integrations.shared.gpus import arch_of
from tsmla.integrations.shared.ready import decode_kernels, prefill_kernels, workspace_bytes
from tsmla.operators.checks import TORCH_DTYPES
from tsmla.operators.decode import SMALL_PAGE_SIZES

from .served import Model

MOST_ROWS = 128
"""Query tokens of a request beyond which no decode needs more workspace, whatever its number of heads."""


class Capability(NamedTuple):
    major: int
    minor: int


def capability() -> Capability | None:
    """Return this process's GPU's compute capability; None without a GPU."""
    return Capability(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def load(model: Model) -> None:
    """Load every kernel that a served model's batches may need."""
    arch, kinds = arch_of(capability()), model.decode_kinds
    if arch is None or kinds is None:
        return
    decode_kernels(arch, kinds, lse=model.world > 1, gathers=model.page in SMALL_PAGE_SIZES)
    if model.prefills:
        prefilled = TORCH_DTYPES[model.dtype]
        prefill_kernels(arch, prefilled, prefilled, model.dims, None)


def workspace(heads: int, device: torch.device) -> torch.Tensor:
    """Allocate memory for any decode of this many heads."""
    return torch.empty(workspace_bytes(heads, MOST_ROWS, device), dtype=torch.int8, device=device)
