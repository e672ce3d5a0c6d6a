"""Role `attend_few` of the Hopper decode of few rows: one of two teams of four warps, each with every other tile."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Vector, const_expr
from tsmla.identity.dtype import bytes_of

from ....decode.results import Results
from ....limits import VECTOR_BYTES, WARPGROUP
from ....parts.alignment import aligned
from ....parts.division import Divisor, quotient
from ....parts.keys.listed import ListedKeys
from ....parts.keys.scales import RowScales, query_scale
from ....parts.keys.source import KeySource
from ....parts.keys.visible import Visibility, VisibleKeys, hides, keys_of_row, seen_by_all, seen_by_both, viewers_of
from ....parts.logarithm import LOG2_E
from ....parts.precision import larger_magnitudes, widened
from ....parts.query import QueryRows
from ....parts.warp import QUAD
from ..work.task import Task, border_tile, for_each_task, in_smaller_tiles
from .finish import finish
from .geometry import BLOCK, FEW_ROWS, STRIP, TEAM_WARPS, TEAMS, TILE_KV, FewRowsGeometry
from .scales import brought_scales, page_of_quarter, scales_of_quarter
from .schedule import TEAM_BARRIER
from .storage import Shared, there_of
from .tile import (
    NO_KEYS,
    State,
    add_values,
    lane_of,
    probabilities_of,
    scores_of,
    wipe,
)

LEAST_EXPONENT, MOST_EXPONENT = 5, 253
"""Bounds of the biased exponent of a query row's largest number, within which both its factor and the inverse are
normal."""


def is_alone(task: Task) -> Boolean:
    """Whether the first team has all tiles of a task, which are one: the second has nothing to do with it."""
    return (task.tiles == 1) & (task.first_count & 1 == 0)


class Attending(NamedTuple):
    """What the teams need of a call."""

    query: QueryRows
    view: Visibility
    heads: Divisor
    results: Results
    softmax_scale: Float32
    source: KeySource | ListedKeys
    scales: RowScales | None


@cute.jit
def attend_few(geometry: cutlass.Constexpr[FewRowsGeometry], shared: Shared, attending: Attending) -> None:
    """Attend every task, as one of two teams."""
    team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32) - 1
    for_each_task(shared.dealt, functools.partial(_attend_if_shared, geometry, shared, attending, team))


@cute.jit
def _attend_if_shared(
    geometry: cutlass.Constexpr[FewRowsGeometry], shared: Shared, attending: Attending, team: Int32, number: Int32,
    dealt: Task,
) -> None:  # fmt: skip
    task = in_smaller_tiles(dealt, geometry.halves)
    if (team == 0) | (not is_alone(task)):
        _attend_task(geometry, shared, attending, team, number, task)


@cute.jit
def _attend_task(
    geometry: cutlass.Constexpr[FewRowsGeometry], shared: Shared, attending: Attending, team: Int32, number: Int32,
    task: Task,
) -> None:  # fmt: skip
    """Attend task `number` as team `team` (0 or 1).

    Where rows lie apart, a warp reads the scales of its quarter of the keys into registers two of the team's tiles
    before it needs them, as early as the tiles are loaded; those of the first two tiles ahead of all else: behind the
    tiles of a whole ring, they would come when these have. Their page is asked for three tiles before. Where keys are
    gathered, their scales come with them."""
    query, view, heads, results, softmax_scale, source, scales = attending
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % TEAM_WARPS
    own = team + task.first_count & 1
    ahead, second, further = Int32(0), Int32(0), Int32(0)
    reads_scales = const_expr(geometry.apart and not geometry.gathers)
    if const_expr(reads_scales):
        pages = [page_of_quarter(source, task, own + i * TEAMS, warp) for i in range(2)]
        further = page_of_quarter(source, task, own + 2 * TEAMS, warp)
    if const_expr(geometry.apart):
        query_scales = _query_scales(scales.queries, task, heads)
    given = _query_as_given(query, task, heads, warp, geometry)  # on its way while the rest begins
    if const_expr(reads_scales):
        ahead = scales_of_quarter(geometry, source, scales.keys, pages[0], task, own, warp)
        second = scales_of_quarter(geometry, source, scales.keys, pages[1], task, own + TEAMS, warp)
    lane = lane_of(geometry, shared.exchange, team, warp)
    # Rows of one query token all see the task's keys: a call with one token skips code that is in no cache yet.
    one, other, all_keys = task.keys, task.keys, task.keys
    if (view.q_len != 1) | hides(view):
        one, other, all_keys = _keys_of_rows(view, task, heads)
    if const_expr(geometry.plain):
        latent, rope = _operands(geometry, given)
        scale_log2 = cute.make_rmem_tensor(2, Float32)
        scale_log2.fill(softmax_scale * LOG2_E)
    elif const_expr(geometry.apart):
        latent, rope = _widened_operands(geometry, given)
        scale_log2 = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            scale_log2[row] = query_scales[row] * (softmax_scale * LOG2_E)
    else:
        latent, rope, scale_log2 = _as_operands(
            geometry, shared, given, query.pieces[0].element_type, team, warp, softmax_scale * LOG2_E
        )
    output = cute.make_rmem_tensor((4, STRIP // BLOCK), Float32)
    reference, sum_reference, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    output.fill(0.0)
    reference.fill(NO_KEYS)
    sum_reference.fill(NO_KEYS)
    row_sum.fill(0.0)
    state = State(
        latent, rope, scale_log2, output, reference, sum_reference, row_sum, (one, other), all_keys, lane, warp,
        team,
    )  # fmt: skip
    viewers = viewers_of(view, task, heads)
    for index in cutlass.range(own, task.tiles, TEAMS, unroll=1):
        now = None
        if const_expr(reads_scales):
            now, ahead = ahead, second
            second = scales_of_quarter(geometry, source, scales.keys, further, task, index + 2 * TEAMS, warp)
            further = page_of_quarter(source, task, index + 3 * TEAMS, warp)
        count = task.first_count + index
        shared.kv_edge.wait_full(count)
        stage = shared.stages + shared.kv_edge.stage(count) * geometry.stage_bytes
        tile = task.first_tile + index
        first_key = tile * geometry.tile_kv
        there = None
        if const_expr(geometry.gathers):
            if const_expr(geometry.brings_scales):
                now = brought_scales(geometry, shared, shared.kv_edge.stage(count), warp)
            else:
                told = there_of(geometry, shared, shared.kv_edge.stage(count))
                there = tuple(told[word] for word in range(cute.size(told)))
        elif border_tile(task, tile, TILE_KV) | hides(view):
            wipe(geometry, state, stage, viewers, first_key)
        scores, logs, negative = scores_of(geometry, state, stage, first_key, now, there)
        packed = probabilities_of(geometry, state, scores, logs, negative, stage)
        add_values(geometry, state, packed, stage)
        cute.arch.sync_warp()
        shared.kv_edge.release(count)
    finish(geometry, state, shared, task, is_alone(task), results)


@cute.jit
def _keys_of_rows(view: Visibility, task: Task, heads: Divisor) -> tuple[VisibleKeys, VisibleKeys, VisibleKeys]:
    """What this lane's rows see, each, and what all rows of the warp see."""
    row_keys, all_keys = [], VisibleKeys.everything()
    for row in cutlass.range_constexpr(2):
        position = cute.arch.lane_idx() // QUAD + 8 * row
        keys = VisibleKeys.everything()
        if position < task.rows:
            keys = keys_of_row(view, task.request, task.end_token, quotient(task.first_row + position, heads))
        row_keys.append(keys)
        all_keys = seen_by_both(all_keys, keys)
    return row_keys[0], row_keys[1], seen_by_all(all_keys)


