"""What a CTA of a decode does: the segments that the work line deals to it. The idea and the words are in
`tsmla/plan.py`, whose integers this file repeats on the device; lengths are known only here.

Every warp asks on its own, all its lanes together; nothing is shared and nothing is written.

    terms = terms_of(deal, batch, q_len, heads, parts, slots)  # on the host
    work = deal_work(deal, view, terms, part)
    unit = first_unit(deal, work, view)
    while unit.start < work.end:
        segment = segment_of(deal, work, view, unit)
        if segment.valid:
            ...
        unit = next_unit(deal, work, view, unit)
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
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


class Unit(NamedTuple):
    """Round number `round` of a request: `length` positions from `start`."""

    request: Int32
    round: Int32
    start: Int32
    length: Int32


class Segment(NamedTuple):
    """KV tiles `first_tile .. first_tile + tiles - 1` of the cache, for rows `first_row .. first_row + rows - 1` of a
    request (row = token x heads + head). `valid` is False where a unit gives this CTA nothing to do. slot: where
    the partial result goes, -1 when the segment must write the result itself (0 and -inf when it has no tiles). `seen`
    tiles has the row tile in all. keys: what some of the rows may see; all others must count as if they were not
    there."""

    valid: Boolean
    request: Int32
    row_tile: Int32
    first_row: Int32
    rows: Int32
    first_tile: Int32
    tiles: Int32
    slot: Int32
    seen: Int32
    keys: VisibleKeys


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
            length = _length_or_zero(deal, view, batch, base + LANE_REQUESTS * lane + i)
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
def first_unit(deal: cutlass.Constexpr[Deal], work: Work, view: Visibility) -> Unit:
    """The unit at the CTA's first position; one that starts at or after `work.end` when it has none."""
    return unit_at(deal, work, view, work.begin)


@cute.jit
def unit_at(deal: cutlass.Constexpr[Deal], work: Work, view: Visibility, position: Int32) -> Unit:
    """The unit that takes a position of the line; one that starts at the line's end for positions beyond it."""
    request, round_number, start, length = work.terms.batch, Int32(0), Int32(0), work.unit_length
    if work.unit_length > 0:
        number = quotient(position, work.unit_length)
        request = quotient(number, work.terms.rounds)
        round_number = number - request * work.terms.rounds.value
        start = number * work.unit_length
    else:
        lane = cute.arch.lane_idx()
        base = Int32(0)
        found = Boolean(False)
        while (not found) and base < work.terms.batch:
            lengths = [
                _length_or_zero(deal, view, work.terms.batch, base + LANE_REQUESTS * lane + i)
                for i in range(LANE_REQUESTS)
            ]
            mine = sum(lengths[1:], lengths[0]) * work.terms.rounds.value
            ends = _inclusive_sum(mine, lane)
            past = cute.arch.vote_ballot_sync(start + ends > position)
            if past != 0:
                winner = cute.arch.popc((past & -past) - 1)
                start += cute.arch.shuffle_sync(ends - mine, winner)
                request = base + LANE_REQUESTS * winner
                for i in cutlass.range_constexpr(LANE_REQUESTS):
                    candidate = cute.arch.shuffle_sync(lengths[i], winner)
                    if not found:
                        if start + candidate * work.terms.rounds.value > position:
                            found = Boolean(True)
                            length = candidate
                        else:
                            start += candidate * work.terms.rounds.value
                            request += 1
            else:
                start += cute.arch.shuffle_sync(ends, 31)
                base += WARP_REQUESTS
        if found:
            round_number = quotient(position - start, length)
            start += round_number * length
    return Unit(request, round_number, start, length)


@cute.jit
def next_unit(deal: cutlass.Constexpr[Deal], work: Work, view: Visibility, unit: Unit) -> Unit:
    """The unit behind this one on the line."""
    request, number, start, length = unit.request, unit.round + 1, unit.start + unit.length, unit.length
    if number == work.terms.rounds.value:
        number = Int32(0)
        request += 1
        if work.unit_length == 0:
            length = _length_or_zero(deal, view, work.terms.batch, request)
    return Unit(request, number, start, length)


