"""flash-attn-4's prefill of 192 and 128 dims, on Hopper and Blackwell, and of 256 on Blackwell; its attention over
chosen keys."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import torch

from . import reference
from .control import Control, Package, Peer, Values

PACKAGE = Package("flash-attn-4", "4.0.0b36", ("quack-kernels", "torch-c-dlpack-ext", "einops", "triton"))
LENGTHS = ((300, 70, 1), (300, 200, 130))
"""Queries and keys of sequences."""
NARROW, WIDE = (192, 128), (256, 256)
"""Columns of a query's head and of a value's."""
BF16, FP8 = Values(out=3e-3, lse=1e-4), Values(out=3e-2, lse=1e-4)


def _prefill(dtype: torch.dtype, causal: bool, dims: tuple[int, int]) -> Values:
    from flash_attn.cute import flash_attn_varlen_func

    lengths_q, lengths_kv = LENGTHS
    heads, scale = 2, dims[0] ** -0.5
    query, key, value = reference.packed(lengths_q, lengths_kv, heads, dtype, dims)
    with torch.no_grad():
        out, lse, *_ = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=reference.ends(lengths_q),
            cu_seqlens_k=reference.ends(lengths_kv),
            max_seqlen_q=max(lengths_q),
            max_seqlen_k=max(lengths_kv),
            softmax_scale=scale,
            causal=causal,
            return_lse=True,
        )
    sequences = zip(
        query.cpu().split(lengths_q), key.cpu().split(lengths_kv), value.cpu().split(lengths_kv), strict=True
    )
    return reference.compared(out, lse.T, [reference.attention(*one, scale, causal) for one in sequences])


def controls() -> list[Control]:
    found = [
        Control(
            f"prefill, {name}, {'causal' if causal else 'full'}",
            PACKAGE,
            arch,
            functools.partial(_prefill, dtype, causal, dims),
            limits,
        )
        for arch, dtype, name, causal, limits, dims in (
            ("sm_90a", torch.bfloat16, "bf16", True, BF16, NARROW),
            ("sm_90a", torch.bfloat16, "bf16", False, BF16, NARROW),
            ("sm_100a", torch.bfloat16, "bf16", True, BF16, NARROW),
            ("sm_100a", torch.bfloat16, "bf16, 256 dims", True, BF16, WIDE),
            ("sm_100a", torch.float8_e4m3fn, "fp8", False, FP8, NARROW),
        )
    ]
    for heads, name in ((128, "decode, bf16, chosen keys"), (64, "decode, bf16, chosen keys, 64 heads")):
        chosen = functools.partial(_chosen, heads)
        found.append(Control(name, PACKAGE, "sm_100a", chosen, BF16, lenient_tensor=True))
    return found


def _fixed(
    dtype: torch.dtype, dims: tuple[int, int], causal: bool, sequences: int, queries: int, keys: int, heads: int
) -> None:
    """Call the entry for sequences of one length, without LSE, as its authors time it."""
    from flash_attn.cute import flash_attn_func

    with torch.no_grad():
        flash_attn_func(*reference.batched(sequences, queries, keys, heads, dims, dtype), causal=causal)


@contextlib.contextmanager
def _in_groups_of(heads: int, pairs: Any) -> Iterator[None]:
    """Have one CTA take the 64 heads of a token, whatever their number would choose, and a pair 128.

    Pairs take the tiles of their own number: to give them those of others, all of their threads arrive at the cluster's
    barrier twice in one phase.
    """
    made = pairs.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named | {"use_clc_scheduler": False})

    choice = mock.patch.dict(os.environ, FLASH_ATTENTION_MLA_1CTA=str(int(heads == 64)))
    with choice, mock.patch.object(pairs, "__init__", init):
        yield


def _gathered(query: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [tokens, heads, 512] and the natural LSE [tokens, heads].

    query: [tokens, 64 or 128 heads, 576]. rows: [keys, 576]. indices: [tokens, top_k], a multiple of 128 keys.
    """
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.interface import FlashAttentionMLAForwardSm100

    latent, rope = query.split((512, 64), -1)
    values, keys = rows[:, None].split((512, 64), -1)
    with torch.no_grad(), _in_groups_of(query.shape[1], FlashAttentionMLAForwardSm100):
        out, lse, *_ = flash_attn_func(
            rope[None].contiguous(),
            keys[None].contiguous(),
            values[None].contiguous(),
            qv=latent[None].contiguous(),
            gather_kv_indices=indices[None],
            softmax_scale=576**-0.5,
            return_lse=True,
        )
    return out[0], lse[0]


def _chosen(heads: int) -> Values:
    query, rows, lists, expected = reference.choosing(tokens=3, heads=heads, keys=700, top_k=384)
    out, lse = _gathered(query, rows, lists)
    return reference.compared(out, lse, expected)


def _chosen_of(kernel_heads: int, requests: int, queries: int, keys: int, heads: int) -> None:
    """Call for tokens whose heads are filled up to those of a kernel."""
    _gathered(*reference.to_choose(requests * queries, kernel_heads, keys))


def peers() -> list[Peer]:
    """Return the kernels to model. On Blackwell two CTAs share products where nothing is hidden, and stay for many row
    tiles; with 256 dims they always share products, of 128 query rows each."""
    found = []
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        dims_of: dict[Literal["bf16", "e4m3"], list[tuple[int, int]]] = {"bf16": [(128, 128), NARROW], "e4m3": []}
        if arch != "sm_90a":
            dims_of["bf16"].append(WIDE)
            dims_of["e4m3"].append(WIDE)
        for name, dims in ((name, dims) for name, several in dims_of.items() for dims in several):
            dtype = torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn
            for causal in (False, True):
                rows = 128 if arch == "sm_90a" else 256 if causal or dims == WIDE else 512
                call = functools.partial(_fixed, dtype, dims, causal)
                found.append(
                    Peer(
                        PACKAGE,
                        "prefill",
                        arch,
                        name,
                        dims,
                        call,
                        causal,
                        rows,
                        persistent=arch != "sm_90a" and not causal,
                        section=50 * 2**20 if causal else 0,
                    )
                )
    for arch in ("sm_100a", "sm_103a"):
        for heads, named in ((128, 0), (64, 64)):
            call = functools.partial(_chosen_of, heads)
            found.append(Peer(PACKAGE, "decode", arch, "bf16", (512, 64), call, gathers=True, heads=named))
    return found
