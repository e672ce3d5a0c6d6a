"""Where a sequence lies in a ragged pack, whatever the cumulative lengths say.

They come from a caller's device memory, so they are not trusted: no value leads out of the pack."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .warp import inclusive_maximum


class Span(NamedTuple):
    """Rows `start .. start + length - 1` of the pack."""

    start: Int32
    length: Int32


@cute.jit
def span_of(cum_seq_lens: cute.Tensor, sequence: Int32, rows: Int32) -> Span:
    """The rows of one sequence in a pack of `rows` rows; `cum_seq_lens` is [batch + 1] int32. Both of its ends are
    moved into the pack. The length is negative where the second comes before the first."""
    start = cutlass.min(cutlass.max(cum_seq_lens[sequence], 0), rows)
    return Span(start, cutlass.min(cutlass.max(cum_seq_lens[sequence + 1], 0), rows) - start)


@cute.jit
def span_behind(cum_seq_lens: cute.Tensor, sequence: Int32, rows: Int32, before: Int32) -> Span:
    """The rows of a sequence where those before it end at `before`: it neither starts nor ends before that, so that no
    row is in two. Empty beyond the last sequence."""
    last = cum_seq_lens.shape[0] - 1
    start = cutlass.max(_place(cum_seq_lens, cutlass.min(sequence, last), rows), before)
    end = cutlass.max(_place(cum_seq_lens, cutlass.min(sequence + 1, last), rows), start)
    return Span(start, end - start)


@cute.jit
def two_spans_behind(
    cum_seq_lens: cute.Tensor, sequence: Int32, rows: Int32, before: Int32
) -> tuple[Span, Span, Int32]:
    """The rows of sequences `sequence` and `sequence` + 1, two in each lane for 64 neighbouring ones, where those
    before end at `before`; and where the last lane's end. Every lane of the warp must call it."""
    last = cum_seq_lens.shape[0] - 1
    start = _place(cum_seq_lens, cutlass.min(sequence, last), rows)
    middle = _place(cum_seq_lens, cutlass.min(sequence + 1, last), rows)
    end = _place(cum_seq_lens, cutlass.min(sequence + 2, last), rows)
    if cute.arch.vote_any_sync((middle < start) | (end < middle) | (start < before)):
        highest = inclusive_maximum(cutlass.max(cutlass.max(start, middle), cutlass.max(end, before)))
        below = cute.arch.shuffle_sync_up(highest, 1, mask_and_clamp=0)
        if cute.arch.lane_idx() == 0:
            below = before
        start = cutlass.max(start, below)
        middle = cutlass.max(middle, start)
        end = cutlass.max(end, middle)
    return Span(start, middle - start), Span(middle, end - middle), cute.arch.shuffle_sync(end, 31)


@cute.jit
def _place(cum_seq_lens: cute.Tensor, index: Int32, rows: Int32) -> Int32:
    """A cumulative length, moved into the pack."""
    return cutlass.min(cutlass.max(cum_seq_lens[index], 0), rows)


@cute.jit
def apart(span: Span, before: Int32, exists: Boolean) -> Span:
    """The spans of 32 neighbouring sequences, one in each lane, so that no row is in two of them: none starts before
    `before`, where the sequences of earlier calls end, nor before a lower lane's ends. Every lane of the warp must call
    it; those beyond the last sequence have empty spans and say that none `exists`."""
    start, length = span.start, span.length
    if cute.arch.vote_any_sync(exists and (length < 0 or start < before)):
        end = inclusive_maximum(cutlass.max(cutlass.max(start, start + length), before))
        below = cute.arch.shuffle_sync_up(end, 1, mask_and_clamp=0)
        if cute.arch.lane_idx() == 0:
            below = before
        start = cutlass.max(start, below)
        length = end - start
    return Span(start, length)
