"""Role `score_tiles` of the Hopper decode where value products are turned: one warpgroup that makes the probabilities
of all tiles, and what ends rows."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from .....limits import WARPGROUP
from .....parts.alignment import shared_vector
from .....parts.hopper import mma
from .....parts.hopper.fragment import rows_columns
from .....parts.hopper.lazy_softmax import lowest_reference, move_reference
from .....parts.hopper.softmax import quad_sum
from .....parts.keys.visible import seen_by_all
from .....parts.logarithm import LOG2_E
from .....parts.precision import packed_words
from .....parts.row_end import BASE_2, RowEnd, count_sink, end_of_row, write_log_sum
from .....parts.warp import QUAD
from ...results import Results
from ...work.task import Task, for_each_task
from ..attend import Attending, tell_keys
from ..geometry import TILE_KV, DecodeGeometry
from ..storage import Shared
from ..tile import DecodeState, Place, RowStates, hide, rescale_sums, start_scores

FEW_TILES = 6
"""Up to this many tiles of a task are scored one by one: the code of two together would stand in no cache yet."""
KEY_GROUPS = TILE_KV // 16
"""Groups of keys whose probabilities are stored together."""


@cute.jit
def score_tiles(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending,
) -> None:  # fmt: skip
    """Score the tiles of every task."""
    act = functools.partial(_score_task, geometry, shared, attending)
    for_each_task(shared.dealt, act, Int32(0))


@cute.jit
def _score_task(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending, number: Int32, task: Task,
    kept: Int32,
) -> Int32:  # fmt: skip
    """Score the tiles of task `number`, and tell what its rows are multiplied by at their end."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    products, view, heads, results, softmax_scale, _ = attending
    mma_qk, _, mma_pv = products
    qk = mma_qk.get_slice(0)
    coordinates = rows_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((64, geometry.tile_kv))))
    rows = cute.size(coordinates, mode=[0])
    reference, total, next_total, rescale, rescale_received = (cute.make_rmem_tensor(rows, Float32) for _ in range(5))
    row_keys = shared.exchange.row_keys[None, None, 0]
    scale_log2 = softmax_scale * LOG2_E
    reference.fill(lowest_reference(scale_log2))
    total.fill(0.0)
    all_keys = tell_keys(view, task, heads, coordinates, reference, row_keys)
    cute.arch.sync_warp()  # all four lanes of a quad read what its first has written
    operands = mma.Operands(
        qk_op=mma_qk.op,
        pv_op=mma_pv.op,
        q=tuple(qk.make_fragment_A(qk.partition_A(rows)) for rows in shared.query.strips),
        k=tuple(qk.make_fragment_B(qk.partition_B(rows)) for rows in shared.keys.strips),
        v=(),
        scores_shape=mma_qk.partition_shape_C((64, geometry.tile_kv)),
    )
    state = DecodeState(
        operands=operands,
        own=None,
        received=None,
        outputs=(),
        parts=(),
        rows=RowStates(reference, total, next_total, rescale, rescale_received),
        place=Place(
            coordinates,
            thread,
            quad_lane=thread % QUAD,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32),
        ),
        row_keys=row_keys,
        all_keys=seen_by_all(all_keys),
        shared=shared,
        first_count=task.first_count,
        first_tile=task.first_tile,
        scale_log2=scale_log2,
        scaling=None,
        geometry=geometry,
    )
    tiles = task.tiles
    if tiles > 0:
        shared.edges.q.wait_full(task.loads)
    alone = tiles & 1
    if tiles <= FEW_TILES:
        alone = tiles
    for index in cutlass.range(alone, unroll=1):
        _end_tile(state, start_scores(state, index), index, 0)
    for index in cutlass.range(alone, tiles, 2, unroll=1):
        # The second tile's scores are computed beside the first one's softmax.
        first, second = (start_scores(state, index + i) for i in range(2))
        _end_tile(state, first, index, len(operands.k))
        _end_tile(state, second, index + 1, 0)
    if tiles > 0:
        shared.edges.q.release(task.loads)
    _end_rows(state, number, task, results)
    return kept


@cute.jit
def _end_tile(state: DecodeState, scores: cute.Tensor, index: Int32, behind: cutlass.Constexpr[int]):
    """Make the probabilities of tile `index`, whose `scores` have been started, with `behind` products behind them."""
    end_scores(state, scores, index, behind)
    stage = move_references(state, scores, index)
    for group in cutlass.range_constexpr(KEY_GROUPS):
        make_weights(state, scores, stage, group)
    state.shared.edges.exchanged.publish(state.first_count + index)


@cute.jit
def end_scores(state: DecodeState, scores: cute.Tensor, index: Int32, behind: cutlass.Constexpr[int]):
    """Wait for tile `index`'s scores, release its keys, and hide what rows may not see."""
    warpgroup.wait_group(behind)
    for edge in state.shared.edges.kv:
        edge.release(state.first_count + index)
    first_key = (state.first_tile + index) * state.geometry.tile_kv
    if state.all_keys.lacks(first_key, state.geometry.tile_kv):
        hide(state, scores, first_key, None)


