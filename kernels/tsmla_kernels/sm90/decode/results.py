"""From the attending warpgroups of the Hopper decode to global memory: rows of the result, or partial ones."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from ...parts.alignment import aligned, shared_vector
from ...parts.hopper.fragment import QUAD, rows_columns
from ...parts.hopper.softmax import _quad_max, quad_sum
from ...parts.partials import Partials
from ...parts.precision import larger_magnitudes, lift_of, packed_words
from ...parts.row_end import BASE_2, Ending, RowEnd, count_sink, end_of_row
from .geometry import OUTPUTS, STAGED_HALF, STAGED_HALF_STRIDE, TASK_RING
from .schedule import PAIR_BARRIER
from .task import Task, look
from .tile import AttendState

WARP_ROWS = 16
STAGED_COLUMNS = 32
"""Columns of a warp's 16 rows that are staged at a time: two matrices of 16 x 16."""

LEAST_FITTING, FLOAT16_INFINITE = 0x3400, 0x7C00
"""Bits of float16: of 1/4, where what is 2^-14 as large has the 9 bits of a bf16, and of infinity."""


class Results(NamedTuple):
    """Where rows go and how they end."""

    out: cute.Tensor
    lse: cute.Tensor | None
    partials: Partials
    ending: Ending


@cute.jit
def finish(state: AttendState, mine: Int32, number: Int32, results: Results):
    """End of task `number` for warpgroup `mine`. Row sums of both warpgroups, then rows divided by them: the result, or
    the partial one in its slot.

    The first pair barrier also says that the counterpart has read the last probabilities, the second that it has read
    what it staged in their place."""
    task = look(state.shared.dealt, number)
    place = number & 1
    leader = state.coordinates[0, 0][1] == 0
    row_sums, own_sum = state.shared.row_sums, state.row_sum
    if const_expr(state.scaling is not None):
        own_sum = state.scaling.totals
    for row in cutlass.range_constexpr(cute.size(own_sum)):
        own_sum[row] = quad_sum(own_sum[row])
        if leader:
            row_sums[state.coordinates[row, 0][0], mine, place] = own_sum[row]
    cute.arch.barrier(barrier_id=PAIR_BARRIER + state.warp, number_of_threads=64)
    unit = Float32(1.0)
    if const_expr(state.scaling is not None):
        unit = _unit(state.shared.units, number, task.tiles)
    rows, row_lse = output_of(results.out, results.lse, task.first_row, task.rows)
    partial_lse = results.partials.lse
    factors, log_sums = (cute.make_rmem_tensor_like(state.row_sum) for _ in range(2))
    for row in cutlass.range_constexpr(cute.size(factors)):
        position = state.coordinates[row, 0][0]
        total = own_sum[row] + row_sums[position, 1 - mine, place]
        end = end_of_row(state.reference[row], state.scale_log2, total, state.probabilities.bias, BASE_2)
        factors[row] = end.factor
        if const_expr(state.scaling is not None):
            factors[row] = end.factor * unit
        log_sums[row] = end.log_sum
        if task.slot >= 0 and mine == 0 and leader and position < task.rows:
            partial_lse[task.slot, position] = end.log_sum
    if task.tiles == 0:
        for output in state.outputs:
            output.fill(0.0)
    geometry = state.geometry
    columns = [
        (first + mine * (second - first)) * geometry.value_columns
        for first, second in zip(geometry.places(0), geometry.places(1), strict=True)
    ]
    kept = const_expr(geometry.partial_rows)
    if task.slot < 0:
        for row in cutlass.range_constexpr(cute.size(factors)):
            position, end = state.coordinates[row, 0][0], RowEnd(factors[row], log_sums[row])
            end = count_sink(results.ending, task.first_row + position, end, BASE_2, const_expr(row_lse is not None))
            factors[row] = end.factor * results.ending.output_scale
            if const_expr(row_lse is not None):
                if mine == 0 and leader and position < task.rows:
                    row_lse[position] = end.log_sum
        staging = state.shared.staging + mine * 2 * STAGED_HALF_STRIDE + state.warp * STAGED_HALF
        for i in cutlass.range_constexpr(OUTPUTS):
            output = rows_columns(state.outputs[i])
            _store_rows(rows, columns[i], output, factors, staging, WARP_ROWS * state.warp, task.rows)
        cute.arch.barrier(barrier_id=PAIR_BARRIER + state.warp, number_of_threads=64)
    else:
        if const_expr(kept.lifted):
            _store_lifted(state, mine, task, results.partials, columns, factors)
        else:
            for row in cutlass.range_constexpr(cute.size(factors)):
                position = state.coordinates[row, 0][0]
                if position < task.rows:
                    partial = results.partials.rows[task.slot, position, None]
                    lane = state.coordinates[row, 0][1] // 2
                    for i in cutlass.range_constexpr(OUTPUTS):
                        output = rows_columns(state.outputs[i])
                        if const_expr(kept.in_quads):
                            _store_in_quads(partial, columns[i], lane, output, row, factors[row] * 2.0**kept.bias)
                        else:
                            _store_partial_row(partial, columns[i], lane, output, row, factors[row])


