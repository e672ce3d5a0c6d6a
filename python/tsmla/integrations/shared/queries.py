"""Queries as engines compute them and as `tsmla_decode` takes them."""

from __future__ import annotations

import torch

Query = torch.Tensor | tuple[torch.Tensor, ...]
"""[tokens, heads, 576], or its parts of 512 and 64."""


def latent_of(query: Query) -> torch.Tensor:
    """Return the part of a query that is 512 wide, or the whole where it is in one: [tokens, heads, ..]."""
    return query[0] if isinstance(query, tuple) else query


def in_requests(query: Query, q_len: int) -> Query:
    """View [tokens, heads, ..], or its parts, as [requests, q_len, heads, ..]."""
    if isinstance(query, tuple):
        return tuple(_in_requests(part, q_len) for part in query)
    return _in_requests(query, q_len)


def _in_requests(part: torch.Tensor, q_len: int) -> torch.Tensor:
    return part.unsqueeze(1) if q_len == 1 else part.unflatten(0, (-1, q_len))
