"""A prefill call as its kernels are told of it: what they copy, and where rows go."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from ..parts.query import Map
from ..parts.row_end import Earlier, Ending, ending_of


class Copied(NamedTuple):
    """Tensor maps of the packs that are loaded: of each piece of queries and of keys, and of values."""

    q: tuple[Map, ...]
    k: tuple[Map, ...]
    v: Map


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
