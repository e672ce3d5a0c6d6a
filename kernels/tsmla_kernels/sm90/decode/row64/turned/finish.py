"""The end of a task where value products are turned: from outputs, dims x rows, to rows of the result or partial ones
in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from tsmla.identity.dtype import bytes_of

from .....decode.results import Results, output_of
from .....limits import WARPGROUP
from .....parts.alignment import shared_vector
from .....parts.hopper.fragment import rows_columns
from .....parts.precision import packed_words
from .....parts.ptx import store_if
from ...work.task import is_rehearsal, look
from ..geometry import STAGED_ROWS, TURNED_DIMS, WARP_DIMS
from ..scaling import anchor_of_task
from .tile import Turned, columns_of, scale_columns

STAGED_LINE = TURNED_DIMS * 2
"""Bytes of a staged row: a warp's dims in 16 bits."""


@cute.jit
def finish(state: Turned, number: Int32, results: Results):
    """End task `number`: multiply rows by what ends them, and store them, as the result or in the partial one's slot.

    Rows with scales are divided by their sums first: averages of 8-bit values, whose scales are near the anchor, lie
    where float32 holds them in full; the quotient of a small anchor and a sum may not."""
    task = look(state.shared.dealt, number)
    ends = state.shared.edges.ends
    ends.wait_full(number)
    factors = columns_of(state.shared.exchange.turned.ends[None, number & 1], state.quad_lane)
    cute.arch.sync_warp()
    ends.release(number)
    column = state.mine * state.geometry.d_half + state.warp * TURNED_DIMS
    if task.slot >= 0:
        run_for = task.rows
        if is_rehearsal(task):  # it has no rows, and runs all that a whole row tile would
            run_for = Int32(state.geometry.tile_q)
        partial = results.partials.rows[task.slot, None, None]
        if const_expr(partial.element_type.width == 16):
            _store_staged(state, partial, column, task.rows, run_for, factors)
        else:
            _store_wide(state, partial, column, task.rows, run_for, factors)
    else:
        if const_expr(state.geometry.scaled):
            for output in state.outputs:
                scale_columns(rows_columns(output), factors)
            factors.fill(anchor_of_task(state.shared.exchange.anchors, number, task.tiles))
        rows = output_of(results.out, task.first_row, task.rows)
        _store_staged(state, rows, column, task.rows, task.rows, factors)


@cute.jit
def _store_staged(
    state: Turned, target: cute.Tensor, column: Int32, rows: Int32, run_for: Int32, factors: cute.Tensor
) -> None:
    """Store the warp's dims of rows, times `factors`, rounded to 16 bits, from `column` of `target` [rows, columns] on,
    up to before row `rows`; code of rows up to before `run_for` runs. They go by way of shared memory: a lane has two
    dims of a row, and stores eight."""
    dtype, lane = target.element_type, state.lane
    own_warp = state.mine * (WARPGROUP // 32) + state.warp
    staging = state.shared.exchange.staging + own_warp * (STAGED_ROWS * STAGED_LINE)
    put = staging + state.quad_lane * (2 * STAGED_LINE) + (lane // 4) * 4
    vector, in_step = lane & 7, lane >> 3
    for group in cutlass.range_constexpr(state.geometry.tile_q // STAGED_ROWS):
        if STAGED_ROWS * group < run_for:
            _put_rows(state, put, group, factors, dtype)
            cute.arch.sync_warp()
            for step in cutlass.range_constexpr(STAGED_ROWS // 4):
                row = 4 * step + in_step
                warp_dims, second = (vector >> 1) ^ (row >> 1 & 3), vector & 1
                place = staging + row * STAGED_LINE + warp_dims * (2 * WARP_DIMS) + second * 16
                words = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(shared_vector(Int32, place), words)
                position = STAGED_ROWS * group + row
                start = (target[position, None].iterator + (column + vector * 8)).toint()
                store_if(position < rows, start, 0, words)
            cute.arch.sync_warp()


@cute.jit
def _put_rows(
    state: Turned, put: Int32, group: cutlass.Constexpr[int], factors: cute.Tensor, dtype: cutlass.Constexpr
) -> None:
    """Put group `group` of STAGED_ROWS rows, times `factors`, where they are staged."""
    for i in cutlass.range_constexpr(2):
        own = 2 * group + i
        for number in cutlass.range_constexpr(len(state.outputs)):
            output = rows_columns(state.outputs[number])
            word = packed_words([output[half, own] * factors[own] for half in range(2)], dtype)[0]
            place = put + i * STAGED_LINE + (state.quad_lane ^ number) * (2 * WARP_DIMS)
            cute.make_tensor(cute.make_ptr(Int32, place, cute.AddressSpace.smem), cute.make_layout(1))[0] = word


@cute.jit
def _store_wide(
    state: Turned, target: cute.Tensor, column: Int32, rows: Int32, run_for: Int32, factors: cute.Tensor
) -> None:
    """Store rows as `_store_staged` does, but in float32: eight lanes have two whole sectors of a row."""
    for own in cutlass.range_constexpr(cute.size(factors)):
        if own // 2 * STAGED_ROWS < run_for:
            position = own // 2 * STAGED_ROWS + 2 * state.quad_lane + own % 2
            start = (target[position, None].iterator + (column + state.lane // 4 * 2)).toint()
            for number in cutlass.range_constexpr(len(state.outputs)):
                output = rows_columns(state.outputs[number])
                scaled = cute.make_rmem_tensor(2, Float32)
                for half in cutlass.range_constexpr(2):
                    scaled[half] = output[half, own] * factors[own]
                store_if(position < rows, start, bytes_of(32, number * WARP_DIMS), scaled)
