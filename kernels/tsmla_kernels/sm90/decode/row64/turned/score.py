"""Role `score_tiles` of the Hopper decode where value products are turned: one warpgroup that makes the probabilities
of all tiles, and what ends rows."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from .....decode.results import Results
from .....parts.alignment import shared_vector
from .....parts.hopper.fragment import rows_columns
from .....parts.hopper.lazy_softmax import exceeds, move_reference
from .....parts.hopper.softmax import quad_sum
from .....parts.precision import packed_words
from .....parts.row_end import BASE_2, RowEnd, count_sink, end_of_row, write_log_sum
from .....parts.warp import QUAD
from ...work.task import Task, for_each_task
from ..begin import Attending, begin
from ..geometry import TILE_KV, DecodeGeometry
from ..scaling import anchor_of_task, scale_products
from ..state import DecodeState, hide, keys_there, lacks_keys, rescale_sums, start_scores
from ..storage import Shared

KEY_GROUPS = TILE_KV // 16
"""Groups of keys whose probabilities are stored together."""


@cute.jit
def score_tiles(geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending) -> None:
    """Score the tiles of every task."""
    for_each_task(shared.dealt, functools.partial(_score_task, geometry, shared, attending))


@cute.jit
def _score_task(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending, number: Int32, task: Task,
) -> None:  # fmt: skip
    """Score the tiles of task `number`, and tell what its rows are multiplied by at their end."""
    state = begin(geometry, shared, attending, 0, task)
    tiles = task.tiles
    if tiles > 0:
        shared.edges.q.wait_full(task.loads)
    for index in cutlass.range(tiles, unroll=1):
        _score_tile(state, index)
    if tiles > 0:
        shared.edges.q.release(task.loads)
    _end_rows(state, number, task, attending.results)


@cute.jit
def _score_tile(state: DecodeState, index: Int32):
    """Score tile `index`, and hand its probabilities over."""
    scores = start_scores(state, index)
    end_scores(state, scores, index)
    stage = move_references(state, scores, index)
    for group in cutlass.range_constexpr(KEY_GROUPS):
        make_weights(state, scores, index, stage, group)
    state.shared.edges.exchanged.publish(state.first_count + index)
    if const_expr(state.scaling is not None):
        state.shared.edges.scales.release(state.first_count + index)


@cute.jit
def end_scores(state: DecodeState, scores: cute.Tensor, index: Int32):
    """Wait for tile `index`'s scores, release its keys, and hide what rows may not see."""
    count, view = state.first_count + index, rows_columns(scores)
    there = keys_there(state, index)
    warpgroup.wait_group(0)
    if const_expr(there is not None):
        cute.arch.sync_warp()  # all lanes have read it
    for edge in state.shared.edges.kv:
        edge.release(count)
    if const_expr(state.scaling is not None):
        scales = state.shared.edges.scales
        scales.wait_full(count)
        folded = state.shared.exchange.folded[0][None, None, scales.stage(count)]
        scale_products(view, state.scaling.factors, folded, state.place.quad_lane)
    first_key = (state.first_tile + index) * state.geometry.tile_kv
    if lacks_keys(state, first_key, there):
        hide(state, scores, first_key, there)


@cute.jit
def move_references(state: DecodeState, scores: cute.Tensor, index: Int32) -> Int32:
    """Move the references of tile `index` if they must, and tell by how much outputs are multiplied before its value
    product. Returns the stage of its probabilities, which is free."""
    exchanged, told = state.shared.edges.exchanged, state.shared.exchange.turned
    rows, count, view = state.rows, state.first_count + index, rows_columns(scores)
    stage = exchanged.stage(count)
    beyond = exceeds(view, rows.reference, state.scale_log2, state.geometry.probabilities)
    exchanged.wait_empty(count)
    moves = cute.arch.vote_any_sync(beyond)
    rows.rescale.fill(1.0)
    if moves:
        move_reference(view, rows.reference, None, rows.rescale, state.scale_log2)
        rescale_sums(rows.total, rows.rescale)
        if const_expr(state.scaling is not None):
            rescale_sums(state.scaling.totals, rows.rescale)
    if state.place.coordinates[0, 0][1] == 0:
        for row in cutlass.range_constexpr(cute.size(rows.rescale)):
            told.rescales[state.place.coordinates[row, 0][0], stage] = rows.rescale[row]
    told.moved[state.place.warp, stage] = Int32(moves)
    return stage


