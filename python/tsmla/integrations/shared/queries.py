"""Queries as engines compute them and as `tsmla_decode` takes them."""

from __future__ import annotations

import torch

Query = torch.Tensor | tuple[torch.Tensor, ...]
"""[tokens, heads, 576], or its parts of 512 and 64."""


def in_requests(query: Query, q_len: int) -> Query:
    """View [tokens, heads, ..], or its parts, as [requests, q_len, heads, ..]."""
    if isinstance(query, tuple):
        return tuple(part.unflatten(0, (-1, q_len)) for part in query)
    return query.unflatten(0, (-1, q_len))
