"""The end of a segment: output rows from tensor memory to global memory, whole or as a partial result."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_

from ...decode.results import Results
from ...decode.segments import Segment
from ...parts.alignment import aligned
from ...parts.blackwell import tmem
from ...parts.blackwell.epilogue import store_row
from ...parts.blackwell.row_softmax import scaled
from ...parts.row_end import BASE_2, RowEnd, count_sink, write_log_sum
from .geometry import DecodeGeometry
from .storage import Shared

BLOCK = 128
"""Columns of tensor memory that one product of 256 dims fills."""
HELD_COLUMNS = 64
"""Columns of tensor memory that a thread takes out at a time."""


@cute.jit
def wait_output(geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, tile: Int32):
    """Wait until the output holds all tiles before number `tile`: their probabilities have been read."""
    shared.edges.p.wait_empty(tile - 1 + geometry.p_slots)
    tmem.fence_after()


@cute.jit
def finish(
    geometry: cutlass.Constexpr[DecodeGeometry],
    shared: Shared,
    lane,
    segment: Segment,
    row: Int32,
    end: RowEnd,
    results: Results,
    tile: Int32,
    segments: Int32,
):
    """Write this thread's part of row `row` of the segment, whose `end` is base 2: first the columns that are complete
    early, while the products of the others run, then the others. tile: number of the tile behind the segment's last;
    segments: segments with tiles before this one."""
    whole, before, row_lse = segment.slot < 0, None, end.log_sum
    if const_expr(geometry.scale_slots > 0):  # rows first: a small factor times a small share of a sink is 0
        before = end.factor
        end = end._replace(factor=Float32(select_(before == 0.0, before, Float32(1.0))))
    factor = end.factor * 2.0**geometry.partial_rows.bias
    mine = row < segment.rows
    if whole:
        logged = const_expr(results.lse is not None)
        counted = count_sink(results.ending, segment.first_row + row, end, BASE_2, logged)
        factor, row_lse = counted.factor * results.ending.output_scale, counted.log_sum
    if segment.tiles > 0:
        # Columns are loaded while those before are written; where rows are converted, that would spill.
        overlaps = const_expr(not geometry.converts)
        half = geometry.o_columns // 2
        shared.edges.half.wait_full(segments)
        tmem.fence_after()
        ahead = tmem.load(lane.address, HELD_COLUMNS)
        for first in cutlass.range_constexpr(0, geometry.o_columns, HELD_COLUMNS):
            if const_expr(first > 0 and not overlaps):
                if const_expr(first == half):
                    wait_output(geometry, shared, tile)
                ahead = tmem.load(lane.address + first, HELD_COLUMNS)
            tmem.wait_loads()
            values = ahead
            if const_expr(overlaps and first + HELD_COLUMNS < geometry.o_columns):
                if const_expr(first + HELD_COLUMNS == half):
                    wait_output(geometry, shared, tile)
                ahead = tmem.load(lane.address + first + HELD_COLUMNS, HELD_COLUMNS)
            if const_expr(before is not None):
                values = scaled(values, before)
            if mine:
                _write_columns(geometry, lane, segment, row, first, scaled(values, factor), results)
    else:
        for first in cutlass.range(0, geometry.o_columns, HELD_COLUMNS, unroll=1):
            if mine:
                _write_columns(geometry, lane, segment, row, first, [Float32(0.0)] * HELD_COLUMNS, results)
    if lane.half == 0 and mine:
        if not whole:
            results.partials.lse[segment.slot, row] = row_lse
        elif const_expr(results.lse is not None):
            write_log_sum(results.lse, results.ending, segment.first_row + row, row_lse)


@cute.jit
def _write_columns(
    geometry: cutlass.Constexpr[DecodeGeometry],
    lane,
    segment: Segment,
    row: Int32,
    first,
    values: list,
    results: Results,
):
    """Write the columns from column `first` of tensor memory on, of this thread's part of a row."""
    dim = lane.half * geometry.lane_dims + first // BLOCK * geometry.block_dims + first % BLOCK
    if segment.slot < 0:
        _write(values, cute.domain_offset((Int64(segment.first_row) + row, dim), results.out))
    else:
        _write(values, cute.domain_offset((segment.slot, row, dim), results.partials.rows))


@cute.jit
def _write(values: list, target: cute.Tensor):
    store_row(values, cute.make_tensor(aligned(target.iterator, 16), len(values)), 0)
