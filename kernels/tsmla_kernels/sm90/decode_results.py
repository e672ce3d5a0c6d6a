"""From the attending warpgroups of the Hopper decode to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from tsmla.support import LATENT_DIM


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
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    """This lane's part of a row times `factor`, rounded: pairs of columns, 8 apart, from `column` on, which is even."""
    dtype = target.element_type
    pointer = (target.iterator + column).align(2 * dtype.width // 8)
    columns = cute.size(accumulator, mode=[1])
    target = cute.make_tensor(pointer, cute.make_layout((2, columns // 2), stride=(1, 8)))
    rounded = cute.make_rmem_tensor((2, columns // 2), dtype)
    for i in cutlass.range_constexpr(columns // 2):
        for j in cutlass.range_constexpr(2):
            rounded[j, i] = (accumulator[row, 2 * i + j] * factor).to(dtype)
        cute.autovec_copy(rounded[None, i], target[None, i])
