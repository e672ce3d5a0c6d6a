"""How the work of a decode call is dealt to CTAs: pure integers, the mirror of the device's `parts/decode_line.py` and
`parts/decode_work.py`.

Rows of a request are its (query token, head) pairs, token-major, cut into row tiles; its keys are cut into KV tiles.
A *group* of CTAs takes the row tiles of one request side by side and walks the same KV tiles at the same time, so that
the cache is read from memory once; when a request has more row tiles than a group has CTAs, it takes several *rounds*.
A *unit* is one round of one request. Units stand one behind the other on a line that is cut into equal chunks, one per
group, in the first of three ways that keeps no group busy for much longer than the last would: groups take whole units;
every unit is cut into the same number of cuts; or cuts fall where they may, units taking a fixed overhead and one
position per KV tile. Fewer cuts leave fewer partial results. What one group takes of one unit is a *segment*. (Dealing
the KV tiles of all requests to a fixed number of CTAs, with a fixed cost per request: FlashMLA's tile scheduler.)

The device deals, from lengths that only it knows; the host decides how many CTAs there are. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .support import LATENT_DIM
from .variant import Arch

PARTIAL_ROW = LATENT_DIM + 1
"""float32 words that a row of a partial result takes: the output and its LSE."""
RECORD_BYTES = 32
"""Of what attention tells the combine about a row tile; the layout is in the device's `parts/partials.py`."""
MAX_GROUP = 8
"""Most CTAs (or pairs) that take row tiles of one request side by side."""
CALLERS_Q_LEN = 8
"""Callers size the workspace for this many query tokens, whatever q_len is below it."""


@dataclasses.dataclass(frozen=True)
class Deal:
    """What a kernel tells the dealer about itself; costs are in KV tiles.

    overhead: fixed cost of a segment. least: shortest chunk. split: how much longer a group may be busy where there are
    fewer partial results or none. draw: what a part can read while memory brings every part 16 tiles; above 16, memory
    is as busy with fewer parts. sms: SMs that work on one row tile together.
    """

    row_tile: int
    tile_kv: int
    overhead: int
    least: int
    split: int
    draw: int = 16
    sms: int = 1


DEALS = {
    Arch.SM90A: Deal(row_tile=64, tile_kv=64, overhead=3, least=3, split=1),
    Arch.SM100A: Deal(row_tile=128, tile_kv=128, overhead=4, least=2, split=12, draw=19, sms=2),
    Arch.SM103A: Deal(row_tile=128, tile_kv=128, overhead=4, least=2, split=12, draw=19, sms=2),
}
FEW_ROWS_DEALS = {
    Arch.SM100A: Deal(row_tile=64, tile_kv=64, overhead=8, least=2, split=8, draw=19),
    Arch.SM103A: Deal(row_tile=64, tile_kv=64, overhead=8, least=2, split=8, draw=19),
}
"""Of architectures that have another kernel for requests with so few rows that they fit in its row tile."""


def deal_of(arch: Arch, rows: int) -> Deal:
    """The deal for requests of `rows` rows (query tokens x heads)."""
    few = FEW_ROWS_DEALS.get(arch)
    return few if few is not None and rows <= few.row_tile else DEALS[arch]


class RowTiling(NamedTuple):
    """Row tiles of a request, CTAs side by side, and rounds that they need."""

    row_tiles: int
    group: int
    rounds: int


