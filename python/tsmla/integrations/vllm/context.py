"""The context of a prefill in chunks, as different vLLMs describe it: tokens that are in the cache already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_EVERYTHING = slice(None)


class Chunk(NamedTuple):
    """A chunk of context: some keys of some requests of a prefill, one request behind the other.

    requests, tokens: slices of the prefill's requests and tokens that the chunk concerns.
    starts_q: [requests + 1] int32, where each request's rows start among `tokens`.
    starts_kv: [requests + 1] int32, where each request's keys start in the chunk.
    keys: how many keys the chunk has. longest: the most of one request.
    request_of: the request of each key.
    first: [requests], the position in the cache of each request's first key.
    """

    requests: slice
    tokens: slice
    starts_q: torch.Tensor
    starts_kv: torch.Tensor
    keys: int
    longest: int
    request_of: torch.Tensor
    first: torch.Tensor


def chunks(prefill: Any) -> Iterator[Chunk]:
    """Yield the chunks of a prefill's context from vLLM's metadata. The context is not distributed over ranks."""
    listed = getattr(prefill.chunked_context, "chunks", None)
    for chunk in range(len(prefill.chunked_context.seq_tot)) if listed is None else listed:
        yield chunk_of(prefill, chunk)


def chunk_of(prefill: Any, chunk: Any) -> Chunk:
    """Return one chunk of a prefill's context.

    chunk: an object of newer vLLMs, or a number of older ones, whose chunks concern every request.
    """
    if isinstance(chunk, int):
        context = prefill.chunked_context
        starts = prefill.query_start_loc, context.cu_seq_lens[chunk]
        keys = int(context.seq_tot[chunk]), int(context.max_seq_lens[chunk])
        return Chunk(_EVERYTHING, _EVERYTHING, *starts, *keys, context.token_to_seq[chunk], context.starts[chunk])
    starts = chunk.query_start_loc, chunk.cu_seq_lens
    keys = chunk.num_context_tokens, chunk.max_seq_len
    return Chunk(chunk.request_slice, chunk.token_slice, *starts, *keys, chunk.token_to_seq, chunk.starts)
