"""What a worker of a decode does: the segments that the line of work deals to it (`line.py`).

Every warp asks on its own, all its lanes together; nothing is shared and nothing is written.

    terms = terms_of(deal, view, heads, workers, slots)  # on the host
    work = deal_work(deal, view, terms, worker)
    work, unit = begin(deal, work)
    done = for_each_unit(deal, work, unit, act, done)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from tsmla.identity.arch import Deal

from ..parts.division import quotient, remainder
from ..parts.keys.visible import Visibility, VisibleKeys, keys_of_tokens, tokens_behind, tokens_of_two, varies
from ..parts.seqlen import Span
from ..parts.warp import inclusive_sum
from .line import (
    LANE_REQUESTS,
    WARP_REQUESTS,
    LaneWork,
    Work,
    between,
    goes_in_step,
    group_of,
    leaves_whole,
    length_of_units,
    rounds_of,
    tiles_with,
)

FIRST_UNIT_AT = 16
"""Lane of a `LaneWork` that keeps the first number of a worker's first unit, where it goes in step."""


class Unit(NamedTuple):
    """One round of one request: `length` positions of the line from `start` on. first_token: where the request's query
    tokens begin, if requests vary in these."""

    request: Int32
    round: Int32
    start: Int32
    length: Int32
    first_token: Int32


class Segment(NamedTuple):
    """KV tiles `first_tile .. first_tile + tiles - 1` of a request for one of its row tiles.

    valid: False where a unit gives this worker nothing to do. first_row, rows: the rows, counted over all query tokens
    (row = token x heads + head); the request's tokens end at `end_token`. slot: where the partial result goes; -1 where
    the segment writes the result itself (0 and -inf if it has no tiles). seen: tiles that the row tile has in all.
    keys: what some of the rows may see; all others must count as if they were not there."""

    valid: Boolean
    request: Int32
    row_tile: Int32
    first_row: Int32
    rows: Int32
    end_token: Int32
    first_tile: Int32
    tiles: Int32
    slot: Int32
    seen: Int32
    keys: VisibleKeys


@cute.jit
def for_each_unit(
    deal: cutlass.Constexpr[Deal], work: Work | LaneWork, unit: Unit, act: cutlass.Constexpr[Callable], done: Any
) -> Any:
    """Call done = act(work, unit, segment, done) for each unit that overlaps the worker's positions, `unit` first, and
    return the last. Not every segment is valid. A worker that may go in step has a second stretch of positions behind
    the first: see `begin_in_step`."""
    if const_expr(_has_stretches(deal, work)):
        more = unit.start < work.end
        while more:
            done, unit = _past(deal, work, unit, act, done)
            more = unit.start < work.end
            if not more:
                work, unit = stretch_behind(deal, work, unit)
                more = unit.start < work.end
    else:
        while unit.start < work.end:
            done, unit = _past(deal, work, unit, act, done)
    return done


def _past(deal: Deal, work: Work | LaneWork, unit: Unit, act: Callable, done: Any) -> tuple[Any, Unit]:
    """Act on a unit; returns what has been done, and the next unit."""
    done = act(work, unit, segment_of(deal, work, unit), done)
    return done, next_unit(deal, work, unit)


def begin(deal: Deal, work: Work | LaneWork) -> tuple[Work | LaneWork, Unit]:
    """The positions that a worker walks first, as `work`, and its first unit."""
    return begin_in_step(deal, work) if _has_stretches(deal, work) else (work, first_unit(deal, work))


def _has_stretches(deal: Deal, work: Work | LaneWork) -> bool:
    """Whether a worker may have two stretches of positions."""
    return deal.in_step > 0 and isinstance(work, LaneWork)


@cute.jit
def first_unit(deal: cutlass.Constexpr[Deal], work: Work) -> Unit:
    """The unit at the worker's first position; one that starts at or after `work.end` where it has none."""
    return unit_at(deal, work, work.begin)


