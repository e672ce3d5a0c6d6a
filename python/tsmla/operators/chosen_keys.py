"""`tsmla_decode` of chosen keys (sparse attention): each query token becomes a request whose page table lists its keys,
in pages of one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..identity.call import DECODE
from .capture import is_capturing

_OPERATOR = DECODE.name
_LARGEST_INT = 2**31 - 1
_LEAST_KEPT = 1 << 14
_every_key: dict[tuple[torch.device, int], torch.Tensor] = {}
"""GPU and number of query tokens, in powers of two -> lengths beyond those of any list."""


class Requests(NamedTuple):
    """A call of chosen keys as one of requests of one query token each.

    shape: of the query tokens, [batch, q_len] or [tokens].
    """

    query: Any
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    out: torch.Tensor | None
    lse: torch.Tensor | None
    shape: torch.Size


def as_requests(
    query: Any, indices: Any, topk_length: Any, out: Any, lse: Any, instead: dict[str, Any], refused: dict[str, Any]
) -> Requests:
    """Return the requests of a call. instead: arguments that `indices` take the place of. refused: arguments that say
    which keys are seen, which is what `indices` say; each is None where it is left out."""
    for name, value in instead.items():
        if value is not None:
            raise ArgumentError(f"{_OPERATOR}: indices take the place of {name}, which must be None beside them")
    for name, value in refused.items():
        if value is not None:
            raise ArgumentError(
                f"{_OPERATOR}: {name} is given beside indices; which keys a query token sees, they alone say"
            )
    latent = query[0] if type(query) is tuple and query else query
    for name, tensor in (("query", latent), ("indices", indices)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{_OPERATOR}: {name} must be a tensor, not {type(tensor).__name__}")
    shape = latent.shape[:-2]
    if latent.ndim not in (3, 4):
        raise ArgumentError(
            f"{_OPERATOR}: query has shape {list(latent.shape)}; with indices it must be [batch, q_len, heads, 576] or "
            "[tokens, heads, 576]"
        )
    if indices.ndim != len(shape) + 1 or indices.shape[:-1] != shape:
        raise ArgumentError(
            f"{_OPERATOR}: indices has shape {list(indices.shape)}; it must be {[*shape, 'top_k']}, a list for each "
            "query token"
        )
    tokens, top_k = math.prod(shape), indices.shape[-1]
    return Requests(
        tuple(_one_token(piece, len(shape)) for piece in query) if type(query) is tuple else _one_token(query, len(shape)),
        indices.flatten(0, -2) if indices.ndim == 3 else indices,
        _lengths(topk_length, shape, tokens, indices.device),
        max(1, top_k),
        _result(out, "out", shape),
        _result(lse, "lse", shape),
        shape,
    )  # fmt: skip


def _one_token(piece: Any, dims: int) -> Any:
    """View rows [.., heads, columns], or scales [.., heads], of query tokens as those of requests of one token."""
    return (piece.flatten(0, 1) if dims == 2 else piece).unsqueeze(1)


def _lengths(given: Any, shape: torch.Size, tokens: int, device: torch.device) -> torch.Tensor:
    if given is None:
        return _all(tokens, device)
    if not isinstance(given, torch.Tensor):
        raise ArgumentError(f"{_OPERATOR}: topk_length must be a tensor, not {type(given).__name__}")
    if given.shape == shape:
        return given.flatten()
    if len(shape) == 2 and given.shape == shape[:1]:
        return given[:, None].expand(shape).reshape(-1)
    wanted = f"{list(shape)} or {list(shape[:1])}" if len(shape) == 2 else f"{list(shape)}"
    raise ArgumentError(f"{_OPERATOR}: topk_length has shape {list(given.shape)}; it must be {wanted}")


def _all(tokens: int, device: torch.device) -> torch.Tensor:
    """Return lengths beyond any list's. They are kept for good, so that calls launch nothing more and graphs may refer to
    them; what is made while a CUDA graph is captured belongs to the graph, and is not."""
    kept = _every_key.get((device, size := max(_LEAST_KEPT, 1 << (max(tokens, 1) - 1).bit_length())))
    if kept is None:
        kept = torch.full((size,), _LARGEST_INT, dtype=torch.int32, device=device)
        if not is_capturing():
            _every_key[device, size] = kept
    return kept[:tokens]


def _result(given: Any, name: str, shape: torch.Size) -> Any:
    """View a result that the caller gives as one of requests of one token each."""
    if not isinstance(given, torch.Tensor):
        return given
    if given.shape[: len(shape)] != shape:
        raise ArgumentError(f"{_OPERATOR}: {name} has shape {list(given.shape)}; it must begin with {list(shape)}")
    if len(shape) == 1:
        return given.unsqueeze(1)
    try:
        return given.view(-1, 1, *given.shape[2:])
    except RuntimeError:
        raise ArgumentError(
            f"{_OPERATOR}: {name} has strides {list(given.stride())}; with indices, those of its first two dimensions "
            "must be those of one"
        ) from None


def as_given(shape: torch.Size, *results: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return results of requests of one token each with the dimensions of the query tokens."""
    return tuple(None if x is None else x.view(*shape, *x.shape[2:]) for x in results)
