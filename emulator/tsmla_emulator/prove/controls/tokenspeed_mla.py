"""tokenspeed-mla's prefill and decode of Blackwell. Its float16 and bfloat16 decode has a kernel for two CTAs only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tsmla.problems.pages import keys_in, page_tables

from . import reference
from .control import Control, Package, Peer, Values

PACKAGE = Package("tokenspeed-mla", "2.0.4", ("tokenspeed-triton",))
PREFILL_LENGTHS = ((300, 70, 1), (300, 200, 130))
"""Queries and keys of sequences: a CTA with two full tiles of queries, and one whose second tile is empty."""
DECODE_LENGTHS, PAGE = (700, 70, 128), 64
FULL_PAGES = (70, 704)
"""Keys of a decode's requests, whose page table has a column to spare, and of one whose last request fills the
table."""
FP8 = Values(out=3e-2, lse=1e-5)
BF16 = Values(out=3e-3, lse=1e-4)
FP16 = Values(out=4e-4, lse=1e-4)
"""Limits for float16, where weights of softmax have the inputs' type. Seen 2026-11-24: two thirds of these for `out`, a
tenth for the LSE."""


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the prefill on packs [tokens, heads, dim] of sequences of these lengths; return out and LSE."""
    from tokenspeed_mla import tokenspeed_mla_prefill

    return tokenspeed_mla_prefill(
        query,
        key,
        value,
        torch.tensor(lengths_kv, dtype=torch.int32, device="cuda"),
        reference.ends(lengths_kv),
        max(lengths_kv),
        len(lengths_kv),
        192**-0.5,
        is_causal=causal,
        return_lse=True,
        cum_seq_lens_q=reference.ends(lengths_q),
        max_seq_len_q=max(lengths_q),
    )


def _prefill(dtype: torch.dtype, causal: bool) -> Values:
    lengths_q, lengths_kv = PREFILL_LENGTHS
    heads, scale = 2, 192**-0.5
    query, key, value = reference.packed(lengths_q, lengths_kv, heads, dtype)
    out, lse = _ragged(query, key, value, lengths_q, lengths_kv, causal)
    sequences = zip(
        query.cpu().split(lengths_q), key.cpu().split(lengths_kv), value.cpu().split(lengths_kv), strict=True
    )
    return reference.compared(out, lse, [reference.attention(*one, scale, causal) for one in sequences])


def _paged(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: Sequence[int], workspace: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the decode; return out and LSE.

    query: [requests, tokens, heads, 576]. cache: [pages, page, 576].
    tables: a row of page numbers for each request. lengths: keys of each.
    workspace: bytes of scratch.
    """
    from tokenspeed_mla import tokenspeed_mla_decode

    return tokenspeed_mla_decode(
        query,
        cache,
        torch.empty(workspace, dtype=torch.int8, device="cuda"),
        512,
        64,
        tables.to("cuda"),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        max(lengths),
        576**-0.5,
        return_lse=True,
    )


def _decode(
    dtype: torch.dtype, heads: int, q_len: int, lengths: tuple[int, ...] = DECODE_LENGTHS, spare: int = 1
) -> Values:
    scale = 576**-0.5
    tables, pages = page_tables(lengths, PAGE, spare_columns=spare, unused=0)
    keys = torch.randn(pages, PAGE, 576, device="cuda")
    for table, length in zip(tables, lengths, strict=True):
        keys[table[: -(-min(length, reference.FAINT) // PAGE)].long()] *= 0.05
    cache = keys.to(dtype)
    query = (4 * torch.randn(len(lengths), q_len, heads, 576, device="cuda")).to(dtype)
    out, lse = _paged(query, cache, tables, lengths, 1 << 24)
    expected = [
        reference.attention(asked, seen[:, None], seen[:, None, :512], scale, causal=True)
        for asked, seen in zip(query.cpu(), keys_in(cache.cpu(), tables, lengths), strict=True)
    ]
    return reference.compared(out.flatten(0, 1), lse.flatten(0, 1), expected, reference.LOG2_E)


def controls() -> list[Control]:
    """Return the controls. On sm_100a, kernels for one CTA serve 8-bit calls of up to 64 rows (query tokens x
    heads)."""
    fp8, fp16, bf16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
    found = [
        Control(
            f"prefill, {name}, {'causal' if causal else 'full'}",
            PACKAGE,
            arch,
            functools.partial(_prefill, dtype, causal),
            limits,
        )
        for name, arch, dtype, causal, limits in (
            ("fp8", "sm_100a", fp8, True, FP8),
            ("fp8", "sm_100a", fp8, False, FP8),
            ("fp8", "sm_103a", fp8, True, FP8),
            ("bf16", "sm_100a", bf16, True, BF16),
        )
    ]
    full: dict[str, Any] = {"lengths": FULL_PAGES, "spare": 0}
    for name, arch, dtype, heads, q_len, limits, more in (
        ("fp8, one CTA", "sm_100a", fp8, 16, 4, FP8, {}),
        ("fp8, one CTA, page table full", "sm_100a", fp8, 16, 4, FP8, full),
        ("fp8, two CTAs", "sm_100a", fp8, 128, 1, FP8, {}),
        ("fp8, two CTAs, page table full", "sm_100a", fp8, 128, 1, FP8, full),
        ("fp8, two CTAs", "sm_103a", fp8, 128, 1, FP8, {}),
        ("fp16, two CTAs", "sm_100a", fp16, 128, 1, FP16, {}),
        ("bf16, two CTAs", "sm_100a", bf16, 128, 1, BF16, {}),
    ):
        call = functools.partial(_decode, dtype, heads, q_len, **more)
        found.append(Control(f"decode, {name}", PACKAGE, arch, call, limits))
    return found


def _prefill_of(
    dtype: torch.dtype, causal: bool, sequences: int, queries: int, keys: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (x.flatten(0, 1) for x in reference.batched(sequences, queries, keys, heads, (192, 128), dtype))
    return _ragged(query, key, value, [queries] * sequences, [keys] * sequences, causal)


def _decode_of(
    dtype: torch.dtype, requests: int, queries: int, keys: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the decode. Requests share pages: what keys hold does not matter to time."""
    held, pages = 64, -(-keys // PAGE)
    tables = (torch.arange(pages + 1, dtype=torch.int32) % held).repeat(requests, 1)
    cache = torch.randn(held, PAGE, 576, device="cuda").to(dtype)
    query = torch.randn(requests, queries, heads, 576, device="cuda").to(dtype)
    most_splits, row_bytes = 64, 4 * 513
    return _paged(query, cache, tables, [keys] * requests, requests * queries * heads * most_splits * row_bytes)


def peers() -> list[Peer]:
    found = []
    for arch in ("sm_100a", "sm_103a"):
        dtypes: dict[Literal["bf16", "e4m3"], torch.dtype] = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
        for name, dtype in dtypes.items():
            for causal in (False, True):
                call = functools.partial(_prefill_of, dtype, causal)
                found.append(Peer(PACKAGE, "prefill", arch, name, (192, 128), call, causal, rows=256))
            found.append(Peer(PACKAGE, "decode", arch, name, (512, 64), functools.partial(_decode_of, dtype)))
    return found