@cute.jit
def unit_at(deal: cutlass.Constexpr[Deal], work: Work, position: Int32) -> Unit:
    """The unit that takes a position of the line; for positions beyond the line, one that starts at its end."""
    request, round_number, start, length = work.terms.batch, Int32(0), Int32(0), work.unit_length
    first_token = Int32(0)
    if work.unit_length > 0:
        number = quotient(position, work.unit_length)
        request = number
        if work.terms.rounds > 1:
            request = quotient(number, work.terms.rounds)
        round_number = number - request * work.terms.rounds
        start = number * work.unit_length
        first_token = _first_token_of(work.view, request)
    else:
        lane = cute.arch.lane_idx()
        base, end_token = Int32(0), Int32(0)
        found = Boolean(False)
        while (not found) and base < work.terms.batch:
            one, other, end_token = tokens_of_two(work.view, base + LANE_REQUESTS * lane, end_token)
            lengths = [
                length_of_units(deal, work.view, work.terms.batch, base + LANE_REQUESTS * lane + i, span.length)
                for i, span in enumerate((one, other))
            ]
            rounds = [rounds_of(deal, work, span.length) for span in (one, other)]
            mine = lengths[0] * rounds[0] + lengths[1] * rounds[1]
            ends = inclusive_sum(mine, lane)
            past = cute.arch.vote_ballot_sync(start + ends > position)
            if past != 0:
                winner = cute.arch.popc((past & -past) - 1)
                start += cute.arch.shuffle_sync(ends - mine, winner)
                request = base + LANE_REQUESTS * winner
                for i in cutlass.range_constexpr(LANE_REQUESTS):
                    candidate = cute.arch.shuffle_sync(lengths[i], winner)
                    candidate_rounds = work.terms.rounds
                    if work.own_group > 0:
                        candidate_rounds = cute.arch.shuffle_sync(rounds[i], winner)
                    if not found:
                        if start + candidate * candidate_rounds > position:
                            found = Boolean(True)
                            length = candidate
                        else:
                            start += candidate * candidate_rounds
                            request += 1
                first_token = _told(work.view, request, one, other, winner)
            else:
                start += cute.arch.shuffle_sync(ends, 31)
                base += WARP_REQUESTS
        if found:
            round_number = quotient(position - start, length)
            start += round_number * length
    return Unit(request, round_number, start, length, first_token)


@cute.jit
def _told(view: Visibility, request: Int32, one: Span, other: Span, lane: Int32) -> Int32:
    """The first query token of a request, from the lane that looked at it as its `one` or its `other`."""
    first_token = Int32(0)
    if varies(view):
        first_token = cute.arch.shuffle_sync(one.start if request % LANE_REQUESTS == 0 else other.start, lane)
    return first_token


