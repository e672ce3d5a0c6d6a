"""What roles do with edges: how producers and consumers wait for each other.

`edges.py` says what edges a kernel has; `Barriers` makes one of the classes below of a row of that table:

- `TmaEdge`, `WarpEdge`: a ring of stages in shared memory, filled by bulk copies or by warps, emptied by warps or MMAs.
- `LaneCopiesEdge`: filled by lanes' copies of 16 bytes; Hopper's decode adds `PairEdge`.
- `ClusterEdge`, `ClusterTmaEdge`: a ring between bulk copies, tcgen05 MMAs and warps of the CTAs that share their
  MMAs.
- `Signals`, `WarpSignals`, `ClusterSignals`: barriers that only say "full", told apart by an index; nobody empties
  them.

An edge keeps no position: producers and consumers count tiles themselves. Tile number `count` lives in stage `count %
stages`, whose barriers flip phase every `stages` tiles; where `stages` is a power of two, both are bit fields. Event
number n of an index of `Signals` is awaited with `wait_full(index, n)`, by roles that count events themselves.

    producer
    wait_empty        wait until every consumer has left the tile that was in the stage before
    announce          tell how many bytes copies will bring; they complete on the barrier returned
    announce_or_divert    announce, on another edge's barrier where its reader hands the stage over
    acquire           wait_empty, then announce
    hand_over         this warp's part is there (its lanes are together, and what it wrote is visible to who reads it)
    publish           hand_over, after plain stores that the async proxy (wgmma, TMA) will read
    arrive_behind_copies  each lane arrives when its copies are there
    fill_after_mmas   the tcgen05 MMAs issued so far make the tile
    consumer
    wait_full         wait until the tile is there
    is_full           ask once whether it is
    release           this warp reads the tile no more
    release_after_mmas    the tcgen05 MMAs issued so far are the last to read the tile"""

from __future__ import annotations

from typing import TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import tcgen05

from . import ptx
from .edges import EdgeSpec, EdgeTable

LEADER = 0
"""Rank of the CTA that issues the MMAs of a pair."""


class Edge:
    """One row of an edge table, with its barriers from `barriers` on, number `first_barrier` of the table. `full(s)`
    completes when stage s is filled, `empty(s)` when every consumer has left it."""

    def __init__(self, spec: EdgeSpec, first_barrier: int, barriers: cute.Pointer):
        self.spec = spec
        self.first_barrier = first_barrier
        self.barriers = barriers

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.barriers)

    def __new_from_mlir_values__(self, values: list) -> Edge:
        return type(self)(self.spec, self.first_barrier, cutlass.new_from_mlir_values(self.barriers, values))

    def full(self, stage) -> cute.Pointer:
        return self.barriers + stage

    def empty(self, stage) -> cute.Pointer:
        assert self.spec.emptied_by and not self.spec.once, f"nobody empties {self.spec.name}"
        return self.barriers + (self.spec.stages + stage)

    def stage(self, count: Int32):
        stages = self.spec.stages
        if stages == 1:
            return 0
        return count & (stages - 1) if self._bit_fields else count % stages

    def _phase(self, count: Int32):
        stages = self.spec.stages
        lap = count >> (stages.bit_length() - 1) if self._bit_fields else count // stages
        return lap & 1

    @property
    def _bit_fields(self) -> bool:
        return self.spec.stages & (self.spec.stages - 1) == 0

    def wait_empty(self, count: Int32) -> None:
        cute.arch.mbarrier_wait(self.empty(self.stage(count)), self._phase(count) ^ 1)

    def hand_over(self, count: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(self.stage(count)))

    def wait_full(self, count: Int32) -> None:
        cute.arch.mbarrier_wait(self.full(self.stage(count)), self._phase(count))

    def is_full(self, count: Int32) -> Boolean:
        """Ask once whether the tile is there; equal on all lanes."""
        there = cute.arch.mbarrier_test_wait(self.full(self.stage(count)), self._phase(count))
        return cute.arch.vote_all_sync(there)

    def release(self, count: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty(self.stage(count)))

    def release_after_mmas(self, first: Int32, tiles: int = 1) -> None:
        """Release tiles `first`, `first` + 1, ... when the MMAs issued so far have read them; called by the thread that
        issues MMAs."""
        for tile in range(tiles):
            tcgen05.commit(self.empty(self.stage(first + tile)))


