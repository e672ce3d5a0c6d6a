"""How the work of a decode call is dealt to CTAs: pure integers, the mirror of the device's `parts/decode_line.py` and
`parts/decode_work.py`.

Rows of a request are its (query token, head) pairs, token-major, cut into row tiles; its keys are cut into KV tiles. A
*group* of CTAs takes the row tiles of one request side by side and walks the same KV tiles at the same time, so that
the cache is read from memory once; when a request has more row tiles than a group has CTAs, it takes several *rounds*.
A *unit* is one round of one request. Units stand one behind the other on a line that is cut into equal chunks, one per
group. Three ways of cutting are tried, and the first is taken that keeps no group busy for much longer than the last
would: groups take whole units; every unit is cut into the same number of cuts; or cuts fall where they may, units
taking a fixed overhead and one position per KV tile. Fewer cuts leave fewer partial results. What one group takes of
one unit is a *segment*. (Dealing the KV tiles of all requests to a fixed number of CTAs, with a fixed cost per request:
FlashMLA's tile scheduler.)

The device deals, from lengths that only it knows; the host decides how many CTAs there are. A *part* is what one CTA,
or one pair of CTAs, gets; the device calls who gets it a worker. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .arch import Arch, Deal
from .row_format import RowFormat
from .support import LATENT_DIM

PARTIAL_ROW = LATENT_DIM + 1
"""float32 words that a row of a partial result takes at most: the output and its LSE."""
RECORD_BYTES = 32
"""Bytes of what attention tells the combine about a row tile; the layout is in the device's `parts/partials.py`."""
MAX_GROUP = 8
"""Most CTAs (or pairs) that take row tiles of one request side by side."""
CALLERS_Q_LEN = 8
"""Callers size the workspace for this many query tokens, whatever q_len is below it."""


DEALS = {arch: arch.facts.deal for arch in Arch}
FEW_ROWS_DEALS = {arch: few for arch in Arch if (few := arch.facts.few_rows_deal)}
"""Deals of architectures that have another kernel for requests with so few rows that they fit in its row tile."""
FEW_WIDE_ROWS_DEALS = {
    arch: dataclasses.replace(
        DEALS[arch], overhead=few.overhead * few.tile_kv // DEALS[arch].tile_kv,
        split=few.split * few.tile_kv // DEALS[arch].tile_kv,
    )
    for arch, few in FEW_ROWS_DEALS.items()
}  # fmt: skip
"""Deals of requests with few rows of caches with `wide_rows`, which pairs of CTAs take: their costs are as many keys as
in FEW_ROWS_DEALS."""


def wide_rows(row: RowFormat) -> bool:
    """Whether products read 16-bit rows of the cache as they are. One SM's shared memory holds only two tiles of these,
    too few to be loading while it multiplies: a pair shares its tiles."""
    return row.scales is None and all(piece.dtype.bits == 16 for piece in row.pieces)


def deal_of(arch: Arch, rows: int, batch_invariant: bool = False, wide: bool = False) -> Deal:
    """The deal for requests of `rows` rows (query tokens x heads), the most that one of a batch may have, of a cache
    with `wide_rows` or of another. A call whose results must not depend on the batch gets the deal of many rows."""
    few = None if batch_invariant else FEW_ROWS_DEALS.get(arch)
    if few is None or rows > few.row_tile:
        return DEALS[arch]
    return FEW_WIDE_ROWS_DEALS[arch] if wide else few


class RowTiling(NamedTuple):
    """Row tiles of a request, CTAs side by side, and rounds that they need."""

    row_tiles: int
    group: int
    rounds: int


