"""Keys of requests in the pages of a cache, in random order, and the page tables that say where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .memory import bits

NO_PAGE = 2147480000
"""The page that tables name beyond a request's keys; no cache has it."""


def page_tables(
    lengths: Sequence[int], size: int, *, spare_pages: int = 0, spare_columns: int = 0, unused: int | None = NO_PAGE
) -> tuple[torch.Tensor, int]:
    """Draw page tables [requests, columns] int32, on the CPU, and return them with the number of the cache's pages.

    lengths: keys of each request.
    size: keys of a page.
    spare_pages: pages that are no request's.
    spare_columns: columns behind those of the longest request.
    unused: what tables hold beyond a request's keys; None for a spare page.
    """
    needed = [-(-length // size) for length in lengths]
    *own, spare = torch.randperm(sum(needed) + spare_pages).split([*needed, spare_pages])
    filler = int(spare[0]) if unused is None else unused
    tables = torch.full((len(needed), max(needed, default=0) + spare_columns), filler, dtype=torch.int32)
    for table, pages in zip(tables, own, strict=True):
        table[: len(pages)] = pages
    return tables, sum(needed) + spare_pages


def put_keys(cache: torch.Tensor, tables: torch.Tensor, keys: Iterable[torch.Tensor]) -> None:
    """Put the keys [keys, ..] of each request into a cache [pages, page, ..] where the tables say."""
    for table, own in zip(tables.cpu().long(), keys, strict=True):
        place = torch.arange(len(own))
        bits(cache)[table[place // cache.shape[1]], place % cache.shape[1]] = bits(own)


def keys_in(cache: torch.Tensor, tables: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the keys [keys, ..] of each request that a cache [pages, page, ..] holds where the tables say."""
    places = (torch.arange(length) for length in lengths)
    return [
        cache[table[place // cache.shape[1]], place % cache.shape[1]]
        for table, place in zip(tables.cpu().long(), places, strict=True)
    ]
