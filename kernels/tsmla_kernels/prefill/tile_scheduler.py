"""CTA number -> query tile, for ragged packs: no host knowledge of the lengths, no scratch memory.

The grid has room for `tile_bound` query tiles times the heads. A CTA finds its sequence by a warp-wide prefix sum over
the lengths, which are read all at once: nothing can be loaded before they are there. Within a sequence, heads are taken
in sections whose keys and values fit in L2 together. Within a section the longest tiles (the last rows, when causal)
start first, so that the last CTAs to start are the shortest: NEIGHBOURS tiles of one head, then those of the next head.
(Longest-first with L2 sections: FlashAttention-4, arXiv 2603.05451.)"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..parts.division import quotient
from ..parts.seqlen import Span, apart, span_of
from ..parts.warp import inclusive_sum
from .tile_bounds import ALIKE, L2_SECTION_BYTES, SIDE_BY_SIDE

NEIGHBOURS = 2
"""Query tiles of one head that neighbouring CTAs take; 2 to 64 measured alike on an H200, 1 slightly slower. With 2, a
last group that is short has one tile."""


class Packs(NamedTuple):
    """A call's packs of queries and of keys: where their sequences end [sequences + 1], rows of either, query heads,
    and query heads for each key head."""

    cum_seq_lens_q: cute.Tensor
    cum_seq_lens_kv: cute.Tensor
    rows: tuple[Int32, Int32]
    heads: Int32
    heads_per_kv_head: Int32


def packs_of(given) -> Packs:
    """Collect, on the host, what a call's arguments, by name, say of its packs."""
    heads = given.q.shape[1]
    rows = (given.q.shape[0], given.k.shape[0])
    return Packs(given.cum_seq_lens_q, given.cum_seq_lens_kv, rows, heads, heads // given.k.shape[1])


class QueryTile(NamedTuple):
    """What a CTA computes: query tile `tile` of `head` in the sequence with the rows `q` and `kv`, and this sequence's
    number; `valid` is False for CTAs beyond the last tile."""

    valid: Boolean
    head: Int32
    tile: Int32
    q: Span
    kv: Span
    sequence: Int32


def tile_bound(total_rows, sequences, tile_q: int):
    """An upper bound of the number of query tiles, however `total_rows` are divided into `sequences` spans."""
    return total_rows // tile_q + sequences


@cute.jit
def query_tile(
    cta: Int32,
    packs: Packs,
    tile_q: cutlass.Constexpr,
    kv_row_bytes: cutlass.Constexpr,
    alternating: Int32 | None = None,
    short_last: cutlass.Constexpr[bool] = False,
    section_bytes: Int32 | int = L2_SECTION_BYTES,
    one: Boolean | bool = True,
    section_heads: cutlass.Constexpr[int | None] = None,
) -> QueryTile:
    """The tile of this CTA. Every thread of a warp must call it together.

    alternating: the heads whose tiles all have numbers below it come before the others, head by head, and a head's
    tiles alternate between its ends: the last, the first, the last but one, the second, ...; where the first number is
    odd, the first, the last, the second, ... Any two tiles of an even and the next odd number are then as much work as
    any other two, and those of one CTA that follow each other have the same keys.

    `short_last` says that a query tile with fewer rows than others takes less time: where a sequence has far more keys
    than queries, its heads come in batches of about as many tiles as run side by side, a batch's short tiles last; all
    of its heads if each CTA has `one` tile, else those that do not alternate. Heads then are worked on at the same
    time, and CTAs end at about the same time.

    With `section_heads`, a section has the query heads of so many key heads, whatever `section_bytes` says.

    A query's end that is smaller than one before it counts as that one: then no two sequences share query rows, and
    there are no more tiles than CTAs. Keys may be shared."""
    cum_seq_lens_q, cum_seq_lens_kv, rows, heads, heads_per_kv_head = packs
    sequences = cute.size(cum_seq_lens_q, mode=[0]) - 1
    lane = cute.arch.lane_idx()
    base = Int32(0)
    first_cta = Int32(0)
    tiles = Int32(0)
    end_q = Int32(0)
    found = Boolean(False)
    q, kv, sequence = Span(Int32(0), Int32(0)), Span(Int32(0), Int32(0)), Int32(0)
    while (not found) and base < sequences:
        mine = base + lane
        lane_q, lane_kv = Span(Int32(0), Int32(0)), Span(Int32(0), Int32(0))
        if mine < sequences:
            lane_q, lane_kv = span_of(cum_seq_lens_q, mine, rows[0]), span_of(cum_seq_lens_kv, mine, rows[1])
        lane_q = apart(lane_q, end_q, mine < sequences)
        lane_tiles = (lane_q.length + tile_q - 1) // tile_q
        ends = inclusive_sum(lane_tiles, lane)
        past = cute.arch.vote_ballot_sync(first_cta + ends * heads > cta)
        if past != 0:
            winner = cute.arch.popc((past & -past) - 1)
            q, kv = _span_in(lane_q, winner), _span_in(lane_kv, winner)
            kv = Span(kv.start, cutlass.max(kv.length, 0))
            tiles = cute.arch.shuffle_sync(lane_tiles, winner)
            first_cta += (cute.arch.shuffle_sync(ends, winner) - tiles) * heads
            found, sequence = Boolean(True), base + winner
        else:
            first_cta += cute.arch.shuffle_sync(ends, 31) * heads
            end_q = cute.arch.shuffle_sync(lane_q.start + lane_q.length, 31)
            base += 32
    head = Int32(0)
    tile = Int32(0)
    if found:
        first_head, index, in_batches = Int32(0), cta - first_cta, Boolean(False)
        if const_expr(short_last):
            in_batches = tiles > 1 and q.length % tile_q != 0 and kv.length > ALIKE * Int64(q.length)
        if const_expr(alternating is not None):
            if not (in_batches and one):
                first_head = cutlass.min(quotient(cutlass.max(alternating - first_cta, 0), tiles), heads)
                index -= first_head * tiles
        head, tile = _sectioned(
            index, first_head, heads - first_head, heads_per_kv_head, tiles, kv.length * kv_row_bytes, section_bytes,
            in_batches if const_expr(short_last) else None, section_heads,
        )  # fmt: skip
        if const_expr(alternating is not None):
            if index < 0:
                head = quotient(index + first_head * tiles, tiles)
                place = cta - first_cta - head * tiles
                tile = cutlass.select_(cta % 2 == 0, tiles - 1 - place // 2, place // 2)
    return QueryTile(found, head, tile, q, kv, sequence)


@cute.jit
def _sectioned(
    index: Int32, first_head: Int32, heads: Int32, heads_per_kv_head: Int32, tiles: Int32, kv_bytes: Int32,
    section_bytes: Int32 | int, in_batches: Boolean | None, section_key_heads: cutlass.Constexpr[int | None],
) -> tuple[Int32, Int32]:  # fmt: skip
    """Head and tile number `index` of `heads` heads from `first_head` on: section by section, longest first; or batch
    by batch, the whole tiles head by head, and then the last tile of each. Both divide by the same numbers, which are
    found before a CTA's first copy."""
    held, kv_bytes, alike = Int32(section_bytes), cutlass.max(kv_bytes, 1), heads_per_kv_head
    if const_expr(in_batches is not None):
        held = cutlass.select_(in_batches, Int32(SIDE_BY_SIDE), held)
        kv_bytes = cutlass.select_(in_batches, tiles, kv_bytes)
        alike = cutlass.select_(in_batches, Int32(1), alike)
    if const_expr(section_key_heads is not None):
        section_heads = cutlass.min(section_key_heads * alike, heads)
    else:
        section_heads = cutlass.min(cutlass.max(quotient(held, kv_bytes), 1) * alike, heads)
    section = quotient(index, section_heads * tiles)
    before = section * section_heads
    here = cutlass.min(section_heads, heads - before)
    within = index - before * tiles
    width, whole = NEIGHBOURS * here, tiles - 1
    if const_expr(in_batches is not None):
        width = cutlass.select_(in_batches, whole, width)
    group = quotient(within, width)
    rest = within - group * width
    alone = tiles - group * NEIGHBOURS < NEIGHBOURS
    head = cutlass.select_(alone, rest, rest // NEIGHBOURS)
    tile = whole - group * NEIGHBOURS - cutlass.select_(alone, 0, rest % NEIGHBOURS)
    if const_expr(in_batches is not None):
        is_last = group >= here
        head = cutlass.select_(in_batches, cutlass.select_(is_last, within - here * whole, group), head)
        tile = cutlass.select_(in_batches, cutlass.select_(is_last, whole, rest), tile)
    return first_head + before + head, tile


@cute.jit
def _span_in(span: Span, lane: Int32) -> Span:
    return Span(cute.arch.shuffle_sync(span.start, lane), cute.arch.shuffle_sync(span.length, lane))
