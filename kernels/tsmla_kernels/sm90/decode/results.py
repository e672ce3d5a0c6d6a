"""Where rows of the Hopper decode go, whichever kernel attends them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from ...decode.partials import Partials
from ...parts.row_end import Ending, LogSums


class Results(NamedTuple):
    """Where rows go and how they end."""

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
