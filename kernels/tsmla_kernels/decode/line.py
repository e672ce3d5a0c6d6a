"""The line of a decode's work, and how it is cut, on the device, where alone the lengths are known.

`tsmla/identity/plan.py` has the idea and the words (group, round, unit, chunk). A *worker* is one CTA, or one pair of
CTAs, that the plan launches: the kernel argument `workers` counts them. What a worker finds on its stretch of the line:
`segments.py`. `tsmla_emulator.dealt` runs both files in Python's integers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from tsmla.identity.arch import Deal
from tsmla.identity.plan import MAX_GROUP, row_tiling

from ..parts.division import Divisor, divisor_of, quotient, quotient_up
from ..parts.keys.visible import MOST, Visibility, VisibleKeys, keys_of_tokens, tokens_of_two, varies

LANE_REQUESTS = 2
"""Requests that a lane looks at together, so that their loads are in flight together."""
WARP_REQUESTS = 32 * LANE_REQUESTS


class Terms(NamedTuple):
    """Everything the deal needs from a call except the lengths, as if every request had the most query rows. The host
    does the divisions: a CTA begins with the cut, in code that is in no instruction cache yet.

    rows: of a request, query tokens x heads. workers: CTAs (or pairs). slots: partial results that there is room for;
    without any, units are not split. split_groups: groups that may split units. shares: split_groups for each unit.
    single: most tiles of a unit that is cut into single tiles. mixes: 1 where requests may have fewer row tiles than
    others, else 0."""

    batch: Int32
    rows: Int32
    heads: Divisor
    row_tiles: Int32
    group: Divisor
    rounds: Int32
    workers: Divisor
    slots: Int32
    groups: Int32
    split_groups: Divisor
    units: Int32
    units_each: Int32
    shares: Divisor
    single: Int32
    mixes: Int32


class Work(NamedTuple):
    """The cut line and this worker's place on it: positions `begin .. end - 1`, column `column` of group `index`; and
    the `view` by which it was cut.

    own_group: workers of a group where requests differ in rounds, and cuts fall where they may (`cut_line`); 0 where
    `terms` hold for all. unit_length: the length that every unit counts as; 0 where cuts fall where they may."""

    view: Visibility
    terms: Terms
    own_group: Int32
    groups: Int32
    chunk: Int32
    unit_length: Int32
    index: Int32
    column: Int32
    begin: Int32
    end: Int32


class Line(NamedTuple):
    """The cut line: a `Work` without a worker's place, and the line's `total` positions."""

    view: Visibility
    terms: Terms
    own_group: Int32
    groups: Int32
    chunk: Int32
    unit_length: Int32
    total: Int32


class LaneWork(NamedTuple):
    """A `Work` for a warp with few registers: each lane keeps one of its numbers, in `own`, and reading a number is a
    shuffle, which all lanes must ask for together."""

    view: Visibility
    terms: Terms
    own: Int32


OWN = Work._fields[2:]
"""The numbers of a `Work` that a lane may keep, in the lanes' order."""
for _number, _name in enumerate(OWN):
    setattr(LaneWork, _name, property(lambda work, lane=_number: cute.arch.shuffle_sync(work.own, lane)))


@cute.jit
def in_lanes(work: Work) -> LaneWork:
    numbers, lane = work[-len(OWN) :], cute.arch.lane_idx()
    own = numbers[0]
    for number in cutlass.range_constexpr(1, len(OWN)):
        if lane == number:
            own = numbers[number]
    return LaneWork(work.view, work.terms, own)