class TmaEdge(Edge):
    """An edge that bulk copies fill: a stage is full when the bytes that the table names have landed."""

    def acquire(self, count: Int32) -> cute.Pointer:
        self.wait_empty(count)
        return self.announce(count)

    def announce(self, count: Int32) -> cute.Pointer:
        """Announce the table's bytes without `wait_empty`, for a stage that has never been filled or is known to be
        free."""
        full = self.full(self.stage(count))
        self.expect(full)
        return full

    def announce_or_divert(self, count: Int32, diverted: Boolean, other: Edge, index) -> cute.Pointer:
        """Announce the table's bytes; where the copies are `diverted`, on barrier `index` of `other`, whose reader then
        hands the stage over."""
        stage = self.stage(count)
        full = self.full(cutlass.select_(diverted, other.first_barrier - self.first_barrier + index, stage))
        self.expect(full)
        return full

    def expect(self, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.spec.bytes)


class LaneCopiesEdge(Edge):
    """An edge that lanes fill with copies of 16 bytes (`ptx.copy_vector`)."""

    def arrive_behind_copies(self, count: Int32) -> None:
        """Every lane of a warp arrives when what it has copied so far is there."""
        ptx.arrive_behind_copies(self.full(self.stage(count)).toint())


class WarpEdge(Edge):
    """An edge that warps fill with plain stores."""

    def publish(self, count: Int32) -> None:
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.hand_over(count)


class ClusterEdge(Edge):
    """An edge between the CTAs that work on one tile: one, or a pair whose even CTA, the leader, issues the MMAs of
    both.

    Both CTAs of a pair have the barriers at the same offsets. What the leader waits for completes in the leader only
    (announced bytes, `hand_over`, `release`); what MMAs complete, in every CTA."""

    def announce(self, count: Int32, tx_bytes=None) -> None:
        """Announce, from a warp of the leader, what copies of all CTAs bring: the table's bytes or, where lanes write
        some, `tx_bytes`."""
        tx_bytes = self.spec.bytes if tx_bytes is None else tx_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(self.stage(count)), tx_bytes)

    def hand_over(self, count: Int32) -> None:
        """Tell the leader that this warp's part is there; a warp of any CTA may."""
        self._tell_leader(self.full(self.stage(count)))

    def release(self, count: Int32) -> None:
        """Tell the leader that this warp reads the tile no more; a warp of any CTA may."""
        self._tell_leader(self.empty(self.stage(count)))

    def fill_after_mmas(self, count: Int32) -> None:
        _commit(self.full(self.stage(count)), self.spec.ctas)

    def release_after_mmas(self, first: Int32, tiles: int = 1) -> None:
        for tile in range(tiles):
            _commit(self.empty(self.stage(first + tile)), self.spec.ctas)

    def _tell_leader(self, barrier: cute.Pointer) -> None:
        cute.arch.sync_warp()
        _arrive_once(barrier, LEADER if self.spec.ctas > 1 else None)


class ClusterTmaEdge(TmaEdge):
    """A ring that bulk copies fill and MMAs empty, of the CTAs that share their MMAs: one, or a pair.

    Copies of both CTAs complete on the leader's barriers, where the leader announces what both bring; what MMAs
    complete, they do in every CTA."""

    def expect(self, barrier: cute.Pointer) -> None:
        _expect_in_leader(barrier, self.spec.bytes, self.spec.ctas)

    def release_after_mmas(self, first: Int32, tiles: int = 1) -> None:
        for tile in range(tiles):
            _commit(self.empty(self.stage(first + tile)), self.spec.ctas)


class Signals(Edge):
    """Barriers that only say "full": for each index, events that complete one after the other."""

    def wait_full(self, index, event: Int32) -> None:
        cute.arch.mbarrier_wait(self.full(index), event & 1)

    def hand_over(self, index) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(index))