@cute.jit
def segment_of(deal: cutlass.Constexpr[Deal], work: Work, view: Visibility, unit: Unit) -> Segment:
    """What this CTA does of a unit that overlaps its positions."""
    row_tile = unit.round * work.terms.group.value + work.column
    first_row = row_tile * deal.row_tile
    rows = cutlass.min(work.terms.rows - first_row, deal.row_tile)
    keys = _keys_of_rows(work, view, unit.request, first_row, rows)
    seen_first, seen = _tiles(deal, keys)
    tiles_at = unit.start + work.overhead
    first = cutlass.min(cutlass.max(work.begin - tiles_at, 0), seen)
    last = cutlass.min(cutlass.max(work.end - tiles_at, 0), seen)
    tiles = last - first
    valid = tiles > 0
    slot = Int32(-1)
    if seen == 0:
        valid = unit.start >= work.begin
    elif tiles < seen:
        slot = tail_slot(work.index) if first > 0 else head_slot(work, unit, work.index)
        slot = slot * work.terms.group.value + work.column
    valid = valid and rows > 0
    return Segment(valid, unit.request, row_tile, first_row, rows, seen_first + first, tiles, slot, seen, keys)


class Split(NamedTuple):
    """The segments of one row tile of a unit lie with groups `first .. first + count - 1`; 0 when it has no tiles."""

    first: Int32
    count: Int32


@cute.jit
def split_of(work: Work, unit: Unit, segment: Segment) -> Split:
    """Into how many segments this CTA's row tile of a unit is cut, and where they are. `segment` is any of them."""
    tiles_at = unit.start + work.overhead
    first = quotient(tiles_at, work.chunk)
    count = quotient(tiles_at + cutlass.max(segment.seen, 1) - 1, work.chunk) - first + 1
    if segment.seen == 0 or segment.rows <= 0:
        count = Int32(0)
    return Split(first, count)


@cute.jit
def tail_slot(index: Int32) -> Int32:
    """Slot, within a column, of the segment that a unit begun by an earlier group has in group `index`."""
    return index - 1


@cute.jit
def head_slot(work: Work, unit: Unit, index: Int32) -> Int32:
    """Slot, within a column, of the segment that begins a unit which a later group goes on with."""
    number = unit.request * work.terms.rounds.value + unit.round
    if work.terms.batch * work.terms.rounds.value >= work.groups:
        number = index
    return work.groups - 1 + number


@cute.jit
def _keys_of_rows(work: Work, view: Visibility, request: Int32, first_row: Int32, rows: Int32) -> VisibleKeys:
    """What rows of a request see together; rows may be none."""
    first_token, last_token = Int32(0), view.q_len - 1
    if work.terms.row_tiles > 1:
        first_token = quotient(first_row, work.terms.heads)
        last_token = quotient(first_row + cutlass.max(rows, 1) - 1, work.terms.heads)
    return keys_of_tokens(view, request, first_token, last_token)


@cute.jit
def _tiles(deal: cutlass.Constexpr[Deal], keys: VisibleKeys) -> tuple[Int32, Int32]:
    """(first, count) of the KV tiles that hold keys."""
    first = keys.first // deal.tile_kv
    count = (keys.end + deal.tile_kv - 1) // deal.tile_kv - first
    if keys.end <= keys.first:
        count = Int32(0)
    return first, count


@cute.jit
def _length_or_zero(deal: cutlass.Constexpr[Deal], view: Visibility, batch: Int32, request: Int32) -> Int32:
    """Positions of each of a request's units; 0 beyond the batch."""
    known = cutlass.min(request, batch - 1)
    _, count = _tiles(deal, keys_of_tokens(view, known, Int32(0), view.q_len - 1))
    length = count + deal.overhead
    if request >= batch:
        length = Int32(0)
    return length


@cute.jit
def _inclusive_sum(value: Int32, lane: Int32) -> Int32:
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            value += below
    return value
