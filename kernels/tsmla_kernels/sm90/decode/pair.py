"""Edges between two CTAs that convert keys for each other: each makes half of a tile's, and copies them to the other.

Two row tiles need the same keys, so either has half of the conversion to do. (After the "crossover" of FlashMLA,
docs/20250929-hopper-fp8-sparse-deep-dive.md, whose threads store to both CTAs, `st.async`. Here bulk copies bring what
has been stored in one: kernels/log/hopper-decode.md has times of both.)
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ...parts.pipeline import Edge
from ...parts.ptx import bulk_copy_between_ctas, mapa, pinned
from .geometry import PAIR


class PairEdge(Edge):
    """Filled by warps of either CTA, each of which stores a piece and copies it to the other, and maybe by bulk copies
    of the CTA's own; so a stage is free when the warps of both have left it."""

    def announce_part(self, count: Int32, size: int) -> cute.Pointer:
        """Bulk copies will bring `size` bytes, which complete on the barrier returned."""
        full = self.full(self.stage(count))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        return full

    def release(self, count: Int32) -> None:
        _arrive_in_both(self.empty(self.stage(count)))


def publish_to_both(edges: tuple[PairEdge, ...], count: Int32, places: tuple, size: int) -> None:
    """A warp has stored `size` bytes for each of some edges, at these places: they are there, and the other CTA gets
    them at the same places."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for edge, place in zip(edges, places, strict=True):
            full = edge.full(edge.stage(count))
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)  # of the other's piece
            _copy_to_other(place, size, full)


def own_rank() -> Int32:
    """Of this CTA in its pair."""
    return cute.arch.block_idx_in_cluster()


@cute.jit
def _arrive_in_both(barrier: cute.Pointer) -> None:
    lane = pinned(cute.arch.lane_idx())  # or addresses of all barriers there would be kept in registers
    if lane < PAIR:
        cute.arch.mbarrier_arrive(barrier, lane)


def _copy_to_other(place: Int32, size: int, barrier: cute.Pointer) -> None:
    """By one lane: start copying `size` bytes of shared memory, which complete on the barrier there."""
    other = own_rank() ^ 1
    bulk_copy_between_ctas(mapa(place, other), place, size, mapa(Int32(barrier.toint()), other))
