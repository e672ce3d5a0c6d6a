"""Which query tiles a CTA of the Hopper prefill computes: several, one after the other.

What a CTA costs besides its tiles (its launch, finding its tiles, the first copies) is then paid once for several, and
the copies of the next tile run while the last products of the one before do. The GPU starts CTAs as others end, so that
no counter is needed; the last CTAs have one tile each, and end at about the same time."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ...parts.division import Divisor, divisor_of, quotient
from ...parts.seqlen import Span
from ...prefill.tile_bounds import L2_SECTION_BYTES, LIST_WORDS
from ...prefill.tile_scheduler import QueryTile
from ...prefill.visits import KeyMask, list_of, listed_work
from ...prefill.work_range import WorkRange, work_range
from .geometry import FOLLOWING, SHORT_KEYS, SINGLE_SHARE, SINGLE_TILES, TASK_WORDS, PrefillGeometry


class TileDeal(NamedTuple):
    """How query tiles are dealt to CTAs: in `rounds`, in the order of `query_tile`, head by head; in each round one to
    each of `stride` CTAs, and after `most` rounds to the next CTAs. Tiles behind these rounds get a CTA each.

    With a stride of 1 a CTA's tiles follow each other. A larger one is an even number: CTAs that run side by side then
    compute the tiles of few heads at any time, whose keys are in L2."""

    most: Int32
    rounds: Int32
    stride: Divisor

    @property
    def tiles(self) -> Int32:
        """Tiles of the CTAs that have several."""
        return self.rounds * self.stride.value

    @property
    def section_bytes(self) -> Int32:
        """Bytes of keys and values of a section of heads whose tiles are alone. Where tiles are far apart, so few heads
        are left that all their tiles may start together, the longest first: in two sections, the long ones of the
        second would start when the others end."""
        return cutlass.select_(self.stride.value > 1, Int32(2 * L2_SECTION_BYTES), Int32(L2_SECTION_BYTES))

    @property
    def ctas(self) -> Int32:
        return (self.rounds + self.most - 1) // self.most * self.stride.value


class Numbers(NamedTuple):
    """Where a CTA's `count` query tiles stand in the order of `query_tile`: from `first` on, `stride` apart."""

    first: Int32
    count: Int32
    stride: Int32

    def of(self, task: Int32) -> Int32:
        """Number of the CTA's tile `task`. Where tiles are far apart, every second is the neighbour's: a head's long
        and short tiles then take turns."""
        return (self.first + task * self.stride) ^ (task & ~self.stride & 1)


@cute.jit
def deal_of(
    geometry: cutlass.Constexpr[PrefillGeometry], causal: cutlass.Constexpr[bool], rows: tuple[Int32, Int32],
    sequences: Int32, heads: Int32, heads_kv: Int32, processors: Int32,
) -> TileDeal:  # fmt: skip
    """Decide the deal, on the host; `rows` are those of the query's and the keys' packs, `processors` CTAs run side by
    side. Its bounds were measured one by one; no cost function of few numbers chooses as they do
    (kernels/log/hopper-prefill.md, 54)."""
    most, rounds, stride = _strided(geometry, causal, rows[0], sequences, heads, processors)
    if const_expr(geometry.policy.follows_if_long):
        if rows[1] > Int64(SHORT_KEYS) * sequences * cutlass.select_(rows[0] >= rows[1], Int32(2), Int32(1)):
            most, rounds = _following(geometry, rows, heads, heads_kv, processors)
            stride = Int32(1)
    return TileDeal(most, rounds, divisor_of(stride))


