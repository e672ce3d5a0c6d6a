"""A prefill call as its kernels are told of it: what they copy, and where rows go."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..parts.query import Map
from ..parts.row_end import Earlier, Ending, ending_of
from . import tma
from .tile_scheduler import QueryTile


class Copied(NamedTuple):
    """Tensor maps of the packs that are loaded: of each piece of queries and of keys, and of values."""

    q: tuple[Map, ...]
    k: tuple[Map, ...]
    v: Map


def rows_of(copied: Copied, tile: QueryTile, kv_head: Int32) -> tuple:
    """The rows of a tile's head: of each piece of queries, of each piece of keys, and of values, (copy atom, rows)."""
    q, k = (
        tuple((atom, tma.head_rows(piece, head, span)) for atom, piece in pieces)
        for pieces, head, span in ((copied.q, tile.head, tile.q), (copied.k, kv_head, tile.kv))
    )
    return q, k, (copied.v.atom, tma.clipped_head_rows(copied.v.view, kv_head, tile.kv))


class PrefillResults(NamedTuple):
    """Where rows go and how they end: outputs [tokens, heads, dims], their LSE [tokens, heads], what the call says of
    the ends of rows, and the earlier results that they continue from."""

    out: cute.Tensor
    lse: cute.Tensor | None
    ending: Ending
    earlier: Earlier | None


def results_of(given, has_lse: bool) -> PrefillResults:
    """Collect, on the host, what a call's arguments, by name, say of its results. Only calls with LSE continue from
    earlier ones."""
    earlier = Earlier(given.merges, given.out) if has_lse else None
    return PrefillResults(given.out, given.lse, ending_of(given, given.q.shape[1]), earlier)
