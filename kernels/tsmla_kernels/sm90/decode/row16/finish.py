"""The end of a task in the Hopper decode of few rows: the second team gives the first what it has."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cutlass_dsl import select_
from tsmla.identity.dtype import bytes_of

from ....decode.partial_rows import fits_float16, largest_finite, lift_of
from ....decode.partials import Partials
from ....decode.results import Results, output_of
from ....limits import VECTOR_BYTES, WARPGROUP
from ....parts.alignment import shared_vector
from ....parts.hopper.epilogue import store_vector
from ....parts.hopper.softmax import quad_max, quad_sum
from ....parts.row_end import BASE_2, RowEnd, count_sink, end_of_row, write_log_sum
from ....parts.warp import QUAD
from ..work.task import Task, is_rehearsal
from .geometry import BLOCK, FEW_ROWS, STRIP, TEAM_WARPS, TEAMS, FewRowsGeometry
from .schedule import ALL_BARRIER, TEAM_BARRIER
from .storage import Shared
from .tile import NO_KEYS, State

OUTPUTS = STRIP // BLOCK
"""Blocks of a warp's output columns."""
LIKELY_UP = 2.0**-14
"""Factor that partial rows are stored with at first: a row's largest probability x scale is 2^10 to 2^14."""
LEAST_BELOW = 16.0
"""Raises exp2's argument by this and lowers the result again: a scale may be 2^-126, where ex2 would flush to zero."""
ENDS = 3
"""Numbers that a warp tells of each row: the references of its output and of its sum, and the sum."""


@cute.jit
def finish(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, shared: Shared, task: Task, alone: Boolean,
    results: Results,
) -> None:  # fmt: skip
    """End a task. alone: whether the other team has nothing. A rehearsal, which has no rows, runs all that a task of
    FEW_ROWS rows would, but stores nothing."""
    lane = cute.arch.lane_idx()
    ends = cute.make_tensor(
        cute.make_ptr(Float32, shared.ends, cute.AddressSpace.smem, assumed_align=4),
        cute.make_layout((ENDS, TEAMS * TEAM_WARPS, FEW_ROWS)),
    )
    given = shared.exchange + state.warp * (OUTPUTS * 32 * VECTOR_BYTES) + lane * VECTOR_BYTES
    for row in cutlass.range_constexpr(2):
        top = quad_max(state.sum_reference[row])
        factor = cute.math.exp2(state.sum_reference[row] - top, fastmath=True)
        # An infinite scale makes NaN of its warp's columns, not of all scores: the others follow.
        total = cute.math.fma(state.output[2 * row, 0], Float32(0.0), state.row_sum[row] * factor)
        state.row_sum[row] = quad_sum(total)
        state.sum_reference[row] = top
    if not alone:
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)  # no more reads of scores
    if lane % QUAD == 0:
        for row in cutlass.range_constexpr(2):
            for i, end in enumerate((state.reference, state.sum_reference, state.row_sum)):
                ends[i, state.team * TEAM_WARPS + state.warp, lane // QUAD + 8 * row] = end[row]
    if alone:
        cute.arch.barrier(barrier_id=TEAM_BARRIER, number_of_threads=WARPGROUP)
    else:
        if state.team != 0:
            for block in cutlass.range_constexpr(OUTPUTS):
                cute.autovec_copy(
                    state.output[None, block], shared_vector(Float32, given + block * (32 * VECTOR_BYTES))
                )
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)
    if state.team == 0:
        state.sum_reference.fill(NO_KEYS)
        state.row_sum.fill(0.0)
        _add_sums(state, ends, 0)
        if not alone:
            _add_sums(state, ends, 1)
            _merge(state, ends, given)
        _store(geometry, state, task, results)
    if not alone:
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=TEAMS * WARPGROUP)


@cute.jit
def _add_sums(state: State, ends: cute.Tensor, team: cutlass.Constexpr[int]) -> None:
    """Add the sums of a team's warps to the rows' sums."""
    for row in cutlass.range_constexpr(2):
        position = cute.arch.lane_idx() // QUAD + 8 * row
        warps = range(team * TEAM_WARPS, (team + 1) * TEAM_WARPS)
        top = state.sum_reference[row]
        for warp in warps:
            top = cute.arch.fmax(top, ends[1, warp, position])
        total = state.row_sum[row]
        if const_expr(team > 0):
            total = total * cute.math.exp2(state.sum_reference[row] - top, fastmath=True)
        for warp in warps:
            factor = cute.math.exp2(ends[1, warp, position] - top, fastmath=True)
            total = total + ends[2, warp, position] * factor
        state.row_sum[row] = total
        state.sum_reference[row] = top


