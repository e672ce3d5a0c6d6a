"""Issuing warpgroup MMAs: one asynchronous group per matrix product."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def issue(
    mma_op: cutlass.Constexpr,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    keep: cutlass.Constexpr,
    fence: cutlass.Constexpr = True,
) -> None:
    """Start accumulator = a b^T (plus the accumulator when `keep`) and commit it as one group; does not wait.

    `fence` orders this warp's earlier accesses of the accumulator's and a's registers before the product. Without it
    they must have come before the fence of a product issued earlier.

    The atom is built here, per call: one that is mutated across a loop is not folded by the compiler.
    """
    atom = cute.make_mma_atom(mma_op)
    if const_expr(fence):
        warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, keep or k > 0)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()
