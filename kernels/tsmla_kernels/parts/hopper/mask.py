"""Hiding scores: columns past the end of the keys and, when causal, past the row's own position.

A mask selects. `a if visible else b` would be a region of its own for every score, take a quarter of the kernel's
compile time, and come to the same instructions."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Vector, const_expr
from cutlass.cutlass_dsl import select_


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
    hidden = Float32(-Float32.inf)
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        end = len_kv - first_column
        if const_expr(causal):
            position = first_row + coordinates[row, 0][0] + len_kv - len_q
            end = cutlass.min(end, position + 1 - first_column)
        end -= coordinates[row, 0][1]  # what differs between threads, once for the row
        mine = scores[row, None]
        kept = tuple(
            select_(end > coordinates.layout((0, column))[1], score, hidden)
            for column, score in enumerate(mine.load().to_elements())
        )
        mine.store(cute.TensorSSA(Vector.from_elements(kept, Float32), mine.shape, Float32))
