"""Issuing tcgen05 MMAs: asynchronous, in order, completion signalled to an mbarrier by a commit (parts/pipeline)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05


@cute.jit
def issue(
    mma_op: cutlass.Constexpr,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    keep,
    steps: cutlass.Constexpr = None,
) -> None:
    """Start accumulator = a b^T, plus the accumulator when `keep` (which may be known at run time only).

    `steps` is the range of K steps to take, all of them when None. Called by a whole warp; one lane issues.
    """
    atom = cute.make_mma_atom(mma_op)
    first, end = (0, cute.size(a, mode=[2])) if cutlass.const_expr(steps is None) else steps
    for k in cutlass.range_constexpr(first, end):
        atom.set(tcgen05.Field.ACCUMULATE, True if cutlass.const_expr(k > 0) else keep)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