@cute.jit
def _store_lifted(
    state: AttendState, mine: Int32, task: Task, partials: Partials, columns: list, downs: cute.Tensor
) -> None:
    """Partial rows of 16 bits, and what takes out by how much they are lifted and divides them by their sums, which is
    all that `downs` do at first.

    Outputs that are not normalised mostly lie where float16 is as precise as it gets. So they are stored as they are;
    what has been stored tells whether that was right, and if not, they are lifted and stored again."""
    leader = state.coordinates[0, 0][1] == 0
    tries = Int32(2)
    while tries > 0:
        fit = Boolean(True)
        for row in cutlass.range_constexpr(cute.size(downs)):
            position, lane = state.coordinates[row, 0][0], state.coordinates[row, 0][1] // 2
            largest = Int32(0)
            if position < task.rows:
                partial = partials.rows[task.slot, position, None]
                for i in cutlass.range_constexpr(OUTPUTS):
                    output = rows_columns(state.outputs[i])
                    largest = _store_in_quads(partial, columns[i], lane, output, row, None, largest)
                if leader:
                    partials.downs[task.slot, position, mine] = downs[row]
            for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
                largest = larger_magnitudes(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
            low, high = largest & 0xFFFF, largest >> 16
            top = cutlass.max(low, high)
            fits = (top >= LEAST_FITTING) & (top < FLOAT16_INFINITE)
            fit = fit & (fits | (position >= task.rows) | (downs[row] == 0.0))
        tries -= 1
        if cute.arch.vote_all_sync(fit):
            tries = Int32(0)
        elif tries > 0:
            for row in cutlass.range_constexpr(cute.size(downs)):
                up, down = lift_of(_quad_max(_largest(state.outputs, row)))
                downs[row] = downs[row] * down
                for i in cutlass.range_constexpr(OUTPUTS):
                    output = rows_columns(state.outputs[i])
                    for column in cutlass.range_constexpr(cute.size(output, mode=[1])):
                        output[row, column] = output[row, column] * up


@cute.jit
def _largest(outputs: tuple, row: cutlass.Constexpr) -> Float32:
    """The largest magnitude of this lane's finite outputs of a row, NaN where none are. Times 0, what is not finite
    becomes NaN, which a maximum leaves out."""
    largest = [Float32(0.0) for _ in range(4)]
    for output in outputs:
        columns = rows_columns(output)
        for i in cutlass.range_constexpr(cute.size(columns, mode=[1])):
            value = columns[row, i]
            finite = cute.math.absf(cute.math.fma(value, Float32(0.0), value))
            largest[i % 4] = cute.arch.fmax(largest[i % 4], finite)
    return cute.arch.fmax(cute.arch.fmax(*largest[:2]), cute.arch.fmax(*largest[2:]))


@cute.jit
def _unit(units: cute.Tensor, number: Int32, tiles: Int32) -> Float32:
    """The unit of task `number`, which was told before the scales of its first tile, if it has one."""
    unit = Float32(1.0)
    if tiles > 0:
        unit = units[number & TASK_RING - 1]
    return unit


@cute.jit
def output_of(out: cute.Tensor, lse: cute.Tensor | None, first_row: Int32, rows: Int32):
    """(rows, columns) of the output and (rows) of the LSE, or None, of `rows` rows from row `first_row` on."""
    first = Int64(first_row)
    columns = out.shape[3]
    target = cute.make_tensor(out.iterator + first * columns, cute.make_layout((rows, columns), stride=(columns, 1)))
    if const_expr(lse is None):
        return target, None
    return target, cute.make_tensor(lse.iterator + first, cute.make_layout(rows))


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
    """The warp's rows of an accumulator (rows, columns), times `factors`, rounded to 16 bits, from row `first_row` and
    `column` of `target` on; row `rows` and those behind it are left out.

    A lane holds two columns of a row, and a sector that takes two stores takes twice the time. So rows go by way of
    shared memory, where those of a warp have two places, `staging` and STAGED_HALF_STRIDE behind it; a lane then stores
    16 bytes, four lanes 64 of a row."""
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
def _staged_at(row: Int32, part: Int32) -> Int32:
    """Where in eight rows 16 bytes of the 64 of a row lie, so that neither eight parts of one column nor those of two
    rows share banks."""
    return (4 * row + (part ^ (row >> 1 & 3))) * 16


@cute.jit
def _store_partial_row(
    target: cute.Tensor,
    column: Int32,
    lane: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    """This lane's part of a row times `factor`, in float32, from `column` on; `lane` counts within the quad. The lanes
    of a quad fill a sector."""
    size = 2
    pointer = (target.iterator + (column + lane * size)).align(size * target.element_type.width // 8)
    vectors = cute.size(accumulator, mode=[1]) // size
    places = cute.make_tensor(pointer, cute.make_layout((size, vectors), stride=(1, size * QUAD)))
    scaled = cute.make_rmem_tensor((size, vectors), target.element_type)
    for i in cutlass.range_constexpr(vectors):
        for j in cutlass.range_constexpr(size):
            scaled[j, i] = accumulator[row, size * i + j] * factor
        cute.autovec_copy(scaled[None, i], places[None, i])


@cute.jit
def _store_in_quads(
    target: cute.Tensor,
    column: Int32,
    lane: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32 | None,
    largest: Int32 | None = None,
) -> Int32 | None:
    """The same in 16 bits, as `PartialRows` with `in_quads` says; without a factor as they are. `largest`: pairs of
    float16, magnitudes; what has been stored or these, whichever is larger."""
    dtype = target.element_type
    vector = 128 // dtype.width
    for group in cutlass.range_constexpr(cute.size(accumulator, mode=[1]) // vector):
        values = [accumulator[row, group * vector + i] for i in range(vector)]
        if const_expr(factor is not None):
            values = [value * factor for value in values]
        words = cute.make_rmem_tensor(4, Int32)
        for i, word in enumerate(packed_words(values, dtype)):
            words[i] = word
            if const_expr(largest is not None):
                largest = larger_magnitudes(largest, word)
        place = aligned(target.iterator + (column + (group * QUAD + lane) * vector), 16)
        cute.autovec_copy(cute.recast_tensor(words, dtype), cute.make_tensor(place, vector))
    return largest
