"""Key masks of tsmla_prefill: which keys queries see, at the edges of the contract, and the words that say so."""

from __future__ import annotations

import torch
from tsmla.problems.prefill import mask_words

BITS = 32


def random(lengths_q: list[int], lengths_kv: list[int], density: float) -> torch.Tensor:
    """Each key with this probability, [tokens, keys of the longest sequence]."""
    return torch.rand(sum(lengths_q), max(lengths_kv, default=0)) < density


def words(
    seen: torch.Tensor, lengths_q: list[int], lengths_kv: list[int], *, slack: int = 0, gap: int = 0, spare: int = 0
) -> torch.Tensor:
    """The words of `seen`, on the GPU. Bits behind a sequence's keys are set, and so are `spare` words of each row,
    `gap` words between rows, and the words of `slack` tokens that belong to no sequence."""
    count = -(-seen.shape[1] // BITS)
    bits = torch.ones(seen.shape[0] + slack, (count + spare) * BITS, dtype=torch.bool)
    first = 0
    for len_q, len_kv in zip(lengths_q, lengths_kv, strict=True):
        bits[first : first + len_q, :len_kv] = seen[first : first + len_q, :len_kv]
        first += len_q
    packed = mask_words(bits)
    whole = torch.full((packed.shape[0], packed.shape[1] + gap), -1, dtype=torch.int32)
    whole[:, : packed.shape[1]] = packed
    return whole.to("cuda")[:, : packed.shape[1]]
