"""Rings of mbarriers between bulk copies, tensor-core products and warps, of one CTA or of a pair whose even CTA, the
leader, issues the products for both.

A ring keeps no position: its users count what passes through it, and number `count` lives in slot `count % slots`,
whose barriers flip phase each time it comes round. Both CTAs of a pair have the barriers at the same offsets. What the
leader waits for, completes in the leader; everything else in the waiter's own CTA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from .tcgen05 import commit

LEADER = 0


class Ring:
    """`full` completes after `full_arrivals` (and the bytes announced with them), `empty` after `empty_arrivals`."""

    def __init__(self, barriers: cute.Pointer, slots: int, ctas: int, full_arrivals: int = 1, empty_arrivals: int = 1):
        self.barriers = barriers
        self.slots = slots
        self.ctas = ctas
        self.full_arrivals = full_arrivals
        self.empty_arrivals = empty_arrivals

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.barriers)

    def __new_from_mlir_values__(self, values: list) -> Ring:
        barriers = cutlass.new_from_mlir_values(self.barriers, values)
        return Ring(barriers, self.slots, self.ctas, self.full_arrivals, self.empty_arrivals)

    @staticmethod
    def barrier_count(slots: int) -> int:
        """64-bit words of shared memory that a ring's barriers take."""
        return 2 * slots

    def init(self) -> None:
        """By one thread of each CTA, before the cluster barrier that publishes the initialisation."""
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self.full(slot), self.full_arrivals)
            cute.arch.mbarrier_init(self.empty(slot), self.empty_arrivals)

    def full(self, slot) -> cute.Pointer:
        return self.barriers + slot

    def empty(self, slot) -> cute.Pointer:
        return self.barriers + (self.slots + slot)

    def slot(self, count: Int32):
        return 0 if self.slots == 1 else Int32(Uint32(count) % self.slots)

    def _phase(self, count: Int32):
        return (count if self.slots == 1 else Int32(Uint32(count) // self.slots)) & 1

    def wait_full(self, count: Int32) -> None:
        """Until number `count` is there."""
        cute.arch.mbarrier_wait(self.full(self.slot(count)), self._phase(count))

    def wait_empty(self, count: Int32) -> None:
        """Until number `count` may be put into its slot: `count - slots` is no longer needed."""
        cute.arch.mbarrier_wait(self.empty(self.slot(count)), self._phase(count) ^ 1)

    def announce(self, count: Int32, tx_bytes) -> None:
        """By a warp of the leader: bulk copies of all CTAs will bring `tx_bytes` for number `count`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(self.slot(count)), tx_bytes)

    def fill(self, count: Int32) -> None:
        """By a warp of any CTA: this warp's part of number `count` is there."""
        self._arrive(self.full(self.slot(count)))

    def release(self, count: Int32) -> None:
        """By a warp of any CTA: this warp needs number `count` no more; the leader waits for it."""
        self._arrive(self.empty(self.slot(count)))

    def _arrive(self, barrier: cute.Pointer) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if self.ctas == 1:
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, LEADER)

    def commit_full(self, count: Int32) -> None:
        """By the thread that issued the products that make number `count`: arrive in every CTA when they are done."""
        commit(self.full(self.slot(count)), self.ctas)

    def commit_empty(self, count: Int32) -> None:
        """By the thread that issued the products that read number `count`: arrive in every CTA when they are done."""
        commit(self.empty(self.slot(count)), self.ctas)


@cute.jit
def is_leader(ctas: cutlass.Constexpr) -> Boolean:
    """Whether this CTA issues the products."""
    return Boolean(True) if const_expr(ctas == 1) else rank_of(ctas) == LEADER


@cute.jit
def rank_of(ctas: cutlass.Constexpr) -> Int32:
    """This CTA's number among those that work together."""
    return Int32(0) if const_expr(ctas == 1) else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
