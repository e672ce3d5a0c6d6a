"""What one query tile of a Blackwell prefill CTA visits of the KV tiles that the CTA loads."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cutlass_dsl import select_

from ...parts.blackwell.pair import rank_of
from ...prefill.tile_scheduler import QueryTile
from ...prefill.work_range import WorkRange, tile_at, work_range
from .geometry import PrefillGeometry


class TileWork(NamedTuple):
    """What a query tile takes part in: `events` of the KV tiles that the CTA visits, from number `start` on; none when
    0.

    The CTA visits masked tiles first, the last ones leading, so what only the later query tile sees comes first."""

    first_row: Int32
    start: Int32
    events: Int32


@cute.jit
def tile_work(
    geometry: cutlass.Constexpr[PrefillGeometry], first_row: Int32, spans, causal: bool | Int32, work: WorkRange
) -> TileWork:
    """The part of the query tile that starts at `first_row` in the CTA's `work`; `spans` are those of q and kv. CTAs of
    a pair take part in all: their products are the same instructions.

    With a key mask, a query tile takes part in all listed tiles but the first, if that one lies behind its last row's
    position: no other can, as the query tiles of a CTA are a KV tile's keys apart."""
    span_q, span_kv = spans
    events = work.tiles
    if const_expr(geometry.plan.ctas == 1):
        own = work_range(first_row, geometry.rows, geometry.tile_kv, span_q.length, span_kv.length, causal).tiles
        if const_expr(work.listed is not None):
            own = work.tiles - select_((work.tiles > 0) & (tile_at(work, Int32(0)) >= own), Int32(1), Int32(0))
        events = own if first_row < span_q.length else Int32(0)
    return TileWork(first_row, work.tiles - events, events)


@cute.jit
def first_tile(geometry: cutlass.Constexpr[PrefillGeometry], place: QueryTile) -> Int32:
    """The number of this CTA's first query tile in its sequence; `place` is what the CTAs of the plan compute."""
    cta = place.tile if const_expr(geometry.plan.ctas == 1) else place.tile * geometry.plan.ctas + rank_of(True)
    return cta * geometry.query_tiles
