"""Partial results of the Hopper decode: a segment's rows, written to the workspace where other segments have keys of
them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from tsmla.identity.dtype import bytes_of

from .....decode.partial_rows import fits_float16, largest_finite, lift_of
from .....decode.partials import Partials
from .....parts.hopper.epilogue import store_vector
from .....parts.hopper.fragment import rows_columns
from .....parts.hopper.softmax import quad_max
from .....parts.ptx import store_if
from .....parts.warp import QUAD
from ...work.task import Task, is_rehearsal
from ..geometry import OUTPUTS
from ..state import DecodeState


@cute.jit
def end_partial(
    state: DecodeState, mine: Int32, positions: list, columns: list, task: Task, factors: cute.Tensor,
    log_sums: cute.Tensor, partials: Partials,
) -> None:  # fmt: skip
    """End a segment whose rows have other segments. A rehearsal, which has no rows, runs all that a whole row tile
    would, but stores nothing.

    positions, columns: of this thread's rows in the row tile, and of its outputs in a row. factors, log_sums: what
    outputs are to be multiplied by, and the row's LSE."""
    run_for = task.rows
    if is_rehearsal(task):
        run_for = Int32(state.geometry.tile_q)
    if const_expr(state.geometry.partial_rows.lifted):
        _store_lifted(state, mine, positions, columns, task, run_for, factors, partials)
    else:
        for row in cutlass.range_constexpr(cute.size(factors)):
            stored = positions[row] < task.rows
            if positions[row] < run_for:
                partial = partials.rows[task.slot, positions[row], None]
                lane = state.place.coordinates[row, 0][1] // 2
                for i in cutlass.range_constexpr(OUTPUTS):
                    output = rows_columns(state.multiplying.outputs[i])
                    _store_partial_row(partial, columns[i], lane, output, row, factors[row], stored)
    for row in cutlass.range_constexpr(cute.size(factors)):
        if mine == 0 and state.place.coordinates[0, 0][1] == 0 and positions[row] < task.rows:
            partials.lse[task.slot, positions[row]] = log_sums[row]


@cute.jit
def _store_lifted(
    state: DecodeState, mine: Int32, positions: list, columns: list, task: Task, run_for: Int32, downs: cute.Tensor,
    partials: Partials,
) -> None:  # fmt: skip
    """Store partial rows of 16 bits, and `downs`, what normalises them and takes out by how much they are lifted. At
    first `downs` only normalise.

    Outputs mostly lie where float16 is as precise as it gets, also 16-bit ones that have not been divided by their
    sums. They are therefore stored unlifted first; what has been stored tells whether that was right, and if not, they
    are lifted and stored again."""
    leader = state.place.coordinates[0, 0][1] == 0
    tries = Int32(2)
    while tries > 0:
        fit = Boolean(True)
        for row in cutlass.range_constexpr(cute.size(downs)):
            lane, stored = state.place.coordinates[row, 0][1] // 2, positions[row] < task.rows
            largest = Int32(0)
            if positions[row] < run_for:
                partial = partials.rows[task.slot, positions[row], None]
                for i in cutlass.range_constexpr(OUTPUTS):
                    output = rows_columns(state.multiplying.outputs[i])
                    largest = _store_in_quads(partial, columns[i], lane, output, row, stored, largest)
                if leader and stored:
                    partials.downs[task.slot, positions[row], _block_of(state, mine)] = downs[row]
            fit = fit & (fits_float16(largest) | (positions[row] >= task.rows) | (downs[row] == 0.0))
        tries -= 1
        if cute.arch.vote_all_sync(fit):
            tries = Int32(0)
        elif tries > 0:
            for row in cutlass.range_constexpr(cute.size(downs)):
                own = [rows_columns(state.multiplying.outputs[i])[row, None] for i in range(OUTPUTS)]
                up, down = lift_of(quad_max(largest_finite(own)))
                downs[row] = downs[row] * down
                for i in cutlass.range_constexpr(OUTPUTS):
                    output = rows_columns(state.multiplying.outputs[i])
                    for column in cutlass.range_constexpr(cute.size(output, mode=[1])):
                        output[row, column] = output[row, column] * up


def _block_of(state: DecodeState, mine: Int32):
    """A block of columns that warpgroup `mine` has."""
    return state.geometry.places(1)[0] * mine


@cute.jit
def _store_partial_row(
    target: cute.Tensor,
    column: Int32,
    lane: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
    stored: Boolean,
) -> None:
    """Store this lane's part of a row times `factor`, in float32, from `column` on; `lane` counts within the quad. The
    lanes of a quad fill a sector. It is computed also where it is not `stored`."""
    size = 2
    start = (target.iterator + (column + lane * size)).toint()
    step = bytes_of(target.element_type.width, size * QUAD)
    for i in cutlass.range_constexpr(cute.size(accumulator, mode=[1]) // size):
        scaled = cute.make_rmem_tensor(size, target.element_type)
        for j in cutlass.range_constexpr(size):
            scaled[j] = accumulator[row, size * i + j] * factor
        store_if(stored, start, step * i, scaled)


@cute.jit
def _store_in_quads(
    target: cute.Tensor,
    column: Int32,
    lane: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    stored: Boolean,
    largest: Int32,
) -> Int32:
    """Store this lane's part of a row in 16 bits, in the order of `PartialRows.in_quads`. largest: a word of two
    float16 magnitudes; returned with the larger of them and of what has been computed."""
    dtype = target.element_type
    vector = 128 // dtype.width
    start = (target.iterator + (column + lane * vector)).toint()
    for group in cutlass.range_constexpr(cute.size(accumulator, mode=[1]) // vector):
        values = [accumulator[row, group * vector + i] for i in range(vector)]
        largest = store_vector(stored, start, group * QUAD * 16, values, dtype, largest)
    return largest
