"""Edges: how roles wait for each other.

`TmaEdge`, `WarpEdge`: a shared-memory ring filled by TMA or by warps and emptied by consumers, one pair of mbarriers
per stage. An edge keeps no position. Producer and consumers count tiles themselves, and tile number `count` lives in
stage `count % stages`; its barriers flip phase every `stages` tiles: bit fields where `stages` is a power of two.

`ClusterEdge`: such a ring between bulk copies, tcgen05 MMAs and warps of CTAs that share their MMAs.

`Signals`: single mbarriers by which one role tells another of an event.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

LEADER = 0
"""Rank of the CTA that issues the MMAs of a pair."""


class _Edge:
    """One ring. `full(s)` completes when the stage is filled, `empty(s)` when every consumer left it.

    Consumers are warps that read (`release`), or the tensor core (`release_after_mmas`, which is one consumer).
    """

    fills = 1
    """Arrivals that make a stage full."""

    def __init__(self, barriers: cute.Pointer, stages: int, consumer_warps: int):
        assert stages > 0, stages
        self.barriers = barriers
        self.stages = stages
        self.consumer_warps = consumer_warps

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.barriers)

    def full(self, stage) -> cute.Pointer:
        return self.barriers + stage

    def empty(self, stage) -> cute.Pointer:
        return self.barriers + (self.stages + stage)

    @staticmethod
    def barrier_count(stages: int) -> int:
        """64-bit words of shared memory that the edge's barriers take."""
        return 2 * stages

    def init(self) -> None:
        """By one thread, before the barrier that publishes the initialisation."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full(stage), self.fills)
            cute.arch.mbarrier_init(self.empty(stage), self.consumer_warps)

    def stage(self, count: Int32):
        if self.stages == 1:
            return 0
        return count & (self.stages - 1) if self._bit_fields else count % self.stages

    def _phase(self, count: Int32):
        turn = count >> (self.stages.bit_length() - 1) if self._bit_fields else count // self.stages
        return turn & 1

    @property
    def _bit_fields(self) -> bool:
        return self.stages & (self.stages - 1) == 0

    def wait_empty(self, count: Int32) -> None:
        """Producer warps: wait until every consumer has left the tile that was in the stage before."""
        cute.arch.mbarrier_wait(self.empty(self.stage(count)), self._phase(count) ^ 1)

    def hand_over(self, count: Int32) -> None:
        """A warp that fills the stage itself, or prepared copies that landed elsewhere: tile `count` is there."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(self.stage(count)))

    def wait_full(self, count: Int32) -> None:
        """Consumer warps: wait until tile `count` is there."""
        cute.arch.mbarrier_wait(self.full(self.stage(count)), self._phase(count))

    def release(self, count: Int32) -> None:
        """Consumer warps: this warp reads tile `count` no more."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty(self.stage(count)))

    def release_after_mmas(self, first: Int32, tiles: int = 1) -> None:
        """The thread that issues tcgen05 MMAs: those so far are the last to read tiles `first`, `first` + 1, ..."""
        for tile in range(tiles):
            tcgen05.commit(self.empty(self.stage(first + tile)))


class TmaEdge(_Edge):
    """Filled by TMA: a stage is full when its `tx_bytes` have landed."""

    def __init__(self, barriers: cute.Pointer, stages: int, tx_bytes: int, consumer_warps: int):
        super().__init__(barriers, stages, consumer_warps)
        self.tx_bytes = tx_bytes

    def __new_from_mlir_values__(self, values: list) -> TmaEdge:
        barriers = cutlass.new_from_mlir_values(self.barriers, values)
        return TmaEdge(barriers, self.stages, self.tx_bytes, self.consumer_warps)

    def acquire(self, count: Int32) -> cute.Pointer:
        """Producer warp: wait until the stage is empty, announce its bytes, return the barrier TMA completes on."""
        self.wait_empty(count)
        return self.announce(count)

    def announce(self, count: Int32) -> cute.Pointer:
        """As `acquire`, for a stage that has never been filled."""
        full = self.full(self.stage(count))
        self.expect(full)
        return full

    def expect(self, barrier: cute.Pointer) -> None:
        """Producer warp: announce one tile's bytes on the barrier that its copies complete on."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tx_bytes)


