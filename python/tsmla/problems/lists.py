"""Lists of chosen keys: slots of a cache drawn at random, indices that name no key among them, what lists name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

NOWHERE = -1, -(2**31), 2**31 - 1
"""Indices that name no key, whatever the cache."""


def random_lists(
    lists: int,
    top_k: int,
    cache: tuple[int, int],
    *,
    outside: float,
    front: int = 0,
    distinct: int = 0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw indices [lists, top_k] int64, on the CPU.

    cache: its pages, and the slots of each.
    outside: share of the indices that name no key.
    front: so many of each list's first ones name none.
    distinct: keys are among so many first ones of the cache; among all with 0.
    """
    slots = cache[0] * cache[1]
    strays = torch.tensor([*NOWHERE, slots, slots + cache[1]])
    indices = torch.randint(max(1, min(slots, distinct or slots)), (lists, top_k), generator=generator)
    stray = torch.rand(indices.shape, generator=generator) < outside
    stray[:, :front] = True
    return torch.where(stray, strays[torch.randint(len(strays), indices.shape, generator=generator)], indices)


def named_slots(indices: torch.Tensor, slots: int, lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Return the slots that each list names, in the list's order and as often as they stand there.

    indices: [lists, top_k], on the CPU.
    slots: of the cache.
    lengths: how many indices of each list count, any integer; None: lists count whole.
    """
    counts = [indices.shape[-1]] * len(indices) if lengths is None else [max(0, int(count)) for count in lengths]
    counted = (own[:count].long() for own, count in zip(indices, counts, strict=True))
    return [own[(own >= 0) & (own < slots)] for own in counted]


def union_of(named: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the slots that any list names, in rising order."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *named]).unique()
