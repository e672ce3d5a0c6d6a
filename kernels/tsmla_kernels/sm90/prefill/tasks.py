"""Which query tiles a CTA of the Hopper prefill computes: several, one after the other.

What a CTA costs besides its tiles (its launch, finding its tiles, the first copies) is then paid once for several, and
the copies of the next tile run while the last products of the one before do. The GPU deals CTAs out as others end, so
that no counter is needed; the last CTAs have one tile each, and end at about the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...parts.division import Divisor, divisor_of, quotient
from ...parts.seqlen import Span
from ...parts.tile_scheduler import L2_SECTION_BYTES, QueryTile
from ...parts.work_range import WorkRange, work_range
from .geometry import TASK_WORDS, PrefillGeometry

SINGLE_TILES = 4
"""CTAs with one tile of 8 bits, of those that run side by side, as many times over."""
SINGLE_SHARE = {128: 4, 192: 8}
"""Rows of a query tile of 8 bits -> of so many tiles no more than one is alone, once each CTA that runs side by side
has one: where tiles are few, as of short sequences, being with others of their head is worth more."""


class Following(NamedTuple):
    """The first `many` CTAs take `most` query tiles each, which follow each other in the order of `query_tile`, head by
    head; those behind take one."""

    most: Int32
    many: Int32

    @property
    def tiles(self) -> Int32:
        """Of CTAs with several."""
        return self.many * self.most

    @property
    def ctas(self) -> Int32:
        return self.many


class Strided(NamedTuple):
    """Query tiles are dealt out in `rounds`, in the order of `query_tile`, head by head: in each round one to each of
    `stride` CTAs, an even number, and after `most` rounds to the next CTAs. Those behind take one.

    CTAs that run side by side then compute the tiles of few heads at any time, whose keys are in L2."""

    most: Int32
    rounds: Int32
    stride: Divisor

    @property
    def tiles(self) -> Int32:
        """Of CTAs with several."""
        return self.rounds * self.stride.value

    @property
    def ctas(self) -> Int32:
        return (self.rounds + self.most - 1) // self.most * self.stride.value


class Numbers(NamedTuple):
    """Where a CTA's `count` query tiles stand in the order of `query_tile`: from `first` on, `stride` apart."""

    first: Int32
    count: Int32
    stride: Int32 | None = None

    def of(self, task: Int32) -> Int32:
        """With a stride, every second is the neighbour's: then a head's long and short tiles take turns."""
        if self.stride is None:
            return self.first + task
        return (self.first + task * self.stride) ^ (task & 1)


