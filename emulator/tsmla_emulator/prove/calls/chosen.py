"""Decodes of chosen keys that `check` makes of a variant, and what they must give."""

from __future__ import annotations

import math

import torch
import tsmla
from tsmla.identity.support import LATENT_DIM, ROPE_DIM
from tsmla.identity.variant import DecodeVariant
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.lists import named_slots, random_lists, union_of
from tsmla.problems.prefill import rmse_of_rounding, weight_dtype
from tsmla.problems.rows import numbers_in, stored_as

from .decode import HOPPER_FEW_ROWS, given_cache, given_query, keys_given, query_row
from .reference import attention, judged, summed_as_hardware


def chosen(variant: DecodeVariant, heads: int, lengths: tuple[int, ...], sums: bool = False) -> tuple[str, str | None]:
    """Call a decode of chosen keys, and compare it with float64.

    A tenth of the indices, and the first of each list, name no key. Rows that no list names are NaN.

    lengths: of the lists, one for each query token.
    sums: see `decode`.
    """
    page, width, scale = 32, LATENT_DIM + ROPE_DIM, (LATENT_DIM + ROPE_DIM) ** -0.5
    tokens, top_k, slots = len(lengths), max(lengths), 32 * page
    indices = random_lists(tokens, top_k, (32, page), outside=0.1, front=1)
    named = named_slots(indices, slots, lengths)
    keys = torch.full((slots, width), math.nan, device="cuda")
    used = union_of(named).to("cuda")
    keys[used] = torch.randn(len(used), width, device="cuda")
    rows_of_keys = given_cache(variant, keys)
    numbers = keys_given(variant, rows_of_keys)
    row = query_row(variant)
    query = numbers_in(row, stored_as(row, 2 * torch.randn(tokens, heads, width, device="cuda")))
    out, lse = tsmla.tsmla_decode(
        given_query(variant, query),
        given_cache(variant, keys.view(-1, page, width)),
        torch.empty(tsmla.decode_workspace_size(tokens, 1, heads, top_k), dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        None,
        None,
        None,
        scale,
        enable_pdl=True,
        return_lse=True,
        indices=indices.to("cuda", torch.int32),
        topk_length=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )
    narrow = sums and not (heads <= HOPPER_FEW_ROWS and variant.row.apart)
    parts = []
    for token in range(tokens):
        slots_of = named[token].to("cuda")
        own, seen = query[token : token + 1], numbers[slots_of][:, None]
        given = tuple(x[slots_of] for x in rows_of_keys) if variant.row.apart else rows_of_keys[slots_of]
        made = summed_as_hardware(variant.arch, given_query(variant, own), given) if narrow else None
        parts.append(attention(own, seen, seen[..., :LATENT_DIM], scale, False, made=made))
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    dtype = TORCH_DTYPE_OF[variant.dtype]
    step = rmse_of_rounding(weight_dtype(variant.arch, dtype), out.dtype)
    measured, error = judged(out, lse, expected, expected_lse / math.log(2), step, dtype)
    return f"{heads} heads: {measured}", error and f"{heads} heads: {error}"
