"""Which KV tiles a query tile visits, and which of those need a mask: the one predicate that every role asks.

Rows are query positions within their sequence, columns key positions. With bottom-right causal masking, row i sees
columns 0 .. i + len_kv - len_q; whether a call is causal may be known at run time only. The masked tiles are visited
first, from the last backwards; then the others, from the first onwards: CTAs that share keys and run side by side then
read the same lines of L2 at the same time, whatever rows they hold (kernels/log/hopper-prefill.md, 3)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_
from tsmla.identity.key_mask import LIST_COUNTS

from ..parts import ptx


class WorkRange(NamedTuple):
    """What a query tile visits: `tiles` KV tiles, of which the `masked` first hold a column that some row may not see.
    Without a key mask they are tiles 0 .. tiles - 1, the last `masked` of them first. With one, the number of the first
    masked tile lies at address `listed` (`identity/key_mask.py`)."""

    tiles: Int32
    masked: Int32
    listed: Int64 | None = None


def last_column_ahead(causal: Int32 | bool, len_q: Int32, len_kv: Int32) -> Int32:
    """How far ahead of a row's own number the last column lies that it sees; without causal masking, farther than the
    keys go."""
    if causal is True:
        return len_kv - len_q
    return Int32(select_(causal != 0, len_kv - len_q, len_kv))


@cute.jit
def work_range(
    first_row: Int32,
    tile_q: cutlass.Constexpr,
    tile_kv: cutlass.Constexpr,
    len_q: Int32,
    len_kv: Int32,
    causal: Int32 | bool,
) -> WorkRange:
    """The KV tiles of query rows `first_row .. first_row + tile_q - 1`, none when no row sees a key."""
    end = len_kv
    full_end = len_kv
    if const_expr(causal is not False):
        shift = last_column_ahead(causal, len_q, len_kv)
        end_row = cutlass.min(first_row + tile_q, len_q)
        end = cutlass.min(len_kv, end_row + shift)
        full_end = cutlass.min(len_kv, first_row + shift + 1)
    tiles = (cutlass.max(end, 0) + tile_kv - 1) // tile_kv
    unmasked = cutlass.max(full_end, 0) // tile_kv
    return WorkRange(tiles, tiles - unmasked)


@cute.jit
def tile_at(work: WorkRange, count: Int32) -> Int32:
    """The tile visited as number `count` of the range."""
    if const_expr(work.listed is not None):
        place = select_(count < work.masked, count, work.masked - LIST_COUNTS - 1 - count)
        tile = _listed(work, count < work.tiles, Int32(place))
    else:
        tile = work.tiles - 1 - count
        if count >= work.masked:
            tile = count - work.masked
    return tile


def partial_tile(work: WorkRange, count: Int32) -> Int32:
    """The tile visited as number `count`, if it is a partial one of a list; else 0."""
    return _listed(work, count < work.masked, count)


def _listed(work: WorkRange, there: Boolean, place: Int32) -> Int32:
    return cute.arch.make_warp_uniform(ptx.load_if(Boolean(there), work.listed + Int64(place) * 4, 0, 1)[0])