@cute.jit
def terms_of(deal: cutlass.Constexpr[Deal], view: Visibility, heads: Int32, workers: Int32, slots: Int32) -> Terms:
    """Collect, on the host, the terms of a call on `workers` CTAs (or pairs) with room for `slots` partial results."""
    batch = view.seq_lens.shape[0]
    rows = view.q_len * heads
    row_tiles, group, rounds = row_tiling(rows, Int32(deal.row_tile))
    groups, units, slots_each = workers // group, batch * rounds, slots // group
    split_groups = cutlass.min(groups, cutlass.max(slots_each // 2, slots_each - units) + 1)
    shares = cutlass.max(split_groups // cutlass.max(units, 1), 1)
    single = cutlass.min(deal.single // cutlass.max(units * group, 1), shares)
    return Terms(
        batch, rows, divisor_of(heads), row_tiles, divisor_of(group), rounds, divisor_of(workers), slots, groups,
        divisor_of(split_groups), units, (units + groups - 1) // groups, divisor_of(shares), single,
        mixes(view, row_tiles),
    )  # fmt: skip


@cute.jit
def mixes(view: Visibility, row_tiles: Int32) -> Int32:
    """Whether requests may have fewer row tiles than the `row_tiles` of the largest; asked on the host."""
    return Int32(varies(view) & (row_tiles > 1))


@cute.jit
def most_row_tiles(view: Visibility, heads: Int32, row_tile: Int32) -> Int64:
    """The most row tiles that all requests together may have, asked on the host: what the rows of all fill, and one
    more for each request."""
    batch, rows = Int64(view.seq_lens.shape[0]), Int64(view.q_len) * heads
    return cutlass.min(batch * ((rows + row_tile - 1) // row_tile), Int64(view.tokens) * heads // row_tile + batch)


def of_equal_lengths(view: Visibility, terms: Terms) -> tuple[Visibility, Terms]:
    """Tell the compiler that all requests have as many query tokens."""
    return view._replace(vary=Int32(0)), terms._replace(mixes=Int32(0))


def of_packs(view: Visibility) -> Visibility:
    """Tell the compiler that requests differ in query tokens."""
    return view._replace(vary=Int32(1))


def leaves_whole(terms: Terms) -> Boolean:
    """Whether no unit is split: a group takes the units that start at its positions."""
    return terms.slots == 0


@cute.jit
def goes_in_step(deal: cutlass.Constexpr[Deal], work: Work | LaneWork) -> Boolean:
    """Whether groups walk the keys of a request in step: see `begin_in_step`."""
    in_step = Boolean(False)
    if const_expr(deal.in_step > 0):
        in_step = (work.own_group > 0) & (work.chunk >= deal.in_step) & (not leaves_whole(work.terms))
    return in_step


@cute.jit
def on_the_line(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms) -> Visibility:
    """Bound, on the host, the keys of `view` so that all positions of the line fit in 31 bits, whatever lengths say.
    Page tables that have entries for so many keys do not exist."""
    units = Int64(terms.units)
    if terms.mixes != 0:
        units = most_row_tiles(view, terms.heads.value, Int32(deal.row_tile))
    room = ((1 << 30) // units - deal.overhead) * Int64(deal.tile_kv)
    return view._replace(capacity=Int32(cutlass.min(Int64(view.capacity), cutlass.max(room, Int64(0)))))


@cute.jit
def deal_work(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms, worker: Int32) -> Work:
    """Cut the line and find the place of CTA (or pair) number `worker`."""
    return work_of(cut_line(deal, view, terms), worker)


@cute.jit
def cut_line(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms) -> Line:
    """Cut the line. On Hopper one warp deals, by short code, since the deal lies in front of the other roles
    (kernels/log/hopper-decode.md, "Where code lies"). On Blackwell each role cuts the line on its own; with the short
    code ptxas spilled registers in 3 to 10 of 54 decodes, so they have another."""
    return _cut_shortly(deal, view, terms) if const_expr(deal.in_step > 0) else _cut_apart(deal, view, terms)


@cute.jit
def _cut_shortly(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms) -> Line:
    """Cut the line: as if all requests had the most row tiles, or, where they differ, into groups of as many workers as
    the fewest row tiles keep busy.

    Such groups leave nobody idle, but other requests then take several rounds, each of which reads the keys. They are
    taken where the other cut's chunks are much longer: the more row tiles a round has, the less its keys count
    (kernels/log/hopper-decode.md, "Packs, small and mixed")."""
    total, few, again = Int32(0), Int32(0), Boolean(True)
    positions, longest, least = Int32(0), Int32(0), Int32(0)
    while again:
        positions, longest, least = _measured(deal, view, terms, few)
        again = Boolean(False)
        if few == 0:
            total = positions * terms.rounds
            if terms.mixes != 0:
                least = cute.arch.warp_redux_sync(least, "min")
                if least < terms.row_tiles:
                    few = cutlass.min(cutlass.min(least, MAX_GROUP), terms.workers.value)
                    again = Boolean(True)
    groups, chunk, unit_length = _cut(deal, terms, total, cutlass.max(longest - deal.overhead, 1))
    own_group = Int32(0)
    if few > 0:
        own_groups, shorter = _cut_in_groups(deal, terms, few, positions)
        if (terms.rounds > 1) | (chunk > shorter + quotient(3 * shorter, 8 * few) + 1):
            own_group, total, groups, chunk, unit_length = few, positions, own_groups, shorter, Int32(0)
    if unit_length > 0:
        total = terms.units * unit_length
    return Line(view, terms, own_group, groups, chunk, unit_length, total)


@cute.jit
def _measured(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms, few: Int32) -> tuple[Int32, Int32, Int32]:
    """What the lengths of all requests come to: positions, if groups have `few` workers, or if each request has one
    round where there are none; positions of the longest unit; and the fewest row tiles of a request, in each lane of
    those that it looked at."""
    base, tokens, positions, longest, least = Int32(0), Int32(0), Int32(0), Int32(0), Int32(MOST)
    while base < terms.batch:
        request = base + LANE_REQUESTS * cute.arch.lane_idx()
        *spans, tokens = tokens_of_two(view, request, tokens)
        for i in cutlass.range_constexpr(LANE_REQUESTS):
            length = length_of_units(deal, view, terms.batch, request + i, spans[i].length)
            longest = cutlass.max(longest, length)
            row_tiles = row_tiles_of(deal, terms, spans[i].length)
            least = cutlass.min(least, row_tiles if row_tiles > 0 else Int32(MOST))
            if few > 0:
                length *= quotient_up(row_tiles, few)
            positions += length
        base += WARP_REQUESTS
    return cute.arch.warp_redux_sync(positions, "add"), cute.arch.warp_redux_sync(longest, "max"), least


@cute.jit
def _cut_apart(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms) -> Line:
    """Cut the line: where requests differ in row tiles, by `_cut_mixed`."""
    batch = terms.batch
    total, longest, base, tokens = Int32(0), Int32(0), Int32(0), Int32(0)
    least, most = Int32(MOST), Int32(0)
    while base < batch:
        request = base + LANE_REQUESTS * cute.arch.lane_idx()
        *spans, tokens = tokens_of_two(view, request, tokens)
        for i in cutlass.range_constexpr(LANE_REQUESTS):
            length = length_of_units(deal, view, batch, request + i, spans[i].length)
            total += length
            longest = cutlass.max(longest, length)
        if terms.mixes != 0:
            for i in cutlass.range_constexpr(LANE_REQUESTS):
                row_tiles = row_tiles_of(deal, terms, spans[i].length)
                most = cutlass.max(most, row_tiles)
                least = cutlass.min(least, row_tiles if row_tiles > 0 else Int32(MOST))
        base += WARP_REQUESTS
    total = cute.arch.warp_redux_sync(total, "add") * terms.rounds
    longest = cutlass.max(cute.arch.warp_redux_sync(longest, "max") - deal.overhead, 1)
    differ = Boolean(False)
    if terms.mixes != 0:
        least = cute.arch.warp_redux_sync(least, "min")
        differ = (cute.arch.warp_redux_sync(most, "max") > 0) & (least < terms.row_tiles)
    groups, chunk, unit_length, own_group = Int32(0), Int32(0), Int32(0), Int32(0)
    if differ:
        own_group, total, groups, chunk = _cut_mixed(deal, view, terms, least)
    else:
        groups, chunk, unit_length = _cut(deal, terms, total, longest)
        if unit_length > 0:
            total = terms.units * unit_length
    return Line(view, terms, own_group, groups, chunk, unit_length, total)


@cute.jit
def work_of(line: Line, worker: Int32) -> Work:
    """A worker's place on a line that has been cut."""
    group, index = line.own_group, Int32(0)
    if group > 0:
        index = quotient(worker, group)
    else:
        group = line.terms.group.value
        index = quotient(worker, line.terms.group)
    begin, end = (cutlass.min(cutlass.min(index + i, line.groups) * line.chunk, line.total) for i in range(2))
    return Work(*line[:-1], index, worker - index * group, begin, end)


@cute.jit
def between(work: Work | LaneWork, begin: Int32, end: Int32) -> Work | LaneWork:
    """Give `work` other positions."""
    if const_expr(isinstance(work, LaneWork)):
        own, lane = work.own, cute.arch.lane_idx()
        for name, value in (("begin", begin), ("end", end)):
            if lane == OWN.index(name):
                own = value
        result = LaneWork(work.view, work.terms, own)
    else:
        result = work._replace(begin=begin, end=end)
    return result


@cute.jit
def group_of(work: Work | Line) -> Int32:
    """Workers of a group."""
    return work.own_group if work.own_group > 0 else work.terms.group.value


@cute.jit
def _cut(deal: cutlass.Constexpr[Deal], terms: Terms, total: Int32, longest: Int32) -> tuple[Int32, Int32, Int32]:
    """(groups, chunk, unit_length) if all requests have the most row tiles. `total`: positions of all units; `longest`:
    tiles of the longest unit."""
    units, split_groups = terms.units, terms.split_groups.value
    tiles = total - units * deal.overhead
    chunk = cutlass.max(quotient_up(total, terms.split_groups), deal.least)
    # With `draw` 16, this limit would be below a chunk and below an equal cut, and so never decide.
    memory = quotient(quotient(tiles * deal.draw, 16), terms.workers) if const_expr(deal.draw > 16) else Int32(0)
    groups, unit_length = terms.groups, Int32(0)
    whole = terms.units_each * (longest + deal.overhead)
    if split_groups == 1 or whole <= cutlass.max(chunk + deal.split, memory) + deal.overhead:
        chunk = terms.units_each * longest
        unit_length = longest
    else:
        least = Int32(deal.least)
        if const_expr(deal.single > 0):
            if longest <= terms.single:
                least = Int32(1)
        cut = cutlass.max(quotient_up(longest, terms.shares), least)
        if units <= split_groups and cut <= cutlass.max(chunk + deal.split // 2, memory):
            cuts = quotient_up(longest, cut)
            groups = units * cuts
            chunk = cut
            unit_length = cuts * cut
        else:
            groups = split_groups
    return groups, chunk, unit_length


@cute.jit
def _cut_mixed(
    deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms, least: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """(own_group, total, groups, chunk) where requests differ in row tiles, of which none has fewer than `least`.

    Groups of as many workers as the fewest row tiles keep busy leave nobody idle, but other requests then take several
    rounds, each of which reads the keys. Where groups for the most row tiles read all keys once, and chunks grow little
    by it, they are taken: the fewer row tiles a round has, the more its keys count (kernels/log/hopper-decode.md,
    "Requests with fewer tokens than others")."""
    few = cutlass.min(cutlass.min(least, MAX_GROUP), terms.workers.value)
    total, total_of_many = _totals_of_mixed(deal, view, terms, few)
    own_group = few
    groups, chunk = _cut_in_groups(deal, terms, few, total)
    groups_of_many, longer = _cut_in_groups(deal, terms, terms.group, total_of_many)
    little = quotient(chunk, 8 * few * few)
    if (terms.rounds == 1) & (terms.group.value > few) & (longer - chunk <= little):
        own_group, total, groups, chunk = terms.group.value, total_of_many, groups_of_many, longer
    return own_group, total, groups, chunk


@cute.jit
def _cut_in_groups(
    deal: cutlass.Constexpr[Deal], terms: Terms, group: Int32 | Divisor, total: Int32
) -> tuple[Int32, Int32]:
    """(groups, chunk) where cuts fall where they may."""
    groups = quotient(terms.workers.value, group)
    if not leaves_whole(terms):
        groups = cutlass.min(groups, quotient(terms.slots, group) // 2 + 1)
    return groups, cutlass.max(quotient_up(total, groups), deal.least)


@cute.jit
def _totals_of_mixed(deal: cutlass.Constexpr[Deal], view: Visibility, terms: Terms, few: Int32) -> tuple[Int32, Int32]:
    """Positions of all requests where these differ in row tiles, if groups have `few` workers, and if they are as for
    the most row tiles."""
    of_few, of_many, base, tokens = Int32(0), Int32(0), Int32(0), Int32(0)
    while base < terms.batch:
        request = base + LANE_REQUESTS * cute.arch.lane_idx()
        *spans, tokens = tokens_of_two(view, request, tokens)
        for i in cutlass.range_constexpr(LANE_REQUESTS):
            length = length_of_units(deal, view, terms.batch, request + i, spans[i].length)
            row_tiles = row_tiles_of(deal, terms, spans[i].length)
            of_few += length * quotient_up(row_tiles, few)
            of_many += length * quotient_up(row_tiles, terms.group)
        base += WARP_REQUESTS
    return cute.arch.warp_redux_sync(of_few, "add"), cute.arch.warp_redux_sync(of_many, "add")


@cute.jit
def row_tiles_of(deal: cutlass.Constexpr[Deal], terms: Terms, q_len: Int32) -> Int32:
    """Row tiles of a request of q_len query tokens."""
    return (q_len * terms.heads.value + deal.row_tile - 1) // deal.row_tile


@cute.jit
def rounds_of(deal: cutlass.Constexpr[Deal], work: Work, q_len: Int32) -> Int32:
    """Rounds that a request of q_len query tokens takes."""
    rounds = work.terms.rounds
    if work.own_group > 0:
        rounds = quotient_up(row_tiles_of(deal, work.terms, q_len), work.own_group)
    return rounds


@cute.jit
def tiles_with(deal: cutlass.Constexpr[Deal], keys: VisibleKeys) -> tuple[Int32, Int32]:
    """(first, count) of the KV tiles that hold keys."""
    first = keys.first // deal.tile_kv
    count = (keys.end + deal.tile_kv - 1) // deal.tile_kv - first
    if keys.end <= keys.first:
        count = Int32(0)
    return first, count


@cute.jit
def length_of_units(
    deal: cutlass.Constexpr[Deal], view: Visibility, batch: Int32, request: Int32, q_len: Int32
) -> Int32:
    """Positions that each unit of a request of q_len query tokens takes on the line; 0 beyond the batch."""
    known = cutlass.min(request, batch - 1)
    _, count = tiles_with(deal, keys_of_tokens(view, known, q_len - 1, Int32(0)))
    length = count + deal.overhead
    if q_len == 0:
        length = Int32(deal.overhead)
    if request >= batch:
        length = Int32(0)
    return length
