"""The context of a prefill in chunks, as different vLLMs describe it: tokens that are in the cache already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_EVERYTHING = slice(None)


class Chunk(NamedTuple):
    """Some keys of the context of some requests, one request behind the other.

    requests, tokens: of the prefill's, as slices. starts_q, starts_kv: [requests + 1] int32, where each request's rows
    start among `tokens`, and among the chunk's keys. keys: how many. request_of: of each key. first: [requests], the
    position in the cache of each request's first key.
    """

    requests: slice
    tokens: slice
    starts_q: torch.Tensor
    starts_kv: torch.Tensor
    keys: int
    request_of: torch.Tensor
    first: torch.Tensor


def chunks(prefill: Any) -> Iterator[Chunk]:
    """Of vLLM's metadata of a prefill that has context, which is not distributed over ranks."""
    listed = getattr(prefill.chunked_context, "chunks", None)
    for chunk in range(len(prefill.chunked_context.seq_tot)) if listed is None else listed:
        yield chunk_of(prefill, chunk)


def chunk_of(prefill: Any, chunk: Any) -> Chunk:
    """chunk: an object of newer vLLMs, or a number of older ones, whose chunks concern every request."""
    if isinstance(chunk, int):
        context = prefill.chunked_context
        starts = prefill.query_start_loc, context.cu_seq_lens[chunk]
        keys = int(context.seq_tot[chunk])
        return Chunk(_EVERYTHING, _EVERYTHING, *starts, keys, context.token_to_seq[chunk], context.starts[chunk])
    starts = chunk.query_start_loc, chunk.cu_seq_lens
    return Chunk(
        chunk.request_slice, chunk.token_slice, *starts, chunk.num_context_tokens, chunk.token_to_seq, chunk.starts
    )
