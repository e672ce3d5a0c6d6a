"""Issuing warpgroup MMAs: one asynchronous group per matrix product."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..ptx import pinned


class Operands(NamedTuple):
    """The operations that multiply queries and keys, and probabilities and values; the operands of these products, or
    tuples of them, in all stages; and the shape of a thread's scores."""

    qk_op: object
    pv_op: object
    q: cute.Tensor | tuple
    k: cute.Tensor | tuple
    v: cute.Tensor | tuple
    scores_shape: tuple


@cute.jit
def issue(
    mma_op: cutlass.Constexpr,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    keep: Boolean | bool,
    first: cutlass.Constexpr[int] = 0,
) -> None:
    """Start accumulator = a b^T (plus the accumulator when `keep`) and commit it as one group; does not wait. first:
    the step of b that a begins with.

    The fence orders this warp's earlier accesses of the accumulator's and a's registers before the product. PTX asks
    for none where the fence of a product issued earlier covers them; ptxas then adds one, or serialises all products.

    The atom is built here, per call: one that is mutated across a loop is not folded by the compiler.
    """
    atom = cute.make_mma_atom(mma_op)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, keep if const_expr(k == 0) else True)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, first + k], accumulator)
    warpgroup.commit_group()


@cute.jit
def pin(fragment: cute.Tensor) -> None:
    """Have the registers of a fragment computed here and once: LLVM repeats a conversion next to each of its uses, and
    so behind the fence of a product whose operand it is."""
    words = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pinned(words[i])
