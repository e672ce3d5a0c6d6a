"""Loads a model's kernels once, and says how much workspace its decodes may need, before graphs are captured."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from ...identity.arch import Arch
from ...identity.dtype import Dtype
from ...identity.variant import DecodeVariant, KeyMaskVariant, PackVariant, PrefillVariant, ReadCacheVariant, Variant
from ...operators.prepare import warmup
from ...operators.workspace import decode_workspace_size
from .decodes import Kinds

_MANY_REQUESTS = 1 << 16
"""A batch beyond which workspaces grow no more: every SM has shares of two requests by then."""


def decode_kernels(arch: Arch, kinds: Kinds, lse: bool, gathers: bool = False) -> None:
    """Load the decode kernel, and, where rows have scales, the kernel that reads such rows for prefills over context.

    gathers: it is the decode of chosen keys, which always writes an LSE.
    """
    variants: list[Variant] = [DecodeVariant(arch, kinds.query, kinds.out, lse or gathers, kinds.row, gathers)]
    if kinds.row.scales is not None:
        variants.append(ReadCacheVariant(arch, kinds.query, kinds.row))
    _load(variants)


def prefill_kernels(
    arch: Arch, dtype: Dtype, out_dtype: Dtype, dims: tuple[int, int, int], packed_from: Dtype | None
) -> None:
    """Load the prefill kernels for new tokens without and with context, for the context, and the pack of an FP8
    prefill. dims: nope, rope and value."""
    nope, rope, value = dims
    kinds = ((True, False), (True, True), (False, True))
    variants: list[Variant] = [
        PrefillVariant(arch, dtype, out_dtype, nope + rope, value, causal, lse) for causal, lse in kinds
    ]
    if packed_from is not None:
        variants.append(PackVariant(arch, packed_from, dtype, nope, rope, value))
    _load(variants)


def masked_kernels(prefill: PrefillVariant, mask: KeyMaskVariant) -> None:
    """Load the prefill with a key mask and the maker of masks."""
    _load((prefill, mask))


_loaded: set[Variant] = set()
"""Variants that are loaded: every layer asks for the same ones."""


def _load(variants: Iterable[Variant]) -> None:
    missing = [variant for variant in variants if variant not in _loaded]
    warmup(missing)
    _loaded.update(missing)


@functools.cache
def workspace_bytes(heads: int, longest_q: int, device: torch.device) -> int:
    """Return the bytes that any decode of this many heads and up to `longest_q` query tokens a request needs."""
    return max(
        decode_workspace_size(_MANY_REQUESTS, q, heads, None, device, varies=varies)
        for q in range(1, longest_q + 1)
        for varies in (False, True)
    )