class WarpEdge(_Edge):
    """Filled by warps with plain stores, for consumers that read through the async proxy (wgmma, TMA)."""

    def __init__(self, barriers: cute.Pointer, stages: int, producer_warps: int, consumer_warps: int):
        super().__init__(barriers, stages, consumer_warps)
        self.fills = producer_warps

    def __new_from_mlir_values__(self, values: list) -> WarpEdge:
        barriers = cutlass.new_from_mlir_values(self.barriers, values)
        return WarpEdge(barriers, self.stages, self.fills, self.consumer_warps)

    def publish(self, count: Int32) -> None:
        """Producer warps: this warp's stores of tile `count` are done."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.hand_over(count)


class ClusterEdge(_Edge):
    """Between the CTAs that work on one tile: one, or a pair whose even CTA, the leader, issues the MMAs of both.

    Both CTAs of a pair have the barriers at the same offsets. What the leader waits for completes in the leader only
    (announced bytes, `hand_over`, `release`); what MMAs complete, in every CTA.
    """

    def __init__(self, barriers: cute.Pointer, stages: int, ctas: int, producers: int, consumers: int):
        super().__init__(barriers, stages, consumers)
        self.ctas = ctas
        self.fills = producers

    def __new_from_mlir_values__(self, values: list) -> ClusterEdge:
        barriers = cutlass.new_from_mlir_values(self.barriers, values)
        return ClusterEdge(barriers, self.stages, self.ctas, self.fills, self.consumer_warps)

    def is_full(self, count: Int32) -> Boolean:
        """Whether tile `count` is there, asked once and equal on all lanes."""
        there = cute.arch.mbarrier_test_wait(self.full(self.stage(count)), self._phase(count))
        return cute.arch.vote_all_sync(there)

    def announce(self, count: Int32, tx_bytes) -> None:
        """A warp of the leader: copies of all CTAs bring `tx_bytes` for tile `count`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(self.stage(count)), tx_bytes)

    def hand_over(self, count: Int32) -> None:
        """A warp of any CTA, whose lanes have all done their part: its part of tile `count` is there."""
        self._tell_leader(self.full(self.stage(count)))

    def release(self, count: Int32) -> None:
        """A warp of any CTA: none of its lanes reads tile `count` any more."""
        self._tell_leader(self.empty(self.stage(count)))

    def fill_after_mmas(self, count: Int32) -> None:
        """The thread that issues tcgen05 MMAs: those so far make tile `count`."""
        _commit(self.full(self.stage(count)), self.ctas)

    def release_after_mmas(self, first: Int32, tiles: int = 1) -> None:
        for tile in range(tiles):
            _commit(self.empty(self.stage(first + tile)), self.ctas)

    def _tell_leader(self, barrier: cute.Pointer) -> None:
        cute.arch.sync_warp()
        _arrive_once(barrier, LEADER if self.ctas > 1 else None)


def _commit(barrier: cute.Pointer, ctas: int) -> None:
    """Arrive on the barrier at this place of every CTA when this thread's MMAs so far are complete."""
    if ctas == 1:
        tcgen05.commit(barrier)
    else:
        tcgen05.commit(barrier, (1 << ctas) - 1, tcgen05.CtaGroup.TWO)


class Signals:
    """`number` barriers of one kind, told apart by an index; each completes once per event, after `arrivals`.

    Event n of an index is awaited with `wait(index, n)`, by roles that count events themselves.
    """

    def __init__(self, barriers: cute.Pointer, number: int, arrivals: int):
        self.barriers = barriers
        self.number = number
        self.arrivals = arrivals

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.barriers)

    def __new_from_mlir_values__(self, values: list) -> Signals:
        return Signals(cutlass.new_from_mlir_values(self.barriers, values), self.number, self.arrivals)

    def init(self) -> None:
        """By one thread, before the barrier that publishes the initialisation."""
        for index in range(self.number):
            cute.arch.mbarrier_init(self.barriers + index, self.arrivals)

    def wait(self, index, event: Int32) -> None:
        cute.arch.mbarrier_wait(self.barriers + index, event & 1)

    def arrive(self, index) -> None:
        """One arrival for the calling warp, whose lanes have all done their part."""
        cute.arch.sync_warp()
        _arrive_once(self.barriers + index)

    def arrive_after_mmas(self, index) -> None:
        """One arrival, when the tcgen05 MMAs that the calling thread has issued are complete."""
        tcgen05.commit(self.barriers + index)


@cute.jit
def _arrive_once(barrier: cute.Pointer, cta: cutlass.Constexpr = None) -> None:
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier, cta)
