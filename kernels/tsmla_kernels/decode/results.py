"""Where rows of a decode go, and how they end."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..parts.row_end import Ending, LogSums
from .partials import Partials


class Results(NamedTuple):
    """Where rows go and how they end: the output ([batch, query tokens, heads, 512] on Hopper, [rows of all requests,
    512] on Blackwell), log-sum-exps if they are asked for, partial results."""

    out: cute.Tensor
    lse: LogSums | None
    partials: Partials
    ending: Ending


@cute.jit
def output_of(out: cute.Tensor, first_row: Int32, rows: Int32) -> cute.Tensor:
    """View `rows` rows of the output from row `first_row` on, (rows, columns)."""
    columns = out.shape[3]
    first = out.iterator + Int64(first_row) * columns
    return cute.make_tensor(first, cute.make_layout((rows, columns), stride=(columns, 1)))
