"""Role `softmax` of the Blackwell prefill: one warpgroup per query tile, one thread per row."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from tsmla.variant import PrefillVariant

from ..geometry import Sm100PrefillGeometry
from ..parts import tmem
from ..parts.precision import Probabilities, numeric
from ..parts.row_softmax import (
    RowState,
    exponentials,
    mask_row,
    natural_lse,
    new_maximum,
    row_maximum,
    shift_of,
    sum_of,
)
from ..parts.softmax import LOG2_E
from ..parts.work_range import WorkRange, tile_at
from ..schedule import WARPGROUP, Sm100PrefillSchedule
from .prefill_work import TileWork

CHUNK = 32
"""Columns whose probabilities are stored together."""


class Row(NamedTuple):
    """What a step needs besides the event's number and the running state."""

    thread: Int32
    tile: Int32
    scores: cute.Pointer
    factor: cute.Pointer
    scale_log2: Float32
    visible: Int32
    work: WorkRange
    start: Int32
    shared: object
    geometry: Sm100PrefillGeometry
    schedule: Sm100PrefillSchedule
    probabilities: Probabilities


@cute.jit
def softmax(
    variant: cutlass.Constexpr[PrefillVariant],
    geometry: cutlass.Constexpr[Sm100PrefillGeometry],
    schedule: cutlass.Constexpr[Sm100PrefillSchedule],
    shared,
    tmem_base,
    lse,
    head: Int32,
    spans,
    work: WorkRange,
    own: TileWork,
    tile: Int32,
    scales,
) -> None:
    """`own` is the TileWork of query tile `tile`; `scales` are those of scores and of the output."""
    span_q, span_kv = spans
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    position = own.first_row + thread
    visible = span_kv.length
    if const_expr(variant.causal):
        visible = cutlass.min(visible, position + 1 + span_kv.length - span_q.length)
    row = Row(
        thread=thread,
        tile=tile,
        scores=tmem_base + (geometry.tmem_scores + tile * geometry.tile_kv),
        factor=shared.factors + (tile * geometry.rows + thread),
        scale_log2=scales[0] * LOG2_E,
        visible=visible,
        work=work,
        start=own.start,
        shared=shared,
        geometry=geometry,
        schedule=schedule,
        probabilities=Probabilities.of(variant.dtype),
    )
    state = RowState(-Float32.inf, Float32(0.0))
    if own.events > 0:
        state = _step(row, state, Int32(0), True, True)
        unmasked = cutlass.max(work.masked - own.start, 1)
        for event in cutlass.range(1, unmasked, unroll=1):
            state = _step(row, state, event, True, False)
        for event in cutlass.range(unmasked, own.events, unroll=1):
            state = _step(row, state, event, False, False)
        inverse = cute.arch.rcp_approx(state.total) * scales[1]
        # The correction has read the last rescale, whose place the inverse takes.
        shared.probabilities_early.wait(tile, own.events - 1)
        _tell_factor(row, Float32(0.0) if state.total == 0.0 else inverse)
    if const_expr(variant.lse):
        if position < span_q.length:
            lse[span_q.start + position, head] = natural_lse(state, scales[0], row.probabilities.bias)


@cute.jit
def _step(
    row: Row, state: RowState, event: Int32, masked: cutlass.Constexpr, first: cutlass.Constexpr
) -> RowState:
    """Scores of one KV tile to probabilities; tells the correction by how much to rescale, and the MMAs to go on."""
    tile_kv = row.geometry.tile_kv
    shared = row.shared
    scores = cute.make_rmem_tensor(tile_kv, Float32)
    shared.scores_full.wait(row.tile, event)
    tmem.fence_after()
    if const_expr(row.schedule.maximum_on_load and not masked):
        maxima = cute.make_rmem_tensor(tile_kv // CHUNK, Float32)
        tmem.load_with_maximum(row.scores, row.thread, scores, maxima, CHUNK)
        tmem.wait_loads()
        seen = row_maximum(maxima)
    else:
        tmem.load(row.scores, row.thread, scores, CHUNK)
        tmem.wait_loads()
        if const_expr(masked):
            mask_row(scores, row.visible - tile_at(row.work, row.start + event) * tile_kv)
        seen = row_maximum(scores)
    slack, bias = row.probabilities.slack, row.probabilities.bias
    maximum = new_maximum(state.maximum, seen, row.scale_log2, slack)
    total = Float32(0.0)
    if const_expr(not first):
        factor = cute.math.exp2((state.maximum - maximum) * row.scale_log2, fastmath=True)
        factor = Float32(1.0) if state.maximum == maximum else factor
        _tell_factor(row, factor)
        total = state.total * factor
    shift = shift_of(maximum, row.scale_log2, bias)
    early = tile_kv * 3 // 4
    for chunk in cutlass.range_constexpr(0, tile_kv, CHUNK):
        exponentials(scores, chunk, chunk + CHUNK, row.scale_log2, shift, row.schedule.emulated_pairs)
        _store(row, scores, chunk)
        if const_expr(chunk + CHUNK == early):
            _tell(shared.probabilities_early, row.tile)
    _tell(shared.probabilities_late, row.tile)
    return RowState(maximum, sum_of(scores, total))


@cute.jit
def _store(row: Row, scores: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Round CHUNK probabilities and store them where the value product reads them: in the scores' first columns."""
    values = cute.make_tensor(scores.iterator + first, cute.make_layout(CHUNK))
    dtype = numeric(row.probabilities.dtype)
    rounded = cute.make_rmem_tensor(CHUNK, dtype)
    rounded.store(values.load().to(dtype))
    words = cute.recast_tensor(rounded, Float32)
    tmem.store(row.scores + first * dtype.width // 32, row.thread, words)


@cute.jit
def _tell_factor(row: Row, factor: Float32) -> None:
    place = row.factor
    place[0] = factor
    row.shared.factors_full.arrive(row.tile)


@cute.jit
def _tell(signals, tile: Int32) -> None:
    tmem.wait_stores()
    tmem.fence_before()
    signals.arrive(tile)