@cute.jit
def _query_scales(queries: cute.Tensor, task: Task, heads: Divisor) -> tuple[Float32, Float32]:
    """The scales of this lane's query rows; another row's where the task has no such row."""
    found = []
    for row in cutlass.range_constexpr(2):
        position = cutlass.max(cutlass.min(cute.arch.lane_idx() // QUAD + 8 * row, task.rows - 1), 0)
        found.append(query_scale(queries, task.request, task.first_row + position, heads))
    return found[0], found[1]


@cute.jit
def _query_as_given(
    query: QueryRows, task: Task, heads: Divisor, warp: Int32, geometry: cutlass.Constexpr[FewRowsGeometry]
) -> tuple:
    """Read this lane's numbers of this warp's query columns: words of what a vector of a key's row is multiplied with,
    vectors, rows; of the rope piece, words, rows. Where the task has no such row they are another's: a branch around
    the loads would part their addresses."""
    latent_piece = query.pieces[0]
    columns = geometry.vector_columns
    vectors = bytes_of(latent_piece.element_type.width * columns) // VECTOR_BYTES
    lane = cute.arch.lane_idx()
    quad_lane = lane % QUAD
    batch, q_len, _, _ = latent_piece.shape
    latent = cute.make_rmem_tensor((4 * vectors, vectors, geometry.vectors, 2), Int32)
    rope = None
    if const_expr(geometry.stored.has("rope")):
        rope = cute.make_rmem_tensor((2, 2), Int32)
    first = task.first_row - task.request * (q_len * heads.value)
    for row in cutlass.range_constexpr(2):
        position = cutlass.max(cutlass.min(lane // QUAD + 8 * row, task.rows - 1), 0)
        token = quotient(first + position, heads)
        place = (task.request, token, first + position - token * heads.value)
        for part in cutlass.range_constexpr(geometry.vectors):
            column = warp * STRIP + part * (QUAD * columns) + quad_lane * columns
            source = cute.recast_ptr(
                aligned(cute.domain_offset((*place, column), latent_piece).iterator, 16), dtype=Int32
            )
            for vector in cutlass.range_constexpr(vectors):
                cute.autovec_copy(
                    cute.make_tensor(aligned(source + 4 * vector, 16), cute.make_layout(4)),
                    cute.make_tensor(latent[None, 0, part, row].iterator + 4 * vector, cute.make_layout(4)),
                )
        if const_expr(geometry.stored.has("rope")):
            source = aligned(cute.domain_offset((*place, warp * 16 + quad_lane * 4), query.pieces[1]).iterator, 8)
            source = cute.recast_ptr(source, dtype=Int32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), rope[None, row])
    return latent, rope


@cute.jit
def _operands(geometry: cutlass.Constexpr[FewRowsGeometry], given: tuple) -> tuple:
    """First operands of this warp's columns of a query of 16 bits."""
    latent, rope = given
    steps, second = geometry.vector_steps, None
    first = cute.make_rmem_tensor((4, geometry.vectors * steps), Int32)
    if const_expr(geometry.stored.has("rope")):
        second = cute.make_rmem_tensor(4, Int32)
    for row in cutlass.range_constexpr(2):
        for word in cutlass.range_constexpr(2):
            for vector in cutlass.range_constexpr(geometry.vectors):
                for step in cutlass.range_constexpr(steps):
                    first[row + 2 * word, vector * steps + step] = latent[2 * step + word, 0, vector, row]
            if const_expr(geometry.stored.has("rope")):
                second[row + 2 * word] = rope[word, row]
    return first, second


@cute.jit
def _widened_operands(geometry: cutlass.Constexpr[FewRowsGeometry], given: tuple) -> tuple:
    """First operands of this warp's columns of an 8-bit query, which float16 holds as it is."""
    latent, rope = given
    steps = geometry.vector_steps
    first = cute.make_rmem_tensor((4, geometry.vectors * steps), Int32)
    second = cute.make_rmem_tensor(4, Int32)
    for row in cutlass.range_constexpr(2):
        for vector in cutlass.range_constexpr(geometry.vectors):
            for step in cutlass.range_constexpr(steps):
                words = widened(latent[step, 0, vector, row], cutlass.Float8E4M3FN)
                for word in cutlass.range_constexpr(2):
                    first[row + 2 * word, vector * steps + step] = words[word]
        for word in cutlass.range_constexpr(2):
            second[row + 2 * word] = rope[word, row]
    return first, second


@cute.jit
def _as_operands(
    geometry: cutlass.Constexpr[FewRowsGeometry],
    shared: Shared,
    given: tuple,
    dtype: cutlass.Constexpr,
    team: Int32,
    warp: Int32,
    scale_log2: Float32,
) -> tuple:
    """First operands of this warp's columns of the query, and the factors that turn products into logarithms of
    scores."""
    latent, rope = given
    lane, steps = cute.arch.lane_idx(), geometry.vector_steps
    numbers = [
        [cute.recast_tensor(latent[None, 0, half, row], dtype).load().to(Float32) for half in range(geometry.vectors)]
        for row in range(2)
    ]
    told = cute.make_tensor(
        cute.make_ptr(Float32, shared.largest, cute.AddressSpace.smem, assumed_align=4),
        cute.make_layout((FEW_ROWS, TEAM_WARPS, TEAMS)),
    )
    for row in cutlass.range_constexpr(2):
        largest = Int32(0)
        for half in cutlass.range_constexpr(geometry.vectors):
            for word in cutlass.range_constexpr(8):
                largest = larger_magnitudes(largest, latent[word, 0, half, row], dtype)
        for step in cutlass.range_constexpr(QUAD.bit_length() - 1):
            largest = larger_magnitudes(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step), dtype)
        if lane % QUAD == 0:
            both = Vector.from_elements((largest,), Int32).bitcast(dtype).to(Float32).to_elements()
            told[lane // QUAD + 8 * row, warp, team] = cute.arch.fmax(*both)
    cute.arch.barrier(barrier_id=TEAM_BARRIER + team, number_of_threads=WARPGROUP)
    first = cute.make_rmem_tensor((4, geometry.vectors * steps), Int32)
    second = cute.make_rmem_tensor(4, Int32)
    logs = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        largest = Float32(0.0)
        for other in cutlass.range_constexpr(TEAM_WARPS):
            largest = cute.arch.fmax(largest, told[lane // QUAD + 8 * row, other, team])
        exponent = cutlass.min(cutlass.max(largest.bitcast(Int32) >> 23, LEAST_EXPONENT), MOST_EXPONENT)
        factor = (Int32(258) - exponent << 23).bitcast(Float32)
        logs[row] = scale_log2 * (exponent - 4 << 23).bitcast(Float32)
        for half in cutlass.range_constexpr(geometry.vectors):
            scaled = cute.make_rmem_tensor(16, cutlass.Float16)
            scaled.store((numbers[row][half] * factor).to(cutlass.Float16))
            words = cute.recast_tensor(scaled, Int32)
            for step in cutlass.range_constexpr(steps):
                for word in cutlass.range_constexpr(2):
                    first[row + 2 * word, half * steps + step] = words[2 * step + word]
        ropes = cute.recast_tensor(rope[None, row], dtype).load().to(Float32) * factor
        turned = cute.make_rmem_tensor(4, dtype)
        turned.store(ropes.to(dtype))
        words = cute.recast_tensor(turned, Int32)
        for word in cutlass.range_constexpr(2):
            second[row + 2 * word] = words[word]
    return first, second, logs
