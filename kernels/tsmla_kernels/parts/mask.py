"""Hiding scores: columns past the end of the keys and, when causal, past the row's own position."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr


@cute.jit
def mask_scores(
    scores: cute.Tensor,
    coordinates: cute.Tensor,
    first_row: Int32,
    first_column: Int32,
    len_q: Int32,
    len_kv: Int32,
    causal: cutlass.Constexpr,
) -> None:
    """Set hidden scores to -inf. `scores` is this thread's (rows, columns) and `coordinates` the same view of the
    tile's (row, column) pairs; both lengths are the sequence's, the first row and column the tile's."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        end = len_kv - first_column
        if const_expr(causal):
            position = first_row + coordinates[row, 0][0] + len_kv - len_q
            end = cutlass.min(end, position + 1 - first_column)
        for column in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[row, column] = scores[row, column] if coordinates[row, column][1] < end else -Float32.inf
