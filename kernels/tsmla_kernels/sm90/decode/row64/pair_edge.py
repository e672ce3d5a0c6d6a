"""Edges between two CTAs that convert keys for each other: each converts half of a tile's, and copies them to the
other.

Two row tiles need the same keys, so either has half of the conversion to do. (After the "crossover" of FlashMLA,
docs/20250929-hopper-fp8-sparse-deep-dive.md, whose threads store to both CTAs, `st.async`. Here bulk copies bring what
has been stored in one: kernels/log/hopper-decode.md has times of both.)"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ....parts.pipeline import WarpEdge
from ....parts.ptx import bulk_copy_between_ctas, mapa, pinned
from .geometry import PAIR


class PairEdge(WarpEdge):
    """An edge that warps of both CTAs fill, each storing its keys and copying them to the other CTA, and maybe bulk
    copies of the CTA's own. A stage is free when the warps of both CTAs have left it."""

    def announce_copies(self, count: Int32, size: int) -> cute.Pointer:
        """Announce that bulk copies will bring `size` bytes, which complete on the barrier returned."""
        full = self.full(self.stage(count))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        return full

    def release(self, count: Int32) -> None:
        _arrive_in_both(self.empty(self.stage(count)))


def publish_to_both(edges: tuple[PairEdge, ...], count: Int32, places: tuple, size: int) -> None:
    """Hand over what a warp has stored, `size` bytes at a place for each of some edges, and start copying it to the
    same places of the other CTA."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for edge, place in zip(edges, places, strict=True):
            full = edge.full(edge.stage(count))
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)  # for what the other CTA copies here
            _copy_to_other(place, size, full)


def own_rank() -> Int32:
    """Rank of this CTA in its pair."""
    return cute.arch.block_idx_in_cluster()


@cute.jit
def _arrive_in_both(barrier: cute.Pointer) -> None:
    lane = pinned(cute.arch.lane_idx())  # or addresses of all barriers there would be kept in registers
    if lane < PAIR:
        cute.arch.mbarrier_arrive(barrier, lane)


def _copy_to_other(place: Int32, size: int, barrier: cute.Pointer) -> None:
    """Start copying `size` bytes of shared memory to the other CTA, which complete on its barrier; called by one
    lane."""
    other = own_rank() ^ 1
    bulk_copy_between_ctas(mapa(place, other), place, size, mapa(Int32(barrier.toint()), other))
