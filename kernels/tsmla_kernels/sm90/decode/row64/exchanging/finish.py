"""The end of a task in the Hopper decode: from the attending warpgroups to rows of the result in global memory. Partial
results: `partial_results.py`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp

from .....decode.results import Results, output_of
from .....parts.alignment import aligned, shared_vector
from .....parts.hopper.fragment import rows_columns
from .....parts.hopper.softmax import quad_sum
from .....parts.precision import packed_words
from .....parts.row_end import BASE_2, RowEnd, count_sink, end_of_row, write_log_sum
from .....parts.warp import QUAD
from ...work.task import Task, look
from ..geometry import OUTPUTS, STAGED_HALF, STAGED_HALF_STRIDE
from ..schedule import ROW_BARRIER
from ..state import DecodeState
from .partial_results import end_partial

WARP_ROWS = 16
STAGED_COLUMNS = 32
"""Columns of a warp's 16 rows that are staged at a time: two matrices of 16 x 16."""


@cute.jit
def finish(state: DecodeState, mine: Int32, number: Int32, results: Results):
    """End task `number` for warpgroup `mine`: add the row sums of both warpgroups, then divide rows by them: the
    result, or the partial one in its slot.

    The first row barrier also says that the counterpart has read the last probabilities, the second that it has read
    what it staged in their place."""
    task = look(state.shared.dealt, number)
    place = number & 1
    leader = state.place.coordinates[0, 0][1] == 0
    row_sums, own_sum = state.shared.exchange.row_sums, state.rows.total
    row_count = cute.size(own_sum)
    positions = [state.place.coordinates[row, 0][0] for row in range(row_count)]
    for row in cutlass.range_constexpr(row_count):
        own_sum[row] = quad_sum(own_sum[row])
    if leader:
        for row in cutlass.range_constexpr(row_count):
            row_sums[positions[row], mine, place] = own_sum[row]
    cute.arch.barrier(barrier_id=ROW_BARRIER + state.place.warp, number_of_threads=64)
    factors, log_sums = (cute.make_rmem_tensor_like(state.rows.total) for _ in range(2))
    for row in cutlass.range_constexpr(row_count):
        total = own_sum[row] + row_sums[positions[row], 1 - mine, place]
        end = end_of_row(state.rows.reference[row], state.scale_log2, total, state.geometry.probabilities.bias, BASE_2)
        factors[row] = end.factor
        log_sums[row] = end.log_sum
    geometry = state.geometry
    columns = [
        (first + mine * (second - first)) * geometry.value_columns
        for first, second in zip(geometry.places(0), geometry.places(1), strict=True)
    ]
    if task.slot >= 0:
        end_partial(state, mine, positions, columns, task, factors, log_sums, results.partials)
    else:
        _end_whole(state, mine, positions, columns, task, factors, log_sums, results)


@cute.jit
def _end_whole(
    state: DecodeState, mine: Int32, positions: list, columns: list, task: Task, factors: cute.Tensor,
    log_sums: cute.Tensor, results: Results,
) -> None:  # fmt: skip
    """End rows that have no other segment: this one has all of their tiles, or they have none."""
    rows, ending = output_of(results.out, task.first_row, task.rows), results.ending
    logged = const_expr(results.lse is not None)
    for row in cutlass.range_constexpr(cute.size(factors)):
        end = RowEnd(factors[row], log_sums[row])
        end = count_sink(ending, task.first_row + positions[row], end, BASE_2, logged)
        factors[row] = end.factor * ending.output_scale
        if const_expr(logged):
            if mine == 0 and state.place.coordinates[0, 0][1] == 0 and positions[row] < task.rows:
                write_log_sum(results.lse, ending, task.first_row + positions[row], end.log_sum)
    if task.tiles == 0:
        for i in cutlass.range_constexpr(OUTPUTS):
            _store_zeros(rows, columns[i], state.geometry.value_columns, WARP_ROWS * state.place.warp, task.rows)
    else:
        staging = state.shared.exchange.staging + mine * 2 * STAGED_HALF_STRIDE + state.place.warp * STAGED_HALF
        first_row = WARP_ROWS * state.place.warp
        for i in cutlass.range_constexpr(OUTPUTS):
            output = rows_columns(state.multiplying.outputs[i])
            _store_rows(rows, columns[i], output, factors, staging, first_row, task.rows)
    cute.arch.barrier(barrier_id=ROW_BARRIER + state.place.warp, number_of_threads=64)


@cute.jit
def _store_zeros(
    target: cute.Tensor, column: Int32, columns: cutlass.Constexpr[int], first_row: Int32, rows: Int32
) -> None:
    """Store zeros in `columns` columns of the warp's rows, where `_store_rows` puts outputs."""
    vector = 128 // target.element_type.width
    lanes = columns // vector
    lane = cute.arch.lane_idx()
    zeros = cute.make_rmem_tensor(vector, target.element_type)
    zeros.fill(0.0)
    for step in cutlass.range(WARP_ROWS * lanes // 32, unroll=1):
        row = first_row + step * (32 // lanes) + lane // lanes
        if row < rows:
            place = aligned(target[row, None].iterator + (column + lane % lanes * vector), 16)
            cute.autovec_copy(zeros, cute.make_tensor(place, vector))


@cute.jit
def _store_rows(
    target: cute.Tensor,
    column: Int32,
    accumulator: cute.Tensor,
    factors: cute.Tensor,
    staging: Int32,
    first_row: Int32,
    rows: Int32,
) -> None:
    """Store the warp's rows of an accumulator (rows, columns), times `factors`, rounded to 16 bits, from row
    `first_row` and `column` of `target` on, up to before row `rows`.

    A lane holds two columns of a row, and a sector that takes two stores takes twice the time. Rows therefore go by way
    of shared memory, where those of a warp have two places, `staging` and STAGED_HALF_STRIDE behind it; a lane then
    stores 16 bytes, four lanes 64 of a row."""
    dtype = target.element_type
    vector = 128 // dtype.width
    lane = cute.arch.lane_idx()
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    put = staging + (lane >> 3 & 1) * STAGED_HALF_STRIDE + _staged_at(lane & 7, lane >> 4)
    get = staging + _staged_at(lane // QUAD, lane % QUAD)
    stored_rows = [first_row + half * WARP_ROWS // 2 + lane // QUAD for half in range(2)]
    places = [target[row, None].iterator + (column + lane % QUAD * vector) for row in stored_rows]
    for group in cutlass.range_constexpr(cute.size(accumulator, mode=[1]) * QUAD // STAGED_COLUMNS):
        for matrix in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(4, Int32)
            first = STAGED_COLUMNS // QUAD * group + 4 * matrix
            for block in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    values = [accumulator[half, first + 2 * block + i] * factors[half] for i in range(2)]
                    words[2 * block + half] = packed_words(values, dtype)[0]
            cute.copy(store, cute.recast_tensor(words, dtype), shared_vector(dtype, put ^ (32 * matrix)))
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(shared_vector(Int32, get + half * STAGED_HALF_STRIDE), words)
            place = aligned(places[half] + STAGED_COLUMNS * group, 16)
            if stored_rows[half] < rows:
                cute.autovec_copy(cute.recast_tensor(words, dtype), cute.make_tensor(place, vector))
        cute.arch.sync_warp()


@cute.jit
def _staged_at(row: Int32, vector: Int32) -> Int32:
    """Where in eight rows a vector of 16 bytes, of the four of a row, lies, so that neither the same vectors of eight
    rows nor all of two rows share banks."""
    return (4 * row + (vector ^ (row >> 1 & 3))) * 16
