"""How the work of a decode call is dealt to CTAs: what the host fixes of it, and what a kernel tells the dealer.

Rows of a request are its (query token, head) pairs, token-major, cut into row tiles; its keys are cut into KV tiles. A
*group* of CTAs takes the row tiles of one request side by side and walks the same KV tiles at the same time, so that
the cache is read from memory once; when a request has more row tiles than a group has CTAs, it takes several *rounds*.
A *unit* is one round of one request. Units stand one behind the other on a line that is cut into equal chunks, one per
group. Three ways of cutting are tried, and the first is taken that keeps no group busy for much longer than the last
would: groups take whole units; every unit is cut into the same number of cuts; or cuts fall where they may, units
taking a fixed overhead and one position per KV tile. Fewer cuts leave fewer partial results. What one group takes of
one unit is a *segment*. (Dealing the KV tiles of all requests to a fixed number of CTAs, with a fixed cost per request:
FlashMLA's tile scheduler.)

The device deals, from lengths that only it knows (`decode/line.py`, `decode/segments.py`); the host decides how
many CTAs there are. A *worker* is one CTA, or one pair of CTAs. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from .arch import Arch, Deal
from .row_format import RowFormat
from .support import LATENT_DIM

PARTIAL_ROW = LATENT_DIM + 1
"""float32 words that a row of a partial result takes at most: the output and its LSE."""
RECORD_BYTES = 32
"""Bytes of what attention tells the combine about a row tile; the layout is in the device's `decode/partials.py`."""
MAX_GROUP = 8
"""Most CTAs (or pairs) that take row tiles of one request side by side."""
CALLERS_Q_LEN = 8
"""Callers size the workspace for this many query tokens, whatever q_len is below it."""


DEALS = {arch: arch.facts.deal for arch in Arch}
FEW_ROWS_DEALS = {arch: few for arch in Arch if (few := arch.facts.few_rows_deal)}
"""Deals of architectures that have another kernel for requests with so few rows that they fit in its row tile."""
FEW_WIDE_ROWS_DEALS = {
    arch: dataclasses.replace(
        DEALS[arch],
        overhead=few.overhead * few.tile_kv // DEALS[arch].tile_kv,
        split=few.split * few.tile_kv // DEALS[arch].tile_kv,
    )
    for arch, few in FEW_ROWS_DEALS.items()
}
"""Deals of requests with few rows of caches with `wide_rows`, which pairs of CTAs take: their costs are as many keys as
in FEW_ROWS_DEALS."""


def wide_rows(row: RowFormat, gathers: bool) -> bool:
    """Whether bulk copies bring 16-bit rows of the cache as products read them. One SM's shared memory holds only two
    tiles of these, too few to be loading while it multiplies: a pair shares its tiles. Where keys are gathered, single
    CTAs make room for a third."""
    return not gathers and row.scales is None and all(piece.dtype.bits == 16 for piece in row.pieces)


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
    """Row tiles, group and rounds for `rows` rows, q_len x heads. Groups are as equal as rounds allow. Kernels' host
    code calls this with its own integers."""
    row_tiles = (rows + row_tile - 1) // row_tile
    rounds = (row_tiles + MAX_GROUP - 1) // MAX_GROUP
    group = (row_tiles + rounds - 1) // rounds
    return RowTiling(row_tiles, group, rounds)


def longest_single(deal: Deal, tiling: RowTiling, batch: int) -> int:
    """Most tiles of a unit that may be cut into single tiles."""
    return deal.single // max(1, batch * tiling.rounds * tiling.group)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """What the host fixes for a call. workers: CTAs (or pairs) launched. records: of RECORD_BYTES each, first in the
    workspace. slots: partial results, each of min(row_tile, rows) rows, that it then has room for in float32; kernels
    that keep them in fewer bytes find room for more."""

    workers: int
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

    Workers are as many as the GPU runs at once, fewer when `max_seq_len` keys per request cannot occupy them. The
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
    workers = groups * tiling.group
    if mixes and groups == most_groups:
        workers = max(workers, sm_count // deal.sms)
    stored = min(deal.row_tile, rows)
    formula = sm_count * heads * max(CALLERS_Q_LEN, q_len) * PARTIAL_ROW * 4
    records = workers if mixes else tiling.group * min(units, groups)
    record_bytes, slot_bytes = records * RECORD_BYTES, stored * PARTIAL_ROW * 4
    useful = 2 * (workers - 1) if mixes else tiling.group * (groups - 1 + min(units, groups - 1))
    slots = 0 if batch_invariant else min(useful, (formula - record_bytes) // slot_bytes)
    return DecodePlan(workers, deal.row_tile, tiling.row_tiles, records, slots, record_bytes + slots * slot_bytes)