@cute.jit
def following_of(
    geometry: cutlass.Constexpr[PrefillGeometry], rows: tuple[Int32, Int32], sequences: Int32, heads: Int32,
    heads_kv: Int32, processors: Int32,
) -> Following:  # fmt: skip
    """On the host; `rows` are those of the query's and the keys' packs, `processors` CTAs run side by side. However the
    query's rows are divided into sequences, they are of no fewer tiles than these; tiles of rows that are of none
    (lengths are known on the GPU only) turn out to be no work.

    A CTA takes no more tiles than leave the keys and values that CTAs need at the same time in L2: the heads that they
    work on are as many as they have tiles, divided by the tiles of a head."""
    most = Int32(1)
    kv_bytes = Int64(cutlass.max(rows[1], 1)) * heads_kv * geometry.kv_row_bytes
    tiles = heads * (rows[0] // geometry.tile_q)
    for several in (2, geometry.tasks):
        if several * kv_bytes * processors <= Int64(L2_SECTION_BYTES) * tiles:
            most = Int32(several)
    alone = cutlass.max(tiles // SINGLE_SHARE[geometry.tile_q], processors)
    row_tiles = Int64(sequences) * geometry.tile_q
    if most > 3 and rows[0] > 2 * row_tiles and rows[0] <= 3 * row_tiles:
        most = Int32(3)  # a head's, of sequences as long as the mean
    return Following(most, cutlass.max(tiles - cutlass.min(alone, SINGLE_TILES * processors), 0) // most)


@cute.jit
def strided_of(
    geometry: cutlass.Constexpr[PrefillGeometry], rows: Int32, sequences: Int32, heads: Int32, processors: Int32
) -> Strided:
    """On the host; `rows` are those of the query's pack, `processors` CTAs run side by side. All sequences are taken to
    be as long as the mean: where there are more tiles, the others are alone; where there are fewer, numbers beyond the
    last turn out to be no work.

    A round is of whole heads where their tiles are nearly as many as CTAs run side by side. Tiles are left for one and
    a half alone for each of these, unless pairs of whole rounds are all that there is: two tiles of numbers even and
    odd are as much work as any other two (`query_tile`)."""
    head_tiles = cutlass.max(rows - 1, 0) // (geometry.tile_q * cutlass.max(sequences, 1)) + 1
    tiles = heads * sequences * head_tiles
    whole = head_tiles + head_tiles % 2 * head_tiles
    stride = processors // whole * whole
    if 16 * stride < 15 * processors:
        stride = cutlass.max(processors // 2 * 2, 2)
    rounds = tiles // stride
    if rounds > geometry.tasks or rounds % 2 != 0 or rounds * stride != tiles:
        rounds = cutlass.max(tiles - processors - processors // 2, 0) // stride
    return Strided(Int32(geometry.tasks), rounds, divisor_of(stride))


@cute.jit
def following_numbers(deal: Following, cta: Int32) -> Numbers:
    """Of a CTA."""
    first, count = cta * deal.most, deal.most
    if cta >= deal.many:
        first, count = cta + deal.many * (deal.most - 1), Int32(1)
    return Numbers(first, count)


@cute.jit
def strided_numbers(deal: Strided, cta: Int32) -> Numbers:
    """Of a CTA."""
    block = quotient(cta, deal.stride)
    begin = block * deal.most
    first = cta + (begin - block) * deal.stride.value
    count = cutlass.min(deal.rounds - begin, deal.most)
    if count <= 0:
        first, count = cta + deal.tiles - deal.ctas, Int32(1)
    return Numbers(first, count, deal.stride.value)


class Tasks:
    """A CTA's query tiles: `count` in a `table` in shared memory [words, tasks]. `geometry` and `causal` are the
    variant's."""

    def __init__(
        self,
        geometry: PrefillGeometry,
        causal: bool,
        heads_per_kv_head: Int32,
        count: Int32,
        table: cute.Tensor,
    ):
        self.geometry = geometry
        self.causal = causal
        self.heads_per_kv_head = heads_per_kv_head
        self.count = count
        self.table = table

    @property
    def _values(self) -> tuple:
        return self.heads_per_kv_head, self.count, self.table

    def __extract_mlir_values__(self) -> list:
        return [value for part in self._values for value in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> Tasks:
        made = []
        for part in self._values:
            size = len(cutlass.extract_mlir_values(part))
            made.append(cutlass.new_from_mlir_values(part, values[:size]))
            values = values[size:]
        return Tasks(self.geometry, self.causal, *made)

    def write(self, task: Int32, tile: QueryTile) -> None:
        """By one lane."""
        for index, word in enumerate((tile.head, tile.tile, *tile.q, *tile.kv)):
            self.table[index, task] = word

    def tile(self, task: Int32) -> QueryTile:
        """Without rows where there is none."""
        head, tile, *spans = (self.table[index, task] for index in range(TASK_WORDS))
        return QueryTile(Boolean(True), head, tile, Span(*spans[:2]), Span(*spans[2:]))

    def work(self, tile: QueryTile) -> WorkRange:
        geometry = self.geometry
        return work_range(
            tile.tile * geometry.tile_q, geometry.tile_q, geometry.tile_kv, tile.q.length, tile.kv.length, self.causal
        )
