"""From the attending warpgroups of the Hopper decode to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from tsmla.support import LATENT_DIM

from ..parts.fragment import QUAD


@cute.jit
def output_of(out: cute.Tensor, lse: cute.Tensor | None, request: Int32, first_row: Int32, rows: Int32):
    """(rows, columns) of the output and (rows) of the LSE, or None, of a request from its row `first_row` on; `rows` is
    q_len x heads."""
    first = Int64(request) * rows + first_row
    columns = cute.make_layout((rows, LATENT_DIM), stride=(LATENT_DIM, 1))
    target = cute.make_tensor(out.iterator + first * LATENT_DIM, columns)
    if const_expr(lse is None):
        return target, None
    return target, cute.make_tensor(lse.iterator + first, cute.make_layout(rows))


@cute.jit
def store_row(
    target: cute.Tensor,
    column: Int32,
    lane: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    """This lane's part of a row times `factor`, rounded, from `column` on; `lane` counts within the quad."""
    dtype = target.element_type
    size = 2
    pointer = (target.iterator + (column + lane * size)).align(size * dtype.width // 8)
    vectors = cute.size(accumulator, mode=[1]) // size
    places = cute.make_tensor(pointer, cute.make_layout((size, vectors), stride=(1, size * QUAD)))
    rounded = cute.make_rmem_tensor((size, vectors), dtype)
    for i in cutlass.range_constexpr(vectors):
        for j in cutlass.range_constexpr(size):
            rounded[j, i] = (accumulator[row, size * i + j] * factor).to(dtype)
        cute.autovec_copy(rounded[None, i], places[None, i])
