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
    widened: cutlass.Constexpr,
) -> None:
    """This lane's part of a row times `factor`, rounded, from `column` on; `lane` counts within the quad.

    Of every 16 columns a lane has pairs 2 lane and 8 + 2 lane, or, where values were widened, 4 lane .. 4 lane + 3, as
    column i of four is the first or second of pair i % 2 (`decode_widen.py`)."""
    dtype = target.element_type
    size = 4 if widened else 2
    pointer = (target.iterator + (column + lane * size)).align(size * dtype.width // 8)
    vectors = cute.size(accumulator, mode=[1]) // size
    places = cute.make_tensor(pointer, cute.make_layout((size, vectors), stride=(1, size * QUAD)))
    rounded = cute.make_rmem_tensor((size, vectors), dtype)
    for i in cutlass.range_constexpr(vectors):
        for j in cutlass.range_constexpr(size):
            source = 4 * i + 2 * (j % 2) + j // 2 if const_expr(widened) else 2 * i + j
            rounded[j, i] = (accumulator[row, source] * factor).to(dtype)
        cute.autovec_copy(rounded[None, i], places[None, i])