def row_tiling(rows: int, row_tile: int) -> RowTiling:
    """Row tiles, group and rounds for `rows` rows, q_len x heads. Groups are as equal as rounds allow."""
    row_tiles = -(-rows // row_tile)
    rounds = -(-row_tiles // MAX_GROUP)
    group = -(-row_tiles // rounds)
    return RowTiling(row_tiles, group, rounds)


class Line(NamedTuple):
    """The line cut for `groups` groups: `chunk` positions each. unit: the length that every unit counts as, 0 where
    cuts fall where they may; a chunk is one or more whole units, or one cut of a unit."""

    groups: int
    chunk: int
    unit: int


class Segment(NamedTuple):
    """KV tiles `first .. first + tiles - 1` of a unit, counted from the first that the row tile sees.

    slot: where the partial result goes, -1 when the segment has every tile of its unit and writes the result itself.
    """

    request: int
    row_tile: int
    first: int
    tiles: int
    slot: int


def longest_single(deal: Deal, tiling: RowTiling, batch: int) -> int:
    """Most tiles of a unit that may be cut into single tiles."""
    return deal.single // max(1, batch * tiling.rounds * tiling.group)


def cut(deal: Deal, tiling: RowTiling, parts: int, slots: int, lengths: Sequence[int]) -> Line:
    """The line for `lengths` KV tiles per request, on `parts` CTAs, with room for `slots` partial results."""
    groups = parts // tiling.group
    units = len(lengths) * tiling.rounds
    tiles = sum(lengths) * tiling.rounds
    longest = max(1, *lengths)
    slots_each = slots // tiling.group
    split_groups = min(groups, max(slots_each // 2, slots_each - units) + 1)
    chunk = max(-(-(tiles + units * deal.overhead) // split_groups), deal.least)
    memory = tiles * deal.draw // (16 * parts)
    units_each = -(-units // groups)
    whole = units_each * (longest + deal.overhead)
    if split_groups == 1 or whole <= max(chunk + deal.split, memory) + deal.overhead:
        return Line(groups, units_each * longest, longest)
    shares = max(split_groups // units, 1)
    is_single = longest <= min(longest_single(deal, tiling, len(lengths)), shares)
    cut = max(-(-longest // shares), 1 if is_single else deal.least)
    cuts = -(-longest // cut)
    if units <= split_groups and cut <= max(chunk + deal.split // 2, memory):
        return Line(units * cuts, cut, cuts * cut)
    return Line(split_groups, chunk, 0)


def tail_slot(group: int) -> int:
    """Slot (within a column) of the segment that a unit begun by an earlier group has in this one."""
    return group - 1


def head_slot(line: Line, by_unit: bool, unit: int, group: int) -> int:
    """Slot (within a column) of the segment that begins a unit which a later group goes on with."""
    return line.groups - 1 + (unit if by_unit else group)


def segments(
    deal: Deal, tiling: RowTiling, line: Line, lengths: Sequence[int], tiles: Sequence[Sequence[int]], part: int
) -> Iterator[Segment]:
    """What CTA number `part` does, in order. tiles[b][r]: KV tiles that row tile r of request b sees, at most
    lengths[b]."""
    rounds = [tiling.rounds] * len(lengths)
    mixed = MixedLine(tiling.group, rounds, line, sum(rounds) < line.groups, False, False)
    return _segments(deal, mixed, lengths, tiles, part)


def _segments(
    deal: Deal, mixed: MixedLine, lengths: Sequence[int], tiles: Sequence[Sequence[int]], part: int
) -> Iterator[Segment]:
    group, _ = divmod(part, mixed.group)
    if group >= mixed.line.groups:
        return
    for begin, end in _stretches(deal, mixed, lengths, group):
        yield from _segments_between(deal, mixed, lengths, tiles, part, begin, end)


def _stretches(deal: Deal, mixed: MixedLine, lengths: Sequence[int], group: int) -> list[tuple[int, int]]:
    """A group's positions (begin, end), in the order in which it walks them."""
    begin, end = group * mixed.line.chunk, (group + 1) * mixed.line.chunk
    start = 0
    for rounds, length in zip(mixed.rounds, lengths, strict=True):
        for _ in range(rounds if mixed.in_step else 0):
            tiles_at, stop = start + deal.overhead, start + deal.overhead + length
            if start <= begin < stop and tiles_at < begin and stop != end:
                turn = stop if stop < end else begin + max(tiles_at % mixed.line.chunk, 1)
                return [(turn, end), (begin, turn)]
            start = stop
    return [(begin, end)]


def _segments_between(
    deal: Deal,
    mixed: MixedLine,
    lengths: Sequence[int],
    tiles: Sequence[Sequence[int]],
    part: int,
    begin: int,
    end: int,
) -> Iterator[Segment]:
    """Segments of a part on positions `begin .. end - 1` of its group's."""
    group_size, rounds, line, by_unit, whole, in_step = mixed
    group, column = divmod(part, group_size)
    start = 0
    for unit, (request, turn) in enumerate((b, turn) for b, count in enumerate(rounds) for turn in range(count)):
        row_tile = turn * group_size + column
        tiles_at = start + (0 if line.unit else deal.overhead)
        if row_tile < len(tiles[request]):
            seen = tiles[request][row_tile]
            first = min(max(begin - tiles_at, 0), seen)
            last = min(max(end - tiles_at, 0), seen)
            if whole:
                first, last = 0, seen if begin <= start < end else 0
            if seen == 0 and begin <= start < end:
                yield Segment(request, row_tile, 0, 0, -1)
            elif last - first == seen > 0:
                yield Segment(request, row_tile, 0, seen, -1)
            elif last > first:
                if in_step:
                    slot = 2 * group - (first > 0 and first + tiles_at == group * line.chunk)
                else:
                    slot = tail_slot(group) if first else head_slot(line, by_unit, unit, group)
                yield Segment(request, row_tile, first, last - first, slot * group_size + column)
        start += line.unit or deal.overhead + lengths[request]


class MixedLine(NamedTuple):
    """The line of requests with various numbers of row tiles: CTAs side by side, rounds of each request; by_unit:
    whether heads of units have slots by units, not by groups; whole: whether units are not split, and belong to the
    group where they start.

    in_step: whether groups walk keys in step, so that rounds of a request that are far apart on the line find them in
    L2. Wherever its stretch begins, a group starts with the first key of a unit: what is left of an earlier one comes
    last. Where a unit goes on beyond the stretch, the next group starts on it a multiple of the chunk behind the first
    key, together with the groups that started at that key. Each group has two slots, one behind the other: for what
    lies where its stretch begins, and for what it started with, if there was more to come or had been some before."""

    group: int
    rounds: list[int]
    line: Line
    by_unit: bool
    whole: bool
    in_step: bool


def cut_mixed(
    deal: Deal, most_rows: int, rows: Sequence[int], parts: int, slots: int, lengths: Sequence[int]
) -> MixedLine:
    """The line for requests of `rows` rows each, at most `most_rows`. If all requests with rows have as many row tiles
    as `most_rows` makes, it is cut as if all had; otherwise cuts fall where they may, and a group is as large as the
    fewest row tiles keep busy."""
    tiling = row_tiling(most_rows, deal.row_tile)
    row_tiles = [-(-n // deal.row_tile) for n in rows]
    lengths = seen_lengths(rows, lengths)
    least = min((n for n in row_tiles if n), default=tiling.row_tiles)
    if least == tiling.row_tiles:
        line, rounds = cut(deal, tiling, parts, slots, lengths), [tiling.rounds] * len(rows)
        return MixedLine(tiling.group, rounds, line, sum(rounds) < line.groups, False, False)
    group = min(least, MAX_GROUP, parts)
    rounds = [-(-n // group) for n in row_tiles]
    total = sum(count * (deal.overhead + length) for count, length in zip(rounds, lengths, strict=True))
    groups = parts // group if slots == 0 else min(parts // group, slots // group // 2 + 1)
    line = Line(groups, max(-(-total // groups), deal.least), 0)
    return MixedLine(group, rounds, line, False, slots == 0, slots > 0 and 0 < deal.in_step <= line.chunk)


def seen_lengths(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """KV tiles of requests: none where there are no rows to see them."""
    return [length if n else 0 for n, length in zip(rows, lengths, strict=True)]


def mixed_segments(
    deal: Deal, mixed: MixedLine, lengths: Sequence[int], tiles: Sequence[Sequence[int]], part: int
) -> Iterator[Segment]:
    """What CTA number `part` does, in order, where requests differ in row tiles; tiles[b] has an entry for each row
    tile that request b has."""
    seen = seen_lengths([len(own) for own in tiles], lengths)
    return _segments(deal, mixed, seen, tiles, part)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """What the host fixes for a call. parts: CTAs (or pairs) launched. records: of RECORD_BYTES each, first in the
    workspace. slots: partial results, each of min(row_tile, rows) rows, that it then has room for in float32; kernels
    that keep them in fewer bytes find room for more."""

    parts: int
    row_tile: int
    row_tiles: int
    records: int
    slots: int
    workspace_bytes: int


def plan_decode(
    arch: Arch,
    sm_count: int,
    batch: int,
    q_len: int,
    heads: int,
    max_seq_len: int | None = None,
    varies: bool = False,
    batch_invariant: bool = False,
    wide: bool = False,
) -> DecodePlan:
    """The plan of a call. q_len: of every request, or the most that one has where it `varies`. batch_invariant: no unit
    is split, so that no result depends on what else there is to deal, and the workspace has no slots. wide: as
    `deal_of` has it; the workspace is never larger for it.

    Parts are as many as the GPU runs at once, fewer when `max_seq_len` keys per request cannot occupy them. The
    workspace never exceeds the callers' formula, sm_count * heads * max(8, q_len) * 513 * 4 bytes; where less would do
    (few units, short contexts), it is less."""
    # Contexts grow with every step: powers of two keep the number of different plans small.
    longest = None if max_seq_len is None else 1 << (max_seq_len - 1).bit_length()
    return _plan(arch, sm_count, batch, q_len, heads, longest, varies, batch_invariant, wide)


@functools.lru_cache(maxsize=4096)
def _plan(
    arch: Arch,
    sm_count: int,
    batch: int,
    q_len: int,
    heads: int,
    max_seq_len: int | None,
    varies: bool,
    batch_invariant: bool,
    wide: bool,
) -> DecodePlan:
    rows = q_len * heads
    deal = deal_of(arch, rows, batch_invariant, wide)
    tiling = row_tiling(rows, deal.row_tile)
    mixes = varies and tiling.row_tiles > 1
    groups = most_groups = max(1, sm_count // deal.sms // tiling.group)
    units = batch * tiling.rounds
    if max_seq_len is not None:
        # A range of max_seq_len keys that starts in the middle of a tile touches one tile more.
        tiles = -(-max_seq_len // deal.tile_kv)
        longest = units * (deal.overhead + tiles + 1)
        is_single = deal.least + deal.split < tiles <= longest_single(deal, tiling, batch)
        groups = min(groups, max(1, -(-longest // (1 if is_single else deal.least))))
    parts = groups * tiling.group
    if mixes and groups == most_groups:
        parts = max(parts, sm_count // deal.sms)
    stored = min(deal.row_tile, rows)
    formula = sm_count * heads * max(CALLERS_Q_LEN, q_len) * PARTIAL_ROW * 4
    records = parts if mixes else tiling.group * min(units, groups)
    record_bytes, slot_bytes = records * RECORD_BYTES, stored * PARTIAL_ROW * 4
    useful = 2 * (parts - 1) if mixes else tiling.group * (groups - 1 + min(units, groups - 1))
    slots = 0 if batch_invariant else min(useful, (formula - record_bytes) // slot_bytes)
    return DecodePlan(parts, deal.row_tile, tiling.row_tiles, records, slots, record_bytes + slots * slot_bytes)