@cute.jit
def _following(
    geometry: cutlass.Constexpr[PrefillGeometry], rows: tuple[Int32, Int32], heads: Int32, heads_kv: Int32,
    processors: Int32,
) -> tuple[Int32, Int32]:  # fmt: skip
    """Tiles of a CTA whose tiles follow each other, and of all such CTAs. However the query's rows are divided into
    sequences, there are no fewer tiles than these; tiles whose rows belong to no sequence (lengths are known on the GPU
    only) turn out to be no work.

    A CTA takes no more tiles than leave the keys and values that CTAs need at the same time in L2: the heads that they
    work on are as many as they have tiles, divided by the tiles of a head."""
    most = Int32(1)
    kv_bytes = Int64(cutlass.max(rows[1], 1)) * heads_kv * geometry.kv_row_bytes
    tiles = heads * (rows[0] // geometry.tile_q)
    for several in FOLLOWING:
        if several * kv_bytes * processors <= Int64(L2_SECTION_BYTES) * tiles:
            most = Int32(several)
    alone = cutlass.max(tiles // SINGLE_SHARE, processors)
    many = cutlass.max(tiles - cutlass.min(alone, SINGLE_TILES * processors), 0) // most
    return most, many * most


@cute.jit
def _strided(
    geometry: cutlass.Constexpr[PrefillGeometry], causal: cutlass.Constexpr[bool], rows: Int32, sequences: Int32,
    heads: Int32, processors: Int32,
) -> tuple[Int32, Int32, Int32]:  # fmt: skip
    """Tiles of a CTA, rounds, and CTAs of a round. All sequences are taken to be as long as the mean: where there are
    more tiles, the others are alone; where there are fewer, numbers beyond the last turn out to be no work.

    Without a mask tiles are alike: each SM has one in a round, and at least half a round is left alone."""
    head_tiles = cutlass.max(rows - 1, 0) // (geometry.tile_q * cutlass.max(sequences, 1)) + 1
    tiles = heads * sequences * head_tiles
    most = Int32(geometry.tasks)
    stride = cutlass.max(processors // 2 * 2, 2)
    rounds = cutlass.max(tiles - processors // 2, 0) // stride
    if const_expr(causal):
        most, rounds, stride = _of_unlike_tiles(geometry, head_tiles, tiles, processors)
    return most, rounds, stride


@cute.jit
def _of_unlike_tiles(
    geometry: cutlass.Constexpr[PrefillGeometry], head_tiles: Int32, tiles: Int32, processors: Int32
) -> tuple[Int32, Int32, Int32]:
    """Tiles of a CTA, rounds, and CTAs of a round under a causal mask, where tiles are of unlike lengths. A round is of
    whole heads where their tiles are nearly as many as CTAs run side by side.

    If all tiles fit in `tasks` rounds, deal them all when the rounds come in pairs and nothing is left (two tiles of
    numbers even and odd are as much work as any other two, see `query_tile`), or when at least 3/4 of a round is left,
    alone: those CTAs finish with the others. The last of `tasks` rounds of long heads is left alone where a round
    leaves SMs idle. Otherwise keep 1.5 single tiles for each CTA slot for the end.

    Where rounds are not of whole heads, one CTA's tiles are more work than another's: one more single tile is kept for
    each slot, or, where L2 does not hold the keys of so many heads (wide ones of 16 bits), CTAs have two tiles."""
    whole = head_tiles + head_tiles % 2 * head_tiles
    most = Int32(geometry.tasks)
    stride = processors // whole * whole
    alone = processors + processors // 2
    alike = 16 * stride >= 15 * processors
    if not alike:
        stride = cutlass.max(processors // 2 * 2, 2)
    rounds = tiles // stride
    left = tiles - rounds * stride
    uneven = (rounds % 2 != 0 or left != 0) and (rounds < 2 or 4 * left < 3 * stride)
    if rounds > geometry.tasks or uneven:
        if rounds > geometry.tasks and not alike:
            if const_expr(geometry.keys_fill_l2):
                most = Int32(2)
            else:
                alone += processors
        rounds = cutlass.max(tiles - alone, 0) // stride
    elif left == 0 and stride < processors and head_tiles > geometry.tasks and 4 * rounds > 3 * geometry.tasks:
        rounds -= 1
    return most, rounds, stride


@cute.jit
def numbers_of(deal: TileDeal, cta: Int32) -> Numbers:
    """Where the tiles of CTA number `cta` stand."""
    block = quotient(cta, deal.stride)
    begin = block * deal.most
    first = cta + (begin - block) * deal.stride.value
    count = cutlass.min(deal.rounds - begin, deal.most)
    if count <= 0:
        first, count = cta + deal.tiles - deal.ctas, Int32(1)
    return Numbers(first, count, deal.stride.value)


class Tasks:
    """A CTA's query tiles: `one`, or `count` in a `table` in shared memory [words, tasks]. `geometry` is the variant's,
    and so is `causal`, or, with a key mask, the call's."""

    def __init__(
        self,
        geometry: PrefillGeometry,
        causal: bool | Int32,
        heads_per_kv_head: Int32,
        count: Int32 | int,
        table: cute.Tensor | None = None,
        one: QueryTile | None = None,
        listed: bool = False,
    ):
        self.geometry = geometry
        self.causal = causal
        self.heads_per_kv_head = heads_per_kv_head
        self.count = count
        self.table = table
        self.one = one
        self.listed = listed

    @property
    def _values(self) -> tuple:
        own = (self.count, self.table) if self.one is None else (self.one,)
        return self.heads_per_kv_head, *own, *(() if isinstance(self.causal, bool) else (self.causal,))

    def __extract_mlir_values__(self) -> list:
        return [value for each in self._values for value in cutlass.extract_mlir_values(each)]

    def __new_from_mlir_values__(self, values: list) -> Tasks:
        made = []
        for each in self._values:
            size = len(cutlass.extract_mlir_values(each))
            made.append(cutlass.new_from_mlir_values(each, values[:size]))
            values = values[size:]
        causal = self.causal if isinstance(self.causal, bool) else made.pop()
        if self.one is not None:
            return Tasks(self.geometry, causal, made[0], self.count, one=made[1])
        return Tasks(self.geometry, causal, *made, listed=self.listed)

    def write(self, task: Int32, tile: QueryTile, mask: KeyMask | None) -> None:
        """Write a tile to the table; called by one lane."""
        words = (tile.head, tile.tile, *tile.q, *tile.kv)
        if mask is not None:
            words = (*words, *list_of(mask, tile, self.geometry.tile_q))
        for index, word in enumerate(words):
            self.table[index, task] = word

    def tile(self, task: Int32) -> QueryTile:
        """Tile number `task`; one without rows where there is none."""
        if self.one is not None:
            return self.one
        head, tile, *spans = (self.table[index, task] for index in range(TASK_WORDS))
        return QueryTile(Boolean(True), head, tile, Span(*spans[:2]), Span(*spans[2:]), Int32(0))

    def work(self, task: Int32, tile: QueryTile) -> WorkRange:
        """The KV tiles of task number `task`, which is `tile`."""
        geometry = self.geometry
        if self.listed:
            return listed_work([self.table[TASK_WORDS + index, task] for index in range(LIST_WORDS)])
        return work_range(
            tile.tile * geometry.tile_q, geometry.tile_q, geometry.tile_kv, tile.q.length, tile.kv.length, self.causal
        )
