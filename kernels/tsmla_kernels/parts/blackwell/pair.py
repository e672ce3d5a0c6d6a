"""A pair of CTAs that share tcgen05 MMAs: which of them this is, and where both meet."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def rank_of(is_pair: cutlass.Constexpr[bool]) -> Int32:
    """This CTA's number among those that share MMAs: 0 where it is alone."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(is_pair) else Int32(0)


@cute.jit
def meet(is_pair: cutlass.Constexpr[bool]) -> None:
    """Wait for all threads of all CTAs that share MMAs."""
    if const_expr(is_pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
