"""What tsmla_decode must compute: which keys of a paged cache a query token sees, in the contract's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .plain import Plain

INT32 = (-(2**31), 2**31 - 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Sight(Plain):
    """The scalars that decide what a query token sees, as tsmla_decode takes them."""

    causal: bool = True
    window_left: int = -1
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def position(self, key: int) -> int:
        """The place of a key of this cache among the request's keys on all ranks."""
        interleave = self.cp_interleave
        return key // interleave * interleave * self.cp_world + self.cp_rank * interleave + key % interleave


def counted_length(seq_len: int, capacity: int) -> int:
    """The keys of a request: what `seq_lens` says, but none below 0 and no more than its row of the page table has."""
    return min(max(seq_len, 0), capacity)


def seen_keys(sight: Sight, length: int, causal_seq: int, visible: int, q_len: int, token: int) -> list[bool]:
    """For each of `length` keys whether query token `token` sees it. causal_seq: the request's keys over all ranks, as
    the tensor has it. visible: keys of this cache that the token may see at most."""
    last = max(min(causal_seq, INT32[1]), 0) - 1
    own = last - (q_len - 1 - token) if sight.causal else last
    earliest = 0 if sight.window_left < 0 else own - sight.window_left
    return [key < visible and earliest <= sight.position(key) <= own for key in range(length)]


def pages_of(table: Sequence[int], length: int, page: int) -> list[tuple[int, int]]:
    """(page number, row in it) of each of a request's first `length` keys."""
    return [(table[key // page], key % page) for key in range(length)]