@cute.jit
def move_references(state: DecodeState, scores: cute.Tensor, index: Int32) -> Int32:
    """Move the references of tile `index` if they must, and tell by how much outputs are multiplied before its value
    product. Returns the stage of its probabilities, which is free."""
    exchanged, told = state.shared.edges.exchanged, state.shared.exchange.turned
    rescales, moved = told.rescales, told.moved
    reference, rescale, count = state.rows.reference, state.rows.rescale, state.first_count + index
    stage = exchanged.stage(count)
    view, beyond = rows_columns(scores), Boolean(False)
    for row in cutlass.range_constexpr(cute.size(reference)):
        highest = view[row, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        above = (highest - reference[row]) * state.scale_log2
        beyond = beyond or state.geometry.probabilities.exceeds(above, state.rows.total[row], QUAD)
    exchanged.wait_empty(count)
    moves = cute.arch.vote_any_sync(beyond)
    if moves:
        move_reference(view, reference, None, rescale, state.scale_log2)
        rescale_sums(state, rescale)
        if state.place.coordinates[0, 0][1] == 0:
            for row in cutlass.range_constexpr(cute.size(reference)):
                rescales[state.place.coordinates[row, 0][0], stage] = rescale[row]
    else:
        if state.place.coordinates[0, 0][1] == 0:
            for row in cutlass.range_constexpr(cute.size(reference)):
                rescales[state.place.coordinates[row, 0][0], stage] = Float32(1.0)
    moved[state.place.warp, stage] = Int32(moves)
    return stage


@cute.jit
def make_weights(state: DecodeState, scores: cute.Tensor, stage: Int32, group: cutlass.Constexpr[int]):
    """Make the probabilities of 16 keys of a tile, number `group` of such: add their exponentials to the rows' sums,
    round them to float16, and store them as rows of keys."""
    dtype = state.shared.exchange.turned.weights.element_type
    view, total, bias = rows_columns(scores), state.rows.total, state.geometry.probabilities.bias
    words = cute.make_rmem_tensor(4, Int32)
    for row in cutlass.range_constexpr(cute.size(total)):
        shift = cute.math.fma(state.rows.reference[row], state.scale_log2, Float32(-bias))
        for block in cutlass.range_constexpr(2):
            values = []
            for i in cutlass.range_constexpr(2):
                exponent = cute.math.fma(view[row, 4 * group + 2 * block + i], state.scale_log2, -shift)
                values.append(cute.math.exp2(exponent, fastmath=True))
                total[row] = total[row] + values[i]
            words[2 * block + row] = packed_words(values, dtype)[0]
    lane = state.place.thread % 32
    row, matrix = lane & 7, lane >> 3
    place = state.shared.exchange.turned.weights_at + stage * state.geometry.probabilities_bytes
    place += (16 * state.place.warp + (matrix & 1) * 8 + row) * 128 + ((row ^ (matrix >> 1)) << 4)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    cute.copy(store, cute.recast_tensor(words, dtype), shared_vector(dtype, place ^ (32 * group)))


@cute.jit
def _end_rows(state: DecodeState, number: Int32, task: Task, results: Results):
    """Tell what rows of task `number` are multiplied by at their end, and write their log-sum-exps."""
    ends, partial_lse, parity = state.shared.exchange.turned.ends, results.partials.lse, number & 1
    leader = state.place.coordinates[0, 0][1] == 0
    state.shared.edges.ends.wait_empty(number)
    for row in cutlass.range_constexpr(cute.size(state.rows.total)):
        position, total = state.place.coordinates[row, 0][0], quad_sum(state.rows.total[row])
        end = end_of_row(state.rows.reference[row], state.scale_log2, total, state.geometry.probabilities.bias, BASE_2)
        factor = end.factor
        logged = leader and position < task.rows
        if task.slot >= 0:
            factor = factor * 2.0**state.geometry.partial_rows.bias
            if logged:
                partial_lse[task.slot, position] = end.log_sum
        else:
            factor = _end_whole(state, task, position, end, logged, results)
        if leader:
            ends[position, parity] = factor
    cute.arch.sync_warp()
    state.shared.edges.ends.hand_over(number)


@cute.jit
def _end_whole(state: DecodeState, task: Task, position: Int32, end: RowEnd, logged, results: Results) -> Float32:
    """End a row that has no other segment; returns what it is multiplied by."""
    ending = results.ending
    end = count_sink(ending, task.first_row + position, end, BASE_2, const_expr(results.lse is not None))
    if const_expr(results.lse is not None):
        if logged:
            write_log_sum(results.lse, ending, task.first_row + position, end.log_sum)
    return end.factor * ending.output_scale