@cute.jit
def make_weights(
    state: DecodeState, scores: cute.Tensor, index: Int32, stage: Int32, group: cutlass.Constexpr[int]
) -> None:
    """Make the probabilities of 16 keys of tile `index`, number `group` of such: add their exponentials to the rows'
    sums, round them to float16, and store them as rows of keys."""
    dtype = state.shared.exchange.turned.weights.element_type
    view, total, bias = rows_columns(scores), state.rows.total, state.geometry.probabilities.bias
    words = cute.make_rmem_tensor(4, Int32)
    inverses = ()
    if const_expr(state.scaling is not None):
        inverses = _inverses(state, index, group)
    for row in cutlass.range_constexpr(cute.size(total)):
        shift = cute.math.fma(state.rows.reference[row], state.scale_log2, Float32(-bias))
        for block in cutlass.range_constexpr(2):
            values = []
            for i in cutlass.range_constexpr(2):
                exponent = cute.math.fma(view[row, 4 * group + 2 * block + i], state.scale_log2, -shift)
                values.append(cute.math.exp2(exponent, fastmath=True))
                total[row] = total[row] + values[i]
                if const_expr(state.scaling is not None):
                    totals = state.scaling.totals
                    totals[row] = cute.math.fma(values[i], inverses[block][i], totals[row])
            words[2 * block + row] = packed_words(values, dtype)[0]
    lane = state.place.thread % 32
    row, matrix = lane & 7, lane >> 3
    place = state.shared.exchange.turned.weights_at + stage * state.geometry.probabilities_bytes
    place += (16 * state.place.warp + (matrix & 1) * 8 + row) * 128 + ((row ^ (matrix >> 1)) << 4)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    cute.copy(store, cute.recast_tensor(words, dtype), shared_vector(dtype, place ^ (32 * group)))


@cute.jit
def _inverses(state: DecodeState, index: Int32, group: cutlass.Constexpr[int]) -> tuple:
    """What exponentials of this thread's keys of a group are multiplied by in the sums of rows with scales."""
    stage, found = state.shared.edges.scales.stage(state.first_count + index), []
    for block in cutlass.range_constexpr(2):
        inverse = cute.make_rmem_tensor(2, Float32)
        keys = state.place.quad_lane + QUAD * (2 * group + block)
        cute.autovec_copy(state.shared.exchange.folded[2][None, keys, stage], inverse)
        found.append(inverse)
    return tuple(found)


@cute.jit
def _end_rows(state: DecodeState, number: Int32, task: Task, results: Results):
    """Tell what rows of task `number` are multiplied by at their end, and write their log-sum-exps.

    Partial rows of keys with scales are averages of stored values, which float16 holds whatever the scales are: each is
    divided by the sum of its shares, and what makes it the row's output again lies beside it."""
    ends, partials, parity = state.shared.exchange.turned.ends, results.partials, number & 1
    leader = state.place.coordinates[0, 0][1] == 0
    state.shared.edges.ends.wait_empty(number)
    for row in cutlass.range_constexpr(cute.size(state.rows.total)):
        position, total = state.place.coordinates[row, 0][0], quad_sum(state.rows.total[row])
        shares = total
        if const_expr(state.scaling is not None):
            total = quad_sum(state.scaling.totals[row])
        end = end_of_row(state.rows.reference[row], state.scale_log2, total, state.geometry.probabilities.bias, BASE_2)
        factor = end.factor
        logged = leader and position < task.rows
        if task.slot >= 0:
            if const_expr(state.scaling is not None):
                factor = end_of_row(Float32(0.0), 1.0, shares, 0, BASE_2).factor
                if logged:
                    anchor = anchor_of_task(state.shared.exchange.anchors, number, task.tiles)
                    partials.downs[task.slot, position, 0] = end.factor * shares * anchor
            factor = factor * 2.0**state.geometry.partial_rows.bias
            if logged:
                partials.lse[task.slot, position] = end.log_sum
        else:
            factor = _end_whole(task, position, end, logged, results)
        if leader:
            ends[position, parity] = factor
    cute.arch.sync_warp()
    state.shared.edges.ends.hand_over(number)


@cute.jit
def _end_whole(task: Task, position: Int32, end: RowEnd, logged, results: Results) -> Float32:
    """End a row that has no other segment; returns what it is multiplied by."""
    ending = results.ending
    end = count_sink(ending, task.first_row + position, end, BASE_2, const_expr(results.lse is not None))
    if const_expr(results.lse is not None):
        if logged:
            write_log_sum(results.lse, ending, task.first_row + position, end.log_sum)
    return end.factor * ending.output_scale
