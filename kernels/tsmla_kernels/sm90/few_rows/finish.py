"""The end of a task in the Hopper decode of few rows: the second team gives the first what it has."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...limits import WARPGROUP
from ...parts.alignment import aligned, shared_vector
from ...parts.hopper.fragment import QUAD
from ...parts.hopper.softmax import quad_max, quad_sum
from ...parts.precision import packed_words
from ...parts.row_end import BASE_2, count_sink, end_of_row
from ..decode.results import Results, output_of
from ..decode.task import Task
from .geometry import BLOCK, ROWS, STRIP, TEAM_WARPS, TEAMS, FewRowsGeometry
from .schedule import ALL_BARRIER
from .storage import Shared
from .tile import NO_KEYS, VECTOR, State

OUTPUTS = STRIP // BLOCK
"""Blocks of the output."""
ENDS = 3
"""Numbers that a warp tells of each row: the references of its output and of its sum, and this."""


@cute.jit
def finish(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, shared: Shared, task: Task, results: Results
) -> None:
    lane = cute.arch.lane_idx()
    ends = cute.make_tensor(
        cute.make_ptr(Float32, shared.ends, cute.AddressSpace.smem, assumed_align=4),
        cute.make_layout((ENDS, TEAMS * TEAM_WARPS, ROWS)),
    )
    given = shared.exchange + state.warp * (OUTPUTS * 32 * VECTOR) + lane * VECTOR
    for row in cutlass.range_constexpr(2):
        top = quad_max(state.sum_reference[row])
        factor = cute.math.exp2(state.sum_reference[row] - top, fastmath=True)
        # An infinite scale makes NaN of its warp's columns, not of all scores: the others follow.
        total = cute.math.fma(state.output[2 * row, 0], Float32(0.0), state.row_sum[row] * factor)
        state.row_sum[row] = quad_sum(total)
        state.sum_reference[row] = top
    cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)  # nobody reads parts of scores
    if lane % QUAD == 0:
        for row in cutlass.range_constexpr(2):
            for i, end in enumerate((state.reference, state.sum_reference, state.row_sum)):
                ends[i, state.team * TEAM_WARPS + state.warp, lane // QUAD + 8 * row] = end[row]
    if state.team != 0:
        for block in cutlass.range_constexpr(OUTPUTS):
            cute.autovec_copy(state.output[None, block], shared_vector(Float32, given + block * (32 * VECTOR)))
    cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)
    if state.team == 0:
        _merge(state, ends, given)
        _store(state, task, results)
    cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)


@cute.jit
def _merge(state: State, ends: cute.Tensor, given: Int32) -> None:
    """Sums of all warps, and outputs of both teams, with the references that they have then."""
    own, theirs = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    for row in cutlass.range_constexpr(2):
        position = cute.arch.lane_idx() // QUAD + 8 * row
        reference = ends[0, TEAM_WARPS + state.warp, position]
        top = cute.arch.fmax(reference, state.reference[row])
        own[row] = cute.math.exp2(state.reference[row] - top, fastmath=True)
        theirs[row] = cute.math.exp2(reference - top, fastmath=True)
        state.reference[row] = top
        top, total = Float32(NO_KEYS), Float32(0.0)
        for warp in cutlass.range_constexpr(TEAMS * TEAM_WARPS):
            top = cute.arch.fmax(top, ends[1, warp, position])
        for warp in cutlass.range_constexpr(TEAMS * TEAM_WARPS):
            factor = cute.math.exp2(ends[1, warp, position] - top, fastmath=True)
            total = total + ends[2, warp, position] * factor
        state.row_sum[row] = total
        state.sum_reference[row] = top
    for block in cutlass.range_constexpr(OUTPUTS):
        part = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(shared_vector(Float32, given + block * (32 * VECTOR)), part)
        for i in cutlass.range_constexpr(4):
            state.output[i, block] = state.output[i, block] * own[i // 2] + part[i] * theirs[i // 2]


@cute.jit
def _store(state: State, task: Task, results: Results) -> None:
    """Rows of the result, or partial ones. A lane has 32 columns of a row that lie together."""
    lane = cute.arch.lane_idx()
    rows, row_lse = output_of(results.out, results.lse, task.first_row, task.rows)
    column = state.warp * STRIP + lane % QUAD * (2 * OUTPUTS)
    speaks = (state.warp == 0) & (lane % QUAD == 0)
    for row in cutlass.range_constexpr(2):
        position = lane // QUAD + 8 * row
        end = end_of_row(state.sum_reference[row], 1.0, state.row_sum[row], 0, BASE_2)
        scale = cute.math.exp2(state.reference[row] - state.sum_reference[row], fastmath=True)
        if position < task.rows:
            if task.slot < 0:
                end = count_sink(
                    results.ending, task.first_row + position, end, BASE_2, const_expr(row_lse is not None)
                )
                factor = end.factor * scale * results.ending.output_scale
                if const_expr(row_lse is not None):
                    if speaks:
                        row_lse[position] = end.log_sum
                _store_row(state, row, rows[position, None], column, factor)
            else:
                if speaks:
                    results.partials.lse[task.slot, position] = end.log_sum
                _store_row(state, row, results.partials.rows[task.slot, position, None], column, end.factor * scale)


@cute.jit
def _store_row(
    state: State, row: cutlass.Constexpr, target: cute.Tensor, column: Int32, factor: Float32
) -> None:
    dtype = target.element_type
    size = 128 // dtype.width
    for line in cutlass.range_constexpr(2):
        for vector in cutlass.range_constexpr(OUTPUTS // size):
            values = [state.output[2 * row + line, size * vector + i] * factor for i in range(size)]
            words = cute.make_rmem_tensor(4, Int32)
            if const_expr(dtype.width == 16):
                for i, word in enumerate(packed_words(values, dtype)):
                    words[i] = word
            else:
                for i in cutlass.range_constexpr(size):
                    words[i] = values[i].bitcast(Int32)
            place = aligned(target.iterator + (column + line * OUTPUTS + vector * size), 16)
            cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4)))
