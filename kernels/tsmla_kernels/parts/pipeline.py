"""Edges: shared-memory rings filled by TMA and emptied by consumer warps, one pair of mbarriers per stage.

An edge keeps no position. Producer and consumers count tiles themselves, and tile number `count` lives in stage
`count % stages`; its barriers flip phase every `stages` tiles: bit fields where `stages` is a power of two.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class TmaEdge:
    """One ring. `full(s)` completes when the stage's bytes have landed, `empty(s)` when every consumer left it.

    A stage is announced full by one arrival, or by `producer_warps` warps that fill it without TMA."""

    def __init__(
        self, barriers: cute.Pointer, stages: int, tx_bytes: int, consumer_warps: int, producer_warps: int = 1
    ):
        assert stages > 0, stages
        self.barriers = barriers
        self.stages = stages
        self.tx_bytes = tx_bytes
        self.consumer_warps = consumer_warps
        self.producer_warps = producer_warps

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.barriers)

    def __new_from_mlir_values__(self, values: list) -> TmaEdge:
        barriers = cutlass.new_from_mlir_values(self.barriers, values)
        return TmaEdge(barriers, self.stages, self.tx_bytes, self.consumer_warps, self.producer_warps)

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
            cute.arch.mbarrier_init(self.full(stage), self.producer_warps)
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

    def acquire(self, count: Int32) -> cute.Pointer:
        """Producer warp: wait until the stage is empty, announce its bytes, return the barrier TMA completes on."""
        self.wait_empty(count)
        full = self.full(self.stage(count))
        self.expect(full)
        return full

    def wait_empty(self, count: Int32) -> None:
        """Producer warp: wait until every consumer has left the tile that was in the stage before."""
        cute.arch.mbarrier_wait(self.empty(self.stage(count)), self._phase(count) ^ 1)

    def expect(self, barrier: cute.Pointer) -> None:
        """Producer warp: announce one tile's bytes on the barrier that its copies complete on."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tx_bytes)

    def hand_over(self, count: Int32) -> None:
        """A warp that fills the stage itself, or prepared copies that landed elsewhere: tile `count` is there."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(self.stage(count)))

    def wait_full(self, count: Int32) -> None:
        """Consumer warps: wait until tile `count` has landed."""
        cute.arch.mbarrier_wait(self.full(self.stage(count)), self._phase(count))

    def release(self, count: Int32) -> None:
        """Consumer warps: this warp reads tile `count` no more."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty(self.stage(count)))
