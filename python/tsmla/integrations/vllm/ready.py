"""What must be there before vLLM captures graphs: kernels loaded, and workspace reserved.

Both are taken when the model is built, in front of vLLM's profile run, so that it counts them.
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
"""A workspace grows with the batch until every SM has parts of two requests; this is beyond that."""


def arch() -> Arch | None:
    """Of this process's GPU; None without one."""
    return served.arch_of(current_platform.get_device_capability()) if current_platform.is_cuda() else None


def decode_kernels(dtype: Dtype, out_dtype: Dtype, row: RowFormat, lse: bool) -> None:
    """Where rows have scales, also what reads them for prefills over earlier keys."""
    if (found := arch()) is None:
        return
    variants: list[Variant] = [DecodeVariant(found, dtype, out_dtype, lse, row)]
    if row.scales is not None:
        variants.append(ReadCacheVariant(found, dtype, row))
    _load(variants)


def prefill_kernels(dtype: Dtype, out_dtype: Dtype, dims: tuple[int, int, int], packed_from: Dtype | None) -> None:
    """New tokens with and without context behind them, context, and the pack of an FP8 prefill."""
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
"""Layers are many and ask for the same."""


def _load(variants: Iterable[Variant]) -> None:
    missing = [variant for variant in variants if variant not in _loaded]
    warmup(missing)
    _loaded.update(missing)


def workspace(heads: int, longest_q: int, device: torch.device) -> torch.Tensor:
    """Bytes for any decode of this many heads and of up to `longest_q` query tokens a request. They are vLLM's scratch
    memory, which other layers use in turn and which each of its micro-batches has for itself."""
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
    """Query tokens of a request that vLLM may count as a decode: the threshold, or what speculation needs."""
    speculation = vllm_config.speculative_config
    tokens = 0 if speculation is None else speculation.num_speculative_tokens or 0
    return max(threshold, 1 + 2 * tokens)
