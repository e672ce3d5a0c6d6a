"""What tsmla_prefill must compute: which rows belong to which sequence, as the contract says, and their attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .reference_attention import Cores, Rows, attend


class Span(NamedTuple):
    """Rows first .. end - 1 of a pack."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def query_spans(ends: Sequence[int], tokens: int) -> list[Span]:
    """The query rows of each sequence. Cumulative ends may hold anything: each counts as the largest so far, within the
    pack."""
    so_far = [min(max(0, *ends[: i + 1]), tokens) for i in range(len(ends))]
    return [Span(first, end) for first, end in zip(so_far, so_far[1:], strict=False)]


def key_spans(ends: Sequence[int], tokens: int) -> list[Span]:
    """The keys of each sequence. A start outside of the pack counts as the pack's nearer end, an end likewise, and one
    before its start as the start."""
    spans = []
    for start, end in zip(ends, ends[1:], strict=False):
        first = min(max(start, 0), tokens)
        spans.append(Span(first, min(max(end, first), tokens)))
    return spans


def seen_keys(queries: Span, keys: Span, causal: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[queries, keys]: which keys of its sequence each query sees; causal is bottom-right. mask: bits of all tokens,
    [tokens, bits]; a key without a bit is not seen."""
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if mask is not None:
        bits = mask[queries.first : queries.end, : len(keys)]
        seen[:, : bits.shape[1]] = bits
        seen[:, bits.shape[1] :] = False
    if causal:
        seen &= torch.arange(len(keys)) <= torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    return seen


def sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[tuple[Span, Span]],
    causal: bool,
    scale: float,
    cores: Cores | None,
    mask: torch.Tensor | None = None,
) -> list[tuple[Span, int, Rows]]:
    """The rows of each sequence and query head. spans: of each sequence's queries and keys. mask: as `seen_keys` has
    it."""
    group = query.shape[1] // key.shape[1]
    found = []
    for queries, keys in spans:
        seen = seen_keys(queries, keys, causal, mask)
        for head in range(query.shape[1] if len(queries) else 0):
            q = query[queries.first : queries.end, head]
            k, v = (tensor[keys.first : keys.end, head // group] for tensor in (key, value))
            found.append((queries, head, attend(q, k, v, seen, scale, cores)))
    return found
