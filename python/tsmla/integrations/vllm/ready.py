"""Loads kernels and reserves workspace before vLLM captures graphs.

Both happen when the model is built, before vLLM's profile run, so that it counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import current_workspace_manager

from tsmla.prepare import warmup
from tsmla.row_format import RowFormat
from tsmla.variant import Arch, DecodeVariant, Dtype, PackVariant, PrefillVariant, ReadCacheVariant, Variant
from tsmla.workspace import decode_workspace_size

from . import served

_MANY_REQUESTS = 1 << 16
"""A batch beyond which workspaces grow no more: every SM has shares of two requests by then."""


def arch() -> Arch | None:
    """Return the architecture of this process's GPU; None without one that has kernels."""
    return served.arch_of(current_platform.get_device_capability()) if current_platform.is_cuda() else None


def decode_kernels(dtype: Dtype, out_dtype: Dtype, row: RowFormat, lse: bool) -> None:
    """Load the decode kernel, and, where rows have scales, the kernel that reads such rows for prefills over
    context."""
    if (found := arch()) is None:
        return
    variants: list[Variant] = [DecodeVariant(found, dtype, out_dtype, lse, row)]
    if row.scales is not None:
        variants.append(ReadCacheVariant(found, dtype, row))
    _load(variants)


def prefill_kernels(dtype: Dtype, out_dtype: Dtype, dims: tuple[int, int, int], packed_from: Dtype | None) -> None:
    """Load the prefill kernels for new tokens without and with context, for the context, and the pack of an FP8
    prefill."""
    if (found := arch()) is None:
        return
    nope, rope, value = dims
    kinds = ((True, False), (True, True), (False, True))
    variants: list[Variant] = [
        PrefillVariant(found, dtype, out_dtype, nope + rope, value, causal, lse) for causal, lse in kinds
    ]
    if packed_from is not None:
        variants.append(PackVariant(found, packed_from, dtype, nope, rope, value))
    _load(variants)


_loaded: set[Variant] = set()
"""Variants that are loaded: every layer asks for the same ones."""


def _load(variants: Iterable[Variant]) -> None:
    missing = [variant for variant in variants if variant not in _loaded]
    warmup(missing)
    _loaded.update(missing)


def workspace(heads: int, longest_q: int, device: torch.device) -> torch.Tensor:
    """Return memory for any decode of this many heads and up to `longest_q` query tokens a request.

    It is vLLM's scratch memory, which other layers use in turn, and of which each micro-batch has its own.
    """
    shape = (workspace_bytes(heads, longest_q, device),)
    return current_workspace_manager().get_simultaneous((shape, torch.int8))[0]


@functools.cache
def workspace_bytes(heads: int, longest_q: int, device: torch.device) -> int:
    return max(
        decode_workspace_size(_MANY_REQUESTS, q, heads, None, device, varies=varies)
        for q in range(1, longest_q + 1)
        for varies in (False, True)
    )


def longest_decode(vllm_config: Any, threshold: int) -> int:
    """Return the most query tokens of a request that vLLM may decode: the threshold, or what speculation needs."""
    speculation = vllm_config.speculative_config
    tokens = 0 if speculation is None else speculation.num_speculative_tokens or 0
    return max(threshold, 1 + 2 * tokens)
