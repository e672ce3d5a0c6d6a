"""The part of the query that a CTA of the Blackwell decode holds in tensor memory (`DecodeGeometry.q_held`)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...decode.segments import Segment
from ...limits import VECTOR_WORDS
from ...parts.alignment import aligned
from ...parts.blackwell import tmem
from ...parts.division import Divisor
from ...parts.query import QueryRows, latent_words
from .geometry import CTA_ROWS, DecodeGeometry
from .storage import Shared

COLUMNS_AT_ONCE = 112
"""Columns that a thread has on their way to its registers."""


@cute.jit
def hold_query(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    rows: QueryRows,
    segment: Segment,
    warp: Int32,
    heads: Divisor,
    count: Int32,
):
    """Bring the rows of a segment, its q number `count`, from global memory to tensor memory, as warp number `warp` of
    a warpgroup. Row r goes to lane r and to lane 64 + r: products of the first and of the second half of the columns
    read their own. Rows past the segment's last are copies of it."""
    row = (warp * 32 + cute.arch.lane_idx()) & (CTA_ROWS - 1)
    address = tmem.row_address(shared.tmem_base, geometry.q_column, warp)
    found = segment.first_row + cutlass.min(row, segment.rows - 1)
    source = latent_words(rows, segment.request, found, heads)
    shared.edges.q.wait_empty(count)
    tmem.fence_after()
    for part in cutlass.range(geometry.q_held_columns // COLUMNS_AT_ONCE, unroll=1):
        first, words = part * COLUMNS_AT_ONCE, []
        for word in cutlass.range_constexpr(0, COLUMNS_AT_ONCE, VECTOR_WORDS):
            vector = cute.make_rmem_tensor(VECTOR_WORDS, Int32)
            place = aligned(source + first + word, VECTOR_WORDS * 4)
            cute.autovec_copy(cute.make_tensor(place, VECTOR_WORDS), vector)
            words += [vector[index] for index in range(VECTOR_WORDS)]
        tmem.store(address + first, words)
    tmem.wait_stores()
    tmem.fence_before()
    shared.edges.q.hand_over(count)
