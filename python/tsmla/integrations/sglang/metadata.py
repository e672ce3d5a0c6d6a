"""What a batch of SGLang's is to a decode: page tables and lengths, new for each batch or in a graph's memory."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of a batch, as `tsmla_decode` takes them.

    table: [requests, width] int32, the pages of each.
    lengths: [requests] int32, keys of each in this rank's cache, those of its query tokens included.
    totals: [requests] int32, keys of each over all ranks; None without context parallelism.
    longest: at least the most keys of a request.
    q_len: query tokens of each, or the most of them where `starts` says how many each has.
    starts: [requests + 1] int32, where the query tokens of each start; None where all have q_len.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    totals: torch.Tensor | None
    longest: int
    q_len: int = 1
    starts: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.table.shape[0]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the keys of requests lie in this rank's cache.

    slots: [requests of the pool, positions] int32, the slot of each key in a numbering that all ranks share.
    page: keys of a page. world, rank: ranks of decode context parallelism; key p of a request is on rank p % world, and
        `world` pages of `page` keys have consecutive slots.
    """

    slots: torch.Tensor
    page: int
    world: int = 1
    rank: int = 0

    @property
    def width(self) -> int:
        """Return the most pages of a request."""
        return -(-self.slots.shape[1] // self._span)

    @property
    def _span(self) -> int:
        """Positions of a request that a page holds keys for, on one rank or another."""
        return self.page * self.world

    def pages_of(self, keys: int) -> int:
        return min(-(-keys // self._span), self.width)

    def pages(self, requests: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the first pages of each request: [requests, columns]. Those behind a request's keys are arbitrary."""
        first = self.slots[:, :: self._span][:, :columns].index_select(0, requests)
        return torch.div(first, self._span, rounding_mode="floor")

    def local(self, totals: torch.Tensor) -> torch.Tensor:
        """Return how many of so many keys this rank has."""
        return torch.div(totals + (self.world - 1 - self.rank), self.world, rounding_mode="floor")


class GraphMemory:
    """Page tables and lengths in memory that stays where it is, for graphs of up to `requests` requests."""

    def __init__(self, layout: Layout, requests: int) -> None:
        device = layout.slots.device
        self._layout = layout
        self._table = torch.zeros(requests, layout.width, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self._totals = torch.zeros_like(self._lengths)

    def fill(self, requests: torch.Tensor, totals: torch.Tensor, columns: int, longest: int, q_len: int) -> Requests:
        """Write a batch, and return it as a graph sees it: with all columns of its table.

        requests: numbers in the pool. totals: keys of each. columns: pages that a request of this batch may have.
        longest: at least the most keys that a request of any batch has.
        """
        count = len(requests)
        table, lengths = self._table[:count], self._lengths[:count]
        table[:, :columns].copy_(self._layout.pages(requests, columns))
        if self._layout.world == 1:
            lengths.copy_(totals)
            return Requests(table, lengths, None, longest, q_len)
        all_keys = self._totals[:count]
        all_keys.copy_(totals)
        lengths.copy_(self._layout.local(totals))
        return Requests(table, lengths, all_keys, longest, q_len)


def described(
    layout: Layout,
    requests: torch.Tensor,
    totals: torch.Tensor,
    longest: int,
    q_len: int = 1,
    starts: torch.Tensor | None = None,
) -> Requests:
    """Describe a batch that runs once. requests: numbers in the pool. totals: keys of each."""
    table = layout.pages(requests, layout.pages_of(longest))
    totals = totals.to(torch.int32)
    if layout.world == 1:
        return Requests(table, totals, None, longest, q_len, starts)
    return Requests(table, layout.local(totals), totals, longest, q_len, starts)


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each of several runs starts, and where the last ends: [runs + 1] int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