@cute.jit
def _first_token_of(view: Visibility, request: Int32) -> Int32:
    """The first query token of any request, found by reading the lengths of all before it."""
    first_token, base, end_token = Int32(0), Int32(0), Int32(0)
    if varies(view):
        while base <= request:
            one, other, end_token = tokens_of_two(view, base + LANE_REQUESTS * cute.arch.lane_idx(), end_token)
            base += WARP_REQUESTS
            if base > request:
                first_token = _told(view, request, one, other, request % WARP_REQUESTS // LANE_REQUESTS)
    return first_token


@cute.jit
def next_unit(deal: cutlass.Constexpr[Deal], work: Work, unit: Unit) -> Unit:
    """The unit behind this one on the line. A request without query tokens may have one of length 0."""
    request, number, start, length = unit.request, unit.round + 1, unit.start + unit.length, unit.length
    first_token, rounds = unit.first_token, work.terms.rounds
    if work.own_group > 0:
        rounds = rounds_of(deal, work, tokens_behind(work.view, request, first_token).length)
    if number >= rounds:
        number = Int32(0)
        request += 1
        tokens = tokens_behind(work.view, request, first_token)
        if work.unit_length == 0:
            length = length_of_units(deal, work.view, work.terms.batch, request, tokens.length)
            if (work.own_group > 0) & (tokens.length == 0):
                length = Int32(0)
        if varies(work.view):
            first_token = tokens.start
    return Unit(request, number, start, length, first_token)


@cute.jit
def begin_in_step(deal: cutlass.Constexpr[Deal], work: LaneWork) -> tuple[LaneWork, Unit]:
    """The stretch of a worker's positions that it walks first, and its first unit.

    Groups that walk keys in step find in L2 what rounds of a request far from theirs on the line have read. Wherever
    its positions begin, a group starts with the first key of a unit: what is left of an earlier one comes last. Where a
    unit goes on beyond its positions, the next group starts on it a multiple of the chunk behind the first key,
    together with the groups that started at that key. Each group has two slots, one behind the other: for what lies
    where its positions begin, and for what it started with, if there was more to come or had been some before."""
    first = first_unit(deal, work)
    own = work.own
    if const_expr(deal.in_step > 0):
        if goes_in_step(deal, work):
            tiles_at, stop, begin, end = first.start + deal.overhead, first.start + first.length, work.begin, work.end
            if (tiles_at < begin) & (stop != end):
                if stop > end:
                    begin += cutlass.max(remainder(tiles_at, work.chunk), 1)
                else:
                    begin = stop  # the first unit has nothing behind it
                own = between(work, begin, end).own
                for i in cutlass.range_constexpr(len(first)):
                    if cute.arch.lane_idx() == FIRST_UNIT_AT + i:
                        own = first[i]
    return LaneWork(work.view, work.terms, own), first


@cute.jit
def stretch_behind(deal: cutlass.Constexpr[Deal], work: LaneWork, unit: Unit) -> tuple[LaneWork, Unit]:
    """The worker's second stretch and its only unit, once the first has no more units; unchanged if there is none."""
    own = work.own
    if const_expr(deal.in_step > 0):
        begin = work.index * work.chunk
        if work.begin > begin:
            own = between(work, begin, work.begin).own
            unit = Unit(*(cute.arch.shuffle_sync(work.own, FIRST_UNIT_AT + i) for i in range(len(Unit._fields))))
    return LaneWork(work.view, work.terms, own), unit


@cute.jit
def segment_of(deal: cutlass.Constexpr[Deal], work: Work, unit: Unit) -> Segment:
    """What this worker does of a unit that overlaps its positions."""
    group, heads = group_of(work), work.terms.heads.value
    q_len, rows, rows_before = work.view.q_len, work.terms.rows, unit.request * work.terms.rows
    end_token = (unit.request + 1) * work.view.q_len
    if varies(work.view):
        tokens = tokens_behind(work.view, unit.request, unit.first_token)
        q_len, rows, rows_before = tokens.length, tokens.length * heads, tokens.start * heads
        end_token = tokens.start + tokens.length
    row_tile = unit.round * group + work.column
    first_row = row_tile * deal.row_tile
    rows = cutlass.min(rows - first_row, deal.row_tile)
    keys = _keys_of_rows(work, unit, q_len, first_row, rows)
    seen_first, seen = tiles_with(deal, keys)
    tiles_at = _tiles_at(deal, work, unit)
    first = cutlass.min(cutlass.max(work.begin - tiles_at, 0), seen)
    last = cutlass.min(cutlass.max(work.end - tiles_at, 0), seen)
    if leaves_whole(work.terms):
        first, last = Int32(0), seen if unit.start >= work.begin else Int32(0)
    tiles = last - first
    valid = tiles > 0
    slot = Int32(-1)
    if seen == 0:
        valid = unit.start >= work.begin
    elif tiles < seen:
        is_tail = first > 0
        if const_expr(deal.in_step > 0):
            if goes_in_step(deal, work):
                is_tail = is_tail & (first + tiles_at == work.index * work.chunk)
        slot = tail_slot(deal, work, work.index) if is_tail else head_slot(deal, work, unit, work.index)
        slot = slot * group + work.column
    valid = valid and rows > 0
    return Segment(
        valid, unit.request, row_tile, rows_before + first_row, rows, end_token, seen_first + first, tiles, slot, seen,
        keys,
    )  # fmt: skip


@cute.jit
def is_read_again(deal: cutlass.Constexpr[Deal], work: Work | LaneWork, segment: Segment) -> Boolean:
    """Whether other rounds read a segment's keys again: its request takes several, in a call where requests differ in
    row tiles."""
    again = Boolean(False)
    if const_expr(isinstance(work, LaneWork)):
        first_row = segment.first_row - segment.row_tile * deal.row_tile
        rows = segment.end_token * work.terms.heads.value - first_row
        again = (work.own_group > 0) & (rows > work.own_group * deal.row_tile)
    return again


@cute.jit
def _tiles_at(deal: cutlass.Constexpr[Deal], work: Work, unit: Unit) -> Int32:
    """Position of the line where a unit's tiles begin."""
    return unit.start + (deal.overhead if work.unit_length == 0 else 0)


class Split(NamedTuple):
    """How many segments a unit's row tile has, `count`, from group `first_group` on; 0 when it has no tiles. Each group
    has one, or two where groups go in step."""

    first_group: Int32
    count: Int32


@cute.jit
def split_of(deal: cutlass.Constexpr[Deal], work: Work, unit: Unit, segment: Segment) -> Split:
    """Into how many segments this worker's row tile of a unit is cut, and where they are. `segment` is any of them."""
    tiles_at = _tiles_at(deal, work, unit)
    first = quotient(tiles_at, work.chunk)
    count = quotient(tiles_at + cutlass.max(segment.seen, 1) - 1, work.chunk) - first + 1
    if const_expr(deal.in_step > 0):
        if goes_in_step(deal, work):
            # Each group between has two. The last has one if other units follow, or if the row tile ends first.
            begin = (first + count - 1) * work.chunk
            turn = begin + cutlass.max(remainder(tiles_at, work.chunk), 1)
            goes_on = unit.start + unit.length > begin + work.chunk
            reaches = tiles_at + segment.seen > turn
            count = 2 * (count - 1)
            if goes_on and reaches:
                count += 1
    if leaves_whole(work.terms):
        count = Int32(1)
    if segment.seen == 0 or segment.rows <= 0:
        count = Int32(0)
    return Split(first, count)


@cute.jit
def tail_slot(deal: cutlass.Constexpr[Deal], work: Work, index: Int32) -> Int32:
    """Slot, within a column, of what group `index` does of a unit that an earlier group began. In step: of what lies
    where the group's positions begin."""
    slot = index - 1
    if const_expr(deal.in_step > 0):
        if goes_in_step(deal, work):
            slot += index
    return slot


@cute.jit
def head_slot(deal: cutlass.Constexpr[Deal], work: Work, unit: Unit, index: Int32) -> Int32:
    """Slot, within a column, of the segment that begins a unit which a later group goes on with. In step: of what group
    `index` does first."""
    number = unit.request * work.terms.rounds + unit.round
    if (work.own_group > 0) | (work.terms.units >= work.groups):
        number = index
    slot = work.groups - 1 + number
    if const_expr(deal.in_step > 0):
        if goes_in_step(deal, work):
            slot = 2 * index
    return slot


@cute.jit
def _keys_of_rows(work: Work, unit: Unit, q_len: Int32, first_row: Int32, rows: Int32) -> VisibleKeys:
    """What rows of a unit's request, counted from its first, see together; rows may be none."""
    first_later, last_later = q_len - 1, Int32(0)
    if work.terms.row_tiles > 1:
        last_later = first_later - quotient(first_row + cutlass.max(rows, 1) - 1, work.terms.heads)
        first_later -= quotient(first_row, work.terms.heads)
    return keys_of_tokens(work.view, unit.request, first_later, last_later)
