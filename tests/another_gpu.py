"""Tensors that say they are on another GPU than the rest, for tests without any."""

from __future__ import annotations

from typing import Any

import torch


def on_another_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with all tensors there."""
    return {n: x.as_subclass(_OnAnotherGpu) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


class _OnAnotherGpu(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 1))

    def get_device(self) -> int:
        return 1