@cute.jit
def _merge(state: State, ends: cute.Tensor, given: Int32) -> None:
    """Add the other team's outputs, and move both to the higher reference."""
    own, theirs = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    for row in cutlass.range_constexpr(2):
        position = cute.arch.lane_idx() // QUAD + 8 * row
        reference = ends[0, TEAM_WARPS + state.warp, position]
        top = cute.arch.fmax(reference, state.reference[row])
        own[row] = cute.math.exp2(state.reference[row] - top, fastmath=True)
        theirs[row] = cute.math.exp2(reference - top, fastmath=True)
        state.reference[row] = top
    for block in cutlass.range_constexpr(OUTPUTS):
        their_output = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(shared_vector(Float32, given + block * (32 * VECTOR_BYTES)), their_output)
        for i in cutlass.range_constexpr(4):
            state.output[i, block] = state.output[i, block] * own[i // 2] + their_output[i] * theirs[i // 2]


@cute.jit
def _store(geometry: cutlass.Constexpr[FewRowsGeometry], state: State, task: Task, results: Results) -> None:
    """Store rows of the result, or partial ones. A lane's columns of either line of a strip's part lie together."""
    lane = cute.arch.lane_idx()
    rows, logged = output_of(results.out, task.first_row, task.rows), const_expr(results.lse is not None)
    column = state.warp * STRIP + lane % QUAD * (2 * geometry.vector_columns)
    speaker = (state.warp == 0) & (lane % QUAD == 0)
    factors, log_sums = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    for row in cutlass.range_constexpr(2):
        end = end_of_row(state.sum_reference[row], 1.0, state.row_sum[row], 0, BASE_2)
        apart = state.reference[row] - state.sum_reference[row]
        if const_expr(geometry.apart):  # a key's scale may be 2^-126
            factors[row] = end.factor * 2.0**-LEAST_BELOW * cute.math.exp2(apart + LEAST_BELOW, fastmath=True)
        else:
            factors[row] = end.factor * cute.math.exp2(apart, fastmath=True)
        log_sums[row] = end.log_sum
    if task.slot >= 0:
        _store_partial(geometry, state, task, column, speaker, factors, log_sums, results.partials)
    else:
        for row in cutlass.range_constexpr(2):
            position = lane // QUAD + 8 * row
            factor = factors[row]
            if const_expr(geometry.apart):  # rows first: a small factor times a small share of a sink is 0
                for i in cutlass.range_constexpr(2):
                    for block in cutlass.range_constexpr(OUTPUTS):
                        state.output[2 * row + i, block] = state.output[2 * row + i, block] * factor
                factor = Float32(select_(factor == 0.0, factor, Float32(1.0)))
            end = RowEnd(factor, log_sums[row])
            end = count_sink(results.ending, task.first_row + position, end, BASE_2, logged)
            if position < task.rows:
                if const_expr(logged):
                    if speaker:
                        write_log_sum(results.lse, results.ending, task.first_row + position, end.log_sum)
                factor = end.factor * results.ending.output_scale
                _store_row(geometry, state, row, rows[position, None], column, factor, Boolean(True))


@cute.jit
def _store_partial(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, task: Task, column: Int32, speaker: Boolean,
    downs: cute.Tensor, log_sums: cute.Tensor, partials: Partials,
) -> None:  # fmt: skip
    """Store partial rows as `row64/exchanging/partial_results.py` does: outputs times LIKELY_UP, which brings what a
    row is likely to have where float16 is as precise as it gets; and if that was not right, once more. `downs` first
    normalise outputs."""
    lane = cute.arch.lane_idx()
    run_for = task.rows
    if is_rehearsal(task):
        run_for = Int32(FEW_ROWS)
    ups = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        ups[row] = Float32(LIKELY_UP)
        downs[row] = downs[row] * (1 / LIKELY_UP)
    tries = Int32(2)
    while tries > 0:
        fit = Boolean(True)
        for row in cutlass.range_constexpr(2):
            position = lane // QUAD + 8 * row
            stored, largest = position < task.rows, Int32(0)
            if position < run_for:
                target = partials.rows[task.slot, position, None]
                largest = _store_row(geometry, state, row, target, column, ups[row], stored, largest)
                if lane % QUAD == 0 and stored:
                    partials.downs[task.slot, position, state.warp] = downs[row]
            fit = fit & (fits_float16(largest) | (position >= task.rows) | (downs[row] == 0.0))
        tries -= 1
        if cute.arch.vote_all_sync(fit):
            tries = Int32(0)
        elif tries > 0:
            for row in cutlass.range_constexpr(2):
                lines = [state.output[2 * row + i, None] for i in range(2)]
                up, down = lift_of(quad_max(largest_finite(lines)))
                downs[row] = downs[row] * (down * LIKELY_UP)
                ups[row] = up
    for row in cutlass.range_constexpr(2):
        position = lane // QUAD + 8 * row
        if speaker and position < task.rows:
            partials.lse[task.slot, position] = log_sums[row]


@cute.jit
def _store_row(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, row: cutlass.Constexpr, target: cute.Tensor,
    column: Int32, factor: Float32, stored: Boolean, largest: Int32 | None = None,
) -> Int32 | None:  # fmt: skip
    """Store a lane's part of a row of 16 bits times `factor`. largest: a word of two float16 magnitudes; returned with
    the larger of them and of what has been stored."""
    dtype = target.element_type
    size, together = 128 // dtype.width, geometry.vector_columns
    start = (target.iterator + column).toint()
    for line in cutlass.range_constexpr(2):
        for vector in cutlass.range_constexpr(OUTPUTS // size):
            values = [state.output[2 * row + line, size * vector + i] * factor for i in range(size)]
            part, within = divmod(vector * size, together)
            place = bytes_of(dtype.width, part * (BLOCK * together) + line * together + within)
            largest = store_vector(stored, start, place, values, dtype, largest)
    return largest