def row_tiling(rows: int, row_tile: int) -> RowTiling:
    """`rows` is q_len x heads. Groups are as equal as rounds allow."""
    row_tiles = -(-rows // row_tile)
    rounds = -(-row_tiles // MAX_GROUP)
    group = -(-row_tiles // rounds)
    return RowTiling(row_tiles, group, rounds)


class Line(NamedTuple):
    """The line cut for `groups` groups: `chunk` positions each; `unit` is 0 where cuts fall where they may, else the
    length that every unit counts as: of whole units one or more make a chunk, of cuts one."""

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
    cut = max(-(-longest // max(split_groups // units, 1)), deal.least, memory)
    cuts = -(-longest // cut)
    if units <= split_groups and cut <= max(chunk + deal.split // 2, memory):
        return Line(units * cuts, cut, cuts * cut)
    return Line(split_groups, chunk, 0)


def tail_slot(group: int) -> int:
    """Slot (within a column) of the segment that a unit begun by an earlier group has in this one."""
    return group - 1


def head_slot(line: Line, units: int, unit: int, group: int) -> int:
    """Slot (within a column) of the segment that begins a unit which a later group goes on with."""
    return line.groups - 1 + (unit if units < line.groups else group)


def segments(
    deal: Deal, tiling: RowTiling, line: Line, lengths: Sequence[int], tiles: Sequence[Sequence[int]], part: int
) -> Iterator[Segment]:
    """What CTA number `part` does, in order. tiles[b][r]: KV tiles that row tile r of request b sees, at most
    lengths[b]."""
    group, column = divmod(part, tiling.group)
    if group >= line.groups:
        return
    begin, end = group * line.chunk, (group + 1) * line.chunk
    units = len(lengths) * tiling.rounds
    start = 0
    for unit in range(units):
        request, turn = divmod(unit, tiling.rounds)
        row_tile = turn * tiling.group + column
        tiles_at = start + (0 if line.unit else deal.overhead)
        if row_tile < tiling.row_tiles:
            seen = tiles[request][row_tile]
            first = min(max(begin - tiles_at, 0), seen)
            last = min(max(end - tiles_at, 0), seen)
            if seen == 0 and begin <= start < end:
                yield Segment(request, row_tile, 0, 0, -1)
            elif last - first == seen > 0:
                yield Segment(request, row_tile, 0, seen, -1)
            elif last > first:
                slot = tail_slot(group) if first else head_slot(line, units, unit, group)
                yield Segment(request, row_tile, first, last - first, slot * tiling.group + column)
        start += line.unit or deal.overhead + lengths[request]


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """What the host fixes for a call. parts: CTAs (or pairs) launched. records: of RECORD_BYTES each, first in the
    workspace. slots: partial results, each of min(row_tile, rows) rows, that it then has room for."""

    parts: int
    row_tile: int
    row_tiles: int
    records: int
    slots: int
    workspace_bytes: int


def plan_decode(
    arch: Arch, sm_count: int, batch: int, q_len: int, heads: int, max_seq_len: int | None = None
) -> DecodePlan:
    """The plan of a call. Parts are as many as the GPU runs at once, fewer when `max_seq_len` keys per request cannot
    occupy them. The workspace never exceeds the callers' formula, sm_count * heads * max(8, q_len) * 513 * 4 bytes;
    where less would do (few units, short contexts), it is less."""
    # Contexts grow with every step: powers of two keep the number of different plans small.
    longest = None if max_seq_len is None else 1 << (max_seq_len - 1).bit_length()
    return _plan(arch, sm_count, batch, q_len, heads, longest)


@functools.lru_cache(maxsize=4096)
def _plan(arch: Arch, sm_count: int, batch: int, q_len: int, heads: int, max_seq_len: int | None) -> DecodePlan:
    rows = q_len * heads
    deal = deal_of(arch, rows)
    tiling = row_tiling(rows, deal.row_tile)
    groups = max(1, sm_count // deal.sms // tiling.group)
    units = batch * tiling.rounds
    if max_seq_len is not None:
        # A range of max_seq_len keys that starts in the middle of a tile touches one tile more.
        longest = units * (deal.overhead + -(-max_seq_len // deal.tile_kv) + 1)
        groups = min(groups, max(1, -(-longest // deal.least)))
    stored = min(deal.row_tile, rows)
    formula = sm_count * heads * max(CALLERS_Q_LEN, q_len) * PARTIAL_ROW * 4
    records = tiling.group * min(units, groups)
    record_bytes, slot_bytes = records * RECORD_BYTES, stored * PARTIAL_ROW * 4
    slots = min(tiling.group * (groups - 1 + min(units, groups - 1)), (formula - record_bytes) // slot_bytes)
    return DecodePlan(
        groups * tiling.group, deal.row_tile, tiling.row_tiles, records, slots, record_bytes + slots * slot_bytes
    )
