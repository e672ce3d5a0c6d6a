"""Where a sequence lies in a ragged pack."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Span(NamedTuple):
    """Rows `start .. start + length - 1` of the pack."""

    start: Int32
    length: Int32


@cute.jit
def span_of(cum_seq_lens: cute.Tensor, sequence: Int32) -> Span:
    """The rows of one sequence; `cum_seq_lens` is [batch + 1] int32, starting at 0."""
    start = cum_seq_lens[sequence]
    return Span(start, cum_seq_lens[sequence + 1] - start)
