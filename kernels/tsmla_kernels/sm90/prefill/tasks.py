"""Which query tiles a CTA of the Hopper prefill computes: one, or several one after the other.

What a CTA costs besides its tiles (its launch, finding its tile, the first copies) is then paid once for several, and
the copies of the next tile run while the last products of the one before do. The GPU deals CTAs out as others end, so
that no counter is needed; the last CTAs have one tile each, and end at about the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ...parts.seqlen import Span
from ...parts.tile_scheduler import L2_SECTION_BYTES, QueryTile
from ...parts.work_range import WorkRange, work_range
from .geometry import TASK_WORDS, PrefillGeometry

SINGLE_TILES = 4
"""CTAs with one tile, of those that run side by side, as many times over."""
SINGLE_SHARE = {128: 4, 192: 8}
"""Rows of a query tile of 8 bits -> of so many tiles no more than one is alone, once each CTA that runs side by side
has one: where tiles are few, as of short sequences, being with others of their head is worth more."""

SHORT_KEYS = 4096
"""Keys of a sequence, on average, up to which 16-bit kernels take tiles head by head: a head's keys are then read from
memory all the time, and not while the longest tiles of many heads start."""


class Deal(NamedTuple):
    """The first `many` CTAs take `most` query tiles each, which follow each other in the order of `query_tile`, head by
    head; those behind take one."""

    most: Int32
    many: Int32


@cute.jit
def deal_of(
    geometry: cutlass.Constexpr[PrefillGeometry], rows: tuple[Int32, Int32], sequences: Int32, heads: Int32,
    heads_kv: Int32, processors: Int32,
) -> Deal:  # fmt: skip
    """On the host; `rows` are those of the query's and the keys' packs, `processors` CTAs run side by side. However the
    query's rows are divided into sequences, they are of no fewer tiles than these; tiles of rows that are of none
    (lengths are known on the GPU only) turn out to be no work.

    A CTA takes no more tiles than leave the keys and values that CTAs need at the same time in L2: the heads that they
    work on are as many as they have tiles, divided by the tiles of a head.

    Kernels whose CTAs take one tile have only the order of short `sequences` from it."""
    most = Int32(1)
    kv_bytes = Int64(cutlass.max(rows[1], 1)) * heads_kv * geometry.kv_row_bytes
    tiles = heads * (rows[0] // geometry.tile_q)
    many = Int32(0)
    if const_expr(geometry.tasks > 1):
        for several in (2, geometry.tasks):
            if several * kv_bytes * processors <= Int64(L2_SECTION_BYTES) * tiles:
                most = Int32(several)
        alone = SINGLE_TILES * processors
        if const_expr(geometry.element_bytes == 1):
            alone = cutlass.min(alone, cutlass.max(tiles // SINGLE_SHARE[geometry.tile_q], processors))
            row_tiles = Int64(sequences) * geometry.tile_q
            if most > 3 and rows[0] > 2 * row_tiles and rows[0] <= 3 * row_tiles:
                most = Int32(3)  # a head's, of sequences as long as the mean
        many = cutlass.max(tiles - alone, 0) // most
    elif rows[1] <= Int64(SHORT_KEYS) * sequences:
        many = cutlass.max(tiles - SINGLE_TILES * processors, 0)
    return Deal(most, many)


@cute.jit
def tasks_of(deal: Deal, cta: Int32) -> tuple[Int32, Int32]:
    """The number of a CTA's first query tile, and how many it has."""
    first, count = cta * deal.most, deal.most
    if cta >= deal.many:
        first, count = cta + deal.many * (deal.most - 1), Int32(1)
    return first, count


class Tasks:
    """A CTA's query tiles: `one`, or `count` in a `table` in shared memory [words, tasks]. `geometry` and `causal` are
    the variant's."""

    def __init__(
        self,
        geometry: PrefillGeometry,
        causal: bool,
        heads_per_kv_head: Int32,
        count: Int32 | int,
        table: cute.Tensor | None = None,
        one: QueryTile | None = None,
    ):
        self.geometry = geometry
        self.causal = causal
        self.heads_per_kv_head = heads_per_kv_head
        self.count = count
        self.table = table
        self.one = one

    @property
    def _values(self) -> tuple:
        return self.heads_per_kv_head, *(x for x in (self.count, self.table, self.one) if not isinstance(x, int | None))

    def __extract_mlir_values__(self) -> list:
        return [value for part in self._values for value in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> Tasks:
        made = []
        for part in self._values:
            size = len(cutlass.extract_mlir_values(part))
            made.append(cutlass.new_from_mlir_values(part, values[:size]))
            values = values[size:]
        if self.table is None:
            return Tasks(self.geometry, self.causal, made[0], self.count, one=made[1])
        return Tasks(self.geometry, self.causal, *made)

    def write(self, task: Int32, tile: QueryTile) -> None:
        """By one lane."""
        for index, word in enumerate((tile.head, tile.tile, *tile.q, *tile.kv)):
            self.table[index, task] = word

    def tile(self, task: Int32) -> QueryTile:
        """Without rows where there is none."""
        if self.one is not None:
            return self.one
        head, tile, *spans = (self.table[index, task] for index in range(TASK_WORDS))
        return QueryTile(Boolean(True), head, tile, Span(*spans[:2]), Span(*spans[2:]))

    def work(self, tile: QueryTile) -> WorkRange:
        geometry = self.geometry
        return work_range(
            tile.tile * geometry.tile_q, geometry.tile_q, geometry.tile_kv, tile.q.length, tile.kv.length, self.causal
        )
