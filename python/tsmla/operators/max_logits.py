"""The largest score of each query token and head over the keys that the token has chosen.

It is computed in torch: the kernels scale by a reference that may lag behind the largest score, and never know it.
"""

from __future__ import annotations

import torch

from ..identity.row_format import RowFormat
from ..identity.support import LATENT_DIM, ROPE_DIM
from . import decode_rows

_CHUNK_BYTES = 128 * 2**20
"""Bytes of keys, queries and scores in float32 of tokens that are computed together."""


def max_logits(
    query: torch.Tensor | tuple[torch.Tensor, ...],
    kv: torch.Tensor | tuple[torch.Tensor, ...],
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None,
) -> torch.Tensor:
    """Return the maximum over the chosen keys of softmax_scale * q k^T, [tokens, heads] float32; -inf for tokens
    without a key. Products and sums are in float32.

    `kv` is a paged cache as `tsmla_decode` takes it, and all arguments have been checked by the call that they were of.
    Beside the result, up to four times 128 MiB are allocated, or what one token takes if that is more, and nothing
    waits for the GPU.
    """
    kv = (_plain(kv[0]), *kv[1:]) if isinstance(kv, tuple) else _plain(kv)
    first = kv[0] if isinstance(kv, tuple) else kv
    slots, page_size = first.shape[0] * first.shape[1], first.shape[1]
    tokens, top_k = indices.shape
    places = torch.arange(top_k, device=indices.device)
    heads = query[0].shape[1] if isinstance(query, tuple) else query.shape[1]
    found = first.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    if not slots or not top_k:
        return found
    step = max(1, _CHUNK_BYTES // _token_bytes(top_k, heads))
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        listed = indices[chunk]
        there = (listed >= 0) & (listed < slots)
        if topk_length is not None:
            there &= places < topk_length[chunk, None]
        slot = torch.where(there, listed, 0)
        keys = _key_numbers(kv, slot // page_size, slot % page_size)
        with torch.autocast(keys.device.type, enabled=False):  # which would multiply in 16 bits
            scores = _query_numbers(query, chunk) @ keys.transpose(1, 2) * softmax_scale
        scores.masked_fill_(~there[:, None], -torch.inf)
        found[chunk] = scores.amax(-1)
    return found


def _plain(cache: torch.Tensor) -> torch.Tensor:
    """View a cache as [pages, page_size, columns], and bytes as e4m3."""
    return decode_rows.typed(cache.squeeze(1) if cache.ndim == 4 else cache)


def _token_bytes(top_k: int, heads: int) -> int:
    """Return the bytes of a token's keys, query and scores in float32."""
    return 4 * ((top_k + heads) * (LATENT_DIM + ROPE_DIM) + heads * top_k)


def _query_numbers(query: torch.Tensor | tuple[torch.Tensor, ...], chunk: slice) -> torch.Tensor:
    """Return the rows of some tokens, [tokens, heads, width] float32, times their scales where they have some."""
    if not isinstance(query, tuple):
        return query[chunk].float()
    numbers = torch.cat([piece[chunk].float() for piece in query[:2]], -1)
    return numbers * query[2][chunk][..., None] if len(query) > 2 else numbers


def _key_numbers(kv: torch.Tensor | tuple[torch.Tensor, ...], page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return what the rows of some keys stand for, [.., width] float32."""
    if isinstance(kv, tuple):
        numbers = torch.cat([piece[page, row].float() for piece in kv[:2]], -1)
        return numbers * kv[2][page, row][..., None] if len(kv) > 2 else numbers
    rows = kv[page, row]
    is_whole = kv.shape[-1] == decode_rows.WIDTH
    return _scaled_numbers(rows.view(torch.uint8), decode_rows.WHOLE) if is_whole else rows.float()


def _scaled_numbers(rows: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return the numbers of whole rows of bytes whose latent pieces have scales."""
    assert row.scales_offset is not None
    latent = rows[..., :LATENT_DIM].view(torch.float8_e4m3fn).float().unflatten(-1, (row.scales_per_row, -1))
    scales = rows[..., row.scales_offset :][..., : 4 * row.scales_per_row].view(torch.float32)
    rope = rows[..., row.offset("rope") :][..., : row.piece("rope").bytes].view(torch.bfloat16)
    return torch.cat(((latent * scales[..., None]).flatten(-2), rope.float()), -1)
