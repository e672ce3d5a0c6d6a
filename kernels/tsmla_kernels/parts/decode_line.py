"""The line of a decode's work, and how it is cut. The idea and the words are in `tsmla/plan.py`, whose integers this
file repeats on the device; lengths are known only here. What a CTA finds on its stretch of the line: `decode_work.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from tsmla.plan import MAX_GROUP, Deal, RowTiling

from .division import Divisor, divisor_of, quotient, quotient_up
from .visible import Visibility, VisibleKeys, keys_of_tokens

LANE_REQUESTS = 2
"""Requests that a lane looks at together, so that their loads are in flight together."""
WARP_REQUESTS = 32 * LANE_REQUESTS


class Terms(NamedTuple):
    """What the cut of a call's line depends on besides lengths. A CTA begins with the cut, in code that is not in its
    cache yet, so the host divides what it can. `shares`: of the groups that may split units, how many each unit has."""

    batch: Int32
    rows: Int32
    heads: Divisor
    row_tiles: Int32
    group: Divisor
    rounds: Divisor
    parts: Divisor
    groups: Int32
    split_groups: Divisor
    units: Int32
    units_each: Int32
    shares: Divisor


class Work(NamedTuple):
    """The cut line, and this CTA's place: positions `begin .. end - 1`, column `column` of its group.

    unit_length is 0 where cuts fall where they may, else the length that every unit counts as. A unit's tiles begin
    `overhead` positions behind its start."""

    terms: Terms
    groups: Int32
    chunk: Int32
    unit_length: Int32
    overhead: Int32
    index: Int32
    column: Int32
    begin: Int32
    end: Int32


@cute.jit
def row_tiling(rows: Int32, row_tile: Int32) -> RowTiling:
    """`rows` is q_len x heads."""
    row_tiles = (rows + row_tile - 1) // row_tile
    rounds = (row_tiles + MAX_GROUP - 1) // MAX_GROUP
    group = (row_tiles + rounds - 1) // rounds
    return RowTiling(row_tiles, group, rounds)


@cute.jit
def terms_of(
    deal: cutlass.Constexpr[Deal], batch: Int32, q_len: Int32, heads: Int32, parts: Int32, slots: Int32
) -> Terms:
    """Of a call on `parts` CTAs (or pairs) with room for `slots` partial results."""
    rows = q_len * heads
    row_tiles, group, rounds = row_tiling(rows, Int32(deal.row_tile))
    groups, units, slots_each = parts // group, batch * rounds, slots // group
    split_groups = cutlass.min(groups, cutlass.max(slots_each // 2, slots_each - units) + 1)
    return Terms(
        batch, rows, divisor_of(heads), row_tiles, divisor_of(group), divisor_of(rounds), divisor_of(parts), groups,
        divisor_of(split_groups), units, (units + groups - 1) // groups,
        divisor_of(cutlass.max(split_groups // cutlass.max(units, 1), 1)),
    )  # fmt: skip


@cute.jit
def on_the_line(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms) -> Visibility:
    """`view` with room for no more keys than 31 bits count on the line, whatever lengths say: on the host. Page tables
    that have entries for so many do not exist."""
    room = ((1 << 30) // terms.units - deal.overhead) * Int64(deal.tile_kv)
    return view._replace(capacity=Int32(cutlass.min(Int64(view.capacity), cutlass.max(room, Int64(0)))))


@cute.jit
def deal_work(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms, part: Int32) -> Work:
    """Cut the line; `part` is the number of the CTA (or pair) that asks."""
    batch, rounds, units, split_groups = terms.batch, terms.rounds.value, terms.units, terms.split_groups.value
    lane = cute.arch.lane_idx()
    total, longest, base = Int32(0), Int32(0), Int32(0)
    while base < batch:
        for i in cutlass.range_constexpr(LANE_REQUESTS):
            length = length_of_units(deal, view, batch, base + LANE_REQUESTS * lane + i)
            total += length
            longest = cutlass.max(longest, length)
        base += WARP_REQUESTS
    total = cute.arch.warp_redux_sync(total, "add") * rounds
    longest = cutlass.max(cute.arch.warp_redux_sync(longest, "max") - deal.overhead, 1)

    tiles = total - units * deal.overhead
    chunk = cutlass.max(quotient_up(total, terms.split_groups), deal.least)
    # With `draw` 16, this limit would be below a chunk and below an equal cut, and so never decide.
    memory = quotient(quotient(tiles * deal.draw, 16), terms.parts) if const_expr(deal.draw > 16) else Int32(0)
    groups, unit_length, overhead = terms.groups, Int32(0), Int32(deal.overhead)
    whole = terms.units_each * (longest + deal.overhead)
    if split_groups == 1 or whole <= cutlass.max(chunk + deal.split, memory) + deal.overhead:
        chunk = terms.units_each * longest
        unit_length = longest
    else:
        equal = quotient_up(longest, terms.shares)
        cut = cutlass.max(cutlass.max(equal, memory), deal.least)
        if units <= split_groups and cut <= cutlass.max(chunk + deal.split // 2, memory):
            cuts = quotient_up(longest, cut)
            groups = units * cuts
            chunk = cut
            unit_length = cuts * cut
        else:
            groups = split_groups
    if unit_length > 0:
        total = units * unit_length
        overhead = Int32(0)
    index = quotient(part, terms.group)
    begin = cutlass.min(cutlass.min(index, groups) * chunk, total)
    end = cutlass.min(cutlass.min(index + 1, groups) * chunk, total)
    column = part - index * terms.group.value
    return Work(terms, groups, chunk, unit_length, overhead, index, column, begin, end)


@cute.jit
def tiles_with(deal: cutlass.Constexpr[Deal], keys: VisibleKeys) -> tuple[Int32, Int32]:
    """(first, count) of the KV tiles that hold keys."""
    first = keys.first // deal.tile_kv
    count = (keys.end + deal.tile_kv - 1) // deal.tile_kv - first
    if keys.end <= keys.first:
        count = Int32(0)
    return first, count


@cute.jit
def length_of_units(deal: cutlass.Constexpr[Deal], view: Visibility, batch: Int32, request: Int32) -> Int32:
    """Positions of each of a request's units; 0 beyond the batch."""
    known = cutlass.min(request, batch - 1)
    _, count = tiles_with(deal, keys_of_tokens(view, known, Int32(0), view.q_len - 1))
    length = count + deal.overhead
    if request >= batch:
        length = Int32(0)
    return length