class WarpSignals(Signals):
    """Signals between warps of a CTA on Blackwell."""

    def hand_over(self, index, behind: Float32 | None = None) -> None:
        """Arrive once for this warp, whose lanes are all here. behind: a number that ptxas must have before the
        arrival."""
        cute.arch.sync_warp()
        if behind is None:
            _arrive_once(self.full(index))
        else:
            _arrive_behind(self.full(index), behind)


class ClusterSignals(Signals):
    """Signals between warps and MMAs of the CTAs that share their MMAs: one, or a pair. Warps of both CTAs tell the
    leader, MMAs tell every CTA."""

    def hand_over(self, index) -> None:
        cute.arch.sync_warp()
        _arrive_once(self.full(index), LEADER if self.spec.ctas > 1 else None)

    def fill_after_mmas(self, index) -> None:
        _commit(self.full(index), self.spec.ctas)


E = TypeVar("E", bound=Edge)


class Barriers:
    """The barriers of all edges of a table, from the start of a CTA's shared memory."""

    def __init__(self, table: EdgeTable, shared_memory: cute.Pointer):
        self.table = table
        self.shared_memory = shared_memory

    def __extract_mlir_values__(self) -> list:
        return cutlass.extract_mlir_values(self.shared_memory)

    def __new_from_mlir_values__(self, values: list) -> Barriers:
        return Barriers(self.table, cutlass.new_from_mlir_values(self.shared_memory, values))

    def edge(self, name: str, kind: type[E]) -> E:
        first = self.table.first_barrier(name)
        return kind(self.table[name], first, cute.recast_ptr(self.shared_memory, dtype=Int64) + first)

    def init(self) -> None:
        """Initialise all barriers; called by one warp, before the barrier that publishes the initialisation."""
        with cute.arch.elect_one():
            for spec in self.table:
                barriers = self.edge(spec.name, Edge).barriers
                for stage in range(spec.stages):
                    cute.arch.mbarrier_init(barriers + stage, spec.fills)
                    if spec.emptied_by:
                        cute.arch.mbarrier_init(barriers + (spec.stages + stage), spec.leaves)
        cute.arch.mbarrier_init_fence()


def one_of(edges: tuple[E, ...], index: Int32) -> E:
    """Edge number `index`, known only when the kernel runs, of edges that follow each other in the table. They may
    differ only in the bytes that copies bring, so whoever announces these must not use it."""
    first, apart = edges[0], edges[1].first_barrier - edges[0].first_barrier
    assert all(edge.first_barrier == first.first_barrier + i * apart for i, edge in enumerate(edges)), edges
    assert all(edge.spec.stages == first.spec.stages for edge in edges), edges
    return type(first)(first.spec, first.first_barrier, first.barriers + index * apart)


def _commit(barrier: cute.Pointer, ctas: int) -> None:
    """Arrive on the barrier at this place of every CTA when this thread's MMAs so far are complete."""
    if ctas == 1:
        tcgen05.commit(barrier)
    else:
        tcgen05.commit(barrier, (1 << ctas) - 1, tcgen05.CtaGroup.TWO)


@cute.jit
def _expect_in_leader(barrier: cute.Pointer, tx_bytes: cutlass.Constexpr, ctas: cutlass.Constexpr) -> None:
    """Announce bytes, in the leader only."""
    if const_expr(ctas == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tx_bytes)
    elif cute.arch.block_idx_in_cluster() == LEADER:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tx_bytes)


@cute.jit
def _arrive_once(barrier: cute.Pointer, cta: cutlass.Constexpr = None) -> None:
    """Arrive by lane 0: an elected lane takes more instructions (kernels/log/blackwell-prefill.md, 5)."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier, cta)


@cute.jit
def _arrive_behind(barrier: cute.Pointer, number: Float32) -> None:
    """Arrive once, when the number is there: which lane arrives is known only then."""
    lane = cutlass.select_(cute.arch.vote_any_sync(number == number), Int32(0), Int32(1))
    if cute.arch.lane_idx() == lane:
        cute.arch.mbarrier_arrive(barrier)
