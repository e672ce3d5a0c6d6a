"""Loads kernels and reserves workspace before vLLM captures graphs.

Both happen when the model is built, before vLLM's profile run, so that it counts them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import current_workspace_manager

from tsmla.identity.arch import Arch
from tsmla.integrations.shared.gpus import arch_of
from tsmla.integrations.shared.ready import workspace_bytes


def arch() -> Arch | None:
    """Return the architecture of this process's GPU; None without one that has kernels."""
    return arch_of(current_platform.get_device_capability()) if current_platform.is_cuda() else None


def workspace(heads: int, longest_q: int, device: torch.device) -> torch.Tensor:
    """Return memory for any decode of this many heads and up to `longest_q` query tokens a request.

    It is vLLM's scratch memory, which other layers use in turn, and of which each micro-batch has its own.
    """
    shape = (workspace_bytes(heads, longest_q, device),)
    return current_workspace_manager().get_simultaneous((shape, torch.int8))[0]


def longest_decode(vllm_config: Any, threshold: int) -> int:
    """Return the most query tokens of a request that vLLM may decode: the threshold, or what speculation needs."""
    speculation = vllm_config.speculative_config
    tokens = 0 if speculation is None else speculation.num_speculative_tokens or 0
    return max(threshold, 1 + 2 * tokens)
