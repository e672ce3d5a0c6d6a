"""Role `softmax` of the Blackwell prefill: one warpgroup per query tile, one thread per row."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from tsmla.variant import PrefillVariant

from ...limits import WARPGROUP
from ...parts.blackwell import tmem
from ...parts.blackwell.row_softmax import (
    RowState,
    beyond,
    exponentials,
    mask_row,
    offset_of,
    rescale_factor,
    row_maximum,
    sum_of,
)
from ...parts.logarithm import LOG2_E
from ...parts.precision import Probabilities, numeric, packed_words
from ...parts.row_end import NATURAL, Earlier, Ending, RowEnd, count_earlier, count_sink, end_of_row
from ...parts.work_range import WorkRange, tile_at
from .geometry import PrefillGeometry
from .schedule import PrefillSchedule
from .storage import Shared
from .work import TileWork

STORED_COLUMNS = 32
"""Columns whose probabilities are stored together."""


class Row(NamedTuple):
    """What a step needs besides the event's number and the running state."""

    tile: Int32
    scores: Int32
    factor: cute.Pointer
    scale_log2: Float32
    visible: Int32
    work: WorkRange
    start: Int32
    shared: Shared
    geometry: PrefillGeometry
    schedule: PrefillSchedule
    probabilities: Probabilities
    causal: bool


@cute.jit
def softmax(
    variant: cutlass.Constexpr[PrefillVariant],
    geometry: cutlass.Constexpr[PrefillGeometry],
    schedule: cutlass.Constexpr[PrefillSchedule],
    shared: Shared,
    tmem_base: Int32,
    lse,
    head: Int32,
    spans,
    work: WorkRange,
    own: TileWork,
    tile: Int32,
    softmax_scale: Float32,
    ending: Ending,
    earlier: Earlier | None,
) -> None:
    """`own` is the TileWork of query tile `tile`."""
    span_q, span_kv = spans
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    position = own.first_row + thread
    visible = span_kv.length
    if const_expr(variant.causal):
        visible = cutlass.min(visible, position + 1 + span_kv.length - span_q.length)
    probabilities = Probabilities.of(variant.dtype)
    scale_log2 = softmax_scale * LOG2_E
    row = Row(
        tile=tile,
        scores=tmem.row_address(tmem_base, geometry.tmem_scores + tile * geometry.tile_kv, thread // 32),
        factor=shared.factors + (tile * geometry.rows + thread),
        scale_log2=scale_log2,
        visible=visible,
        work=work,
        start=own.start,
        shared=shared,
        geometry=geometry,
        schedule=schedule,
        probabilities=probabilities,
        causal=variant.causal,
    )
    state = RowState(-Float32.inf, Float32(0.0))
    if own.events > 0:
        state = _step(row, state, Int32(0), True, True)
        unmasked = cutlass.max(work.masked - own.start, 1)
        for event in cutlass.range(1, unmasked, unroll=1):
            state = _step(row, state, event, True, False)
        for event in cutlass.range(unmasked, own.events, unroll=1):
            state = _step(row, state, event, False, False)
    end = end_of_row(
        state.maximum, softmax_scale, state.total, probabilities.bias, NATURAL, ending.output_scale
    )
    told = own.events > 0
    if const_expr(variant.lse):
        if earlier.merges != 0:
            before = -Float32.inf
            if position < span_q.length:
                before = lse[span_q.start + position, head]
            end, share = count_earlier(end, before)
            kept = shared.kept + (tile * geometry.rows + thread)
            kept[0] = count_sink(ending, head, RowEnd(share, end.log_sum), NATURAL, False).factor
            told = cutlass.Boolean(True)
    end = count_sink(ending, head, end, NATURAL, variant.lse)
    if told:
        if own.events > 0:
            # The correction has read the last rescale, whose place the factor takes.
            shared.probabilities_early.wait_full(tile, own.events - 1)
        _tell_factor(row, end.factor)
    if const_expr(variant.lse):
        if position < span_q.length:
            lse[span_q.start + position, head] = end.log_sum


@cute.jit
def _step(
    row: Row, state: RowState, event: Int32, masked: cutlass.Constexpr, first: cutlass.Constexpr
) -> RowState:
    """Scores of one KV tile to probabilities; tells the correction by how much to rescale, and the MMAs to go on."""
    tile_kv = row.geometry.tile_kv
    shared = row.shared
    shared.scores_full.wait_full(row.tile, event)
    tmem.fence_after()
    if const_expr(row.schedule.maximum_on_load and not masked):
        scores, maxima = tmem.load_with_maximum(row.scores, tile_kv)
        tmem.wait_loads()
        seen = row_maximum(maxima)
    else:
        scores = tmem.load(row.scores, tile_kv)
        tmem.wait_loads()
        if const_expr(masked):
            scores = mask_row(scores, row.visible - tile_at(row.work, row.start + event) * tile_kv)
        seen = row_maximum(scores)
    may_hide_row = const_expr(masked and row.causal)
    maximum = cute.arch.fmax(state.maximum, beyond(seen, state, 1, row.scale_log2, row.probabilities))
    total = Float32(0.0)
    if const_expr(not first):
        factor = rescale_factor(state.maximum, maximum, row.scale_log2, may_hide_row)
        _tell_factor(row, factor)
        total = state.total * factor
    offset = offset_of(maximum, row.scale_log2, row.probabilities.bias, may_hide_row)
    early = tile_kv * 3 // 4
    values = []
    for chunk in cutlass.range_constexpr(0, tile_kv, STORED_COLUMNS):
        stored = exponentials(
            scores[chunk : chunk + STORED_COLUMNS], row.scale_log2, offset, chunk, row.schedule.emulated_pairs
        )
        _store(row, stored, chunk)
        values += stored
        if const_expr(chunk + STORED_COLUMNS == early):
            _tell(shared.probabilities_early, row.tile)
    _tell(shared.probabilities_late, row.tile)
    return RowState(maximum, sum_of(values, total))


@cute.jit
def _store(row: Row, values: list, column: cutlass.Constexpr) -> None:
    """Round probabilities, `column` the first, and store them where the value product reads them: over the scores, in
    their first columns."""
    dtype = numeric(row.probabilities.dtype)
    tmem.store(row.scores + column * dtype.width // 32, packed_words(values, dtype))


@cute.jit
def _tell_factor(row: Row, factor: Float32) -> None:
    place = row.factor
    place[0] = factor
    row.shared.factors_full.hand_over(row.tile)


@cute.jit
def _tell(signals, tile: Int32) -> None:
    tmem.wait_stores()
    tmem.fence_before()
    signals.hand_over(tile)
