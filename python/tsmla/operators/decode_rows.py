"""Caches of `tsmla_decode` whose rows are not the usual ones of the query's dtype: "fp8_ds_mla" and "snapmla", and the
latter's query; rows without a rope piece."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import ArgumentError
from ..identity.call import DECODE, QUANTIZE_Q
from ..identity.dtype import Dtype
from ..identity.row_format import ROWS, RowFormat, latent_row
from .quantize_q import mla_quantize_q
from .written import Given

ROW = ROWS["snapmla"]
"""The only row format that lies in three tensors."""
WHOLE = ROWS["fp8_ds_mla"]
"""The only row format with scales that lies in one tensor. Its width tells it: no other 8-bit row is so wide."""
WIDTH = WHOLE.bytes
"""Width of such a row in 8-bit elements."""


def row_of(call: Given, dtype: Dtype) -> RowFormat | None:
    """Return the row format of a call's cache whose rows have scales, or no rope piece; None for rows of the query's
    dtype, which is `dtype`."""
    if call.qk_rope_head_dim == 0:
        return latent_row(dtype)
    if call.scale_cache is not None:
        return ROW
    cache = call.kv_cache
    eight_bits = isinstance(cache, torch.Tensor) and cache.dtype is torch.float8_e4m3fn
    return WHOLE if call.rope_cache is None and eight_bits and _is_wide(cache) else None


def _is_wide(cache: torch.Tensor) -> bool:
    return not cache.is_nested and cache.shape[-1:] == (WIDTH,)


def quantised(query: Any, q_pe: Any, query_scales: Any, enable_pdl: Any) -> tuple[Any, Any, Any]:
    """Return the query for a cache of "snapmla" rows: e4m3 latent piece, bf16 rope piece, a scale for each token and
    head.

    A bf16 query is quantised by a launch of its own, into memory allocated here.
    """
    if query_scales is None and isinstance(query, torch.Tensor) and query.dtype is torch.bfloat16:
        try:
            return mla_quantize_q(query if q_pe is None else (query, q_pe), enable_pdl=enable_pdl)
        except ArgumentError as error:
            raise ArgumentError(str(error).replace(QUANTIZE_Q.name, DECODE.name, 1)) from None
    if query_scales is None:
        given = "one tensor" if q_pe is None else "a tuple of 2"
        raise ArgumentError(
            f"{DECODE.name}: query is {given}, and kv_cache has a scale for each key; it must be bf16 or (q_nope, "
            "q_pe, query_scales)"
        )
    tensors = isinstance(query, torch.Tensor) and isinstance(query_scales, torch.Tensor)
    if tensors and query_scales.shape[-1:] == (1,) and query_scales.ndim == query.ndim - 1 > 0:
        query_scales = query_scales.expand(*query_scales.shape[:-1], query.shape[-2])
    return query, q_pe, query_scales


def typed(cache: Any) -> Any:
    """View a cache of bytes as e4m3; return any other cache as it is."""
    if isinstance(cache, torch.Tensor) and cache.dtype is torch.uint8:
        return cache.view(torch.float8_e4m3fn)
    return cache


def typed_whole(cache: Any) -> Any:
    """View a one-tensor cache of bytes as e4m3 where its width is that of rows with scales."""
    if isinstance(cache, torch.Tensor) and _is_wide(cache):
        return cache.view(torch.float8_e4m3fn)
    return cache


def joined(query: Any, q_pe: Any, query_scales: Any) -> Any:
    """Return the pieces of a query as the argument that `tsmla_decode` takes: a tensor or a tuple."""
    pieces = tuple(piece for piece in (query, q_pe, query_scales) if piece is not None)
    return pieces if len(pieces) > 1 else query


def page_of_zeros(kv_cache: Any, rope_cache: Any, scale_cache: Any) -> Any:
    """Make a cache of one page of zeros, to stand for a cache without pages: a tensor map needs memory behind it."""
    latent, *rope = (x.new_zeros(1, *x.shape[1:]) for x in (kv_cache, rope_cache) if x is not None)
    scales = () if scale_cache is None else (scale_cache.new_ones(1, *scale_cache.shape[1:]),)
    return (latent, *rope, *scales) if rope else latent


def refuse_without_rope() -> NoReturn:
    """Raise the error for a cache with scales whose rows are said to have no rope piece."""
    raise ArgumentError(
        f"{DECODE.name}: kv_cache is a tuple of 3 and qk_rope_head_dim is 0; a cache of three, (cache, rope_cache, "
        f"scale_cache), has rows of {ROW}"
    )


def refuse_scales() -> NoReturn:
    """Raise the error for a query with scales and a cache without."""
    raise ArgumentError(
        f"{DECODE.name}: query is a tuple of 3, and kv_cache is not; query_scales go with a cache of three, (cache, "
        f"rope_cache, scale_cache), whose rows are {ROW}"
    )
