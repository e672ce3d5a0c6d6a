"""Role `softmax` of the Blackwell prefill: one warpgroup per query tile, one thread per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from tsmla.identity.variant import PrefillVariant

from ...limits import WARPGROUP
from ...parts.blackwell import tmem
from ...parts.blackwell.row_softmax import (
    RowState,
    Sums,
    behind,
    behind_waits,
    beyond,
    exponentials,
    mask_missing,
    mask_row,
    nan_or,
    offset_of,
    rescale_factor,
    row_maximum,
    run_out,
    sum_of,
)
from ...parts.logarithm import LOG2_E
from ...parts.precision import Probabilities, numeric, packed_words
from ...parts.row_end import NATURAL, RowEnd, count_earlier, count_sink, end_of_row
from ...prefill.call import PrefillResults
from ...prefill.tile_scheduler import QueryTile
from ...prefill.visits import KeyMask, listed_work
from ...prefill.work_range import WorkRange, last_column_ahead, partial_tile, tile_at
from .geometry import PrefillGeometry
from .key_mask import MaskedRow, masked_row, read_words, seen_keys
from .plan import place_of
from .schedule import PrefillSchedule
from .storage import Shared
from .work import TileWork

STORED_COLUMNS = 32
"""Columns whose probabilities are stored together, where they are told in two steps."""
GROUP = 8
"""Columns whose exponentials are computed while those of the group before are packed and added."""
LAST_COLUMNS = 8
"""Columns whose exponentials are left when the other query tile's may begin: about what it takes to tell it."""
LAST_COLUMNS_IN_ORDER = 16
"""Columns left when the other query tile may begin, where exponentials stay in their order
(`PrefillSchedule.in_order`), the arrival among them."""
GROUPS_AHEAD = 2
"""Groups of columns that are begun ahead of an exponential, where these stay in their order."""


class Row(NamedTuple):
    """What a step needs besides the event's number and the running state. scores, stored: where in tensor memory scores
    are and probabilities go, in the first of the query tile's places. start, other_start: the first KV tiles that this
    query tile and the other one take part in. factor: this row's first place for factors. may_hide: whether the row may
    see no key of a tile. key_mask: where its words of a key mask are."""

    tile: Int32
    warp: Int32
    scores: Int32
    stored: Int32
    factor: cute.Pointer
    scale_log2: Float32
    visible: Int32
    work: WorkRange
    start: Int32
    other_start: Int32 | None
    shared: Shared
    geometry: PrefillGeometry
    schedule: PrefillSchedule
    probabilities: Probabilities
    may_hide: bool
    key_mask: MaskedRow | None


@cute.jit
def softmax(
    variant: cutlass.Constexpr[PrefillVariant],
    geometry: cutlass.Constexpr[PrefillGeometry],
    schedule: cutlass.Constexpr[PrefillSchedule],
    shared: Shared,
    tmem_base: Int32,
    results: PrefillResults,
    place: QueryTile,
    work: WorkRange,
    works: tuple[TileWork, TileWork | None],
    tile: Int32,
    softmax_scale: Float32,
    mask: KeyMask | None,
) -> None:
    """Run the softmax of query tile `tile`: the first of `works` is its own, the second that of the other one, if the
    CTA has two."""
    (own, other), (_, lse, ending, earlier) = works, results
    if const_expr(mask is not None):
        work = listed_work(shared.visits)
    head, span_q, span_kv = place.head, place.q, place.kv
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    position = own.first_row + thread
    visible = span_kv.length
    if const_expr(variant.causal):
        visible = cutlass.min(visible, position + 1 + span_kv.length - span_q.length)
    key_mask = None
    if const_expr(mask is not None):
        visible = cutlass.min(visible, position + 1 + last_column_ahead(mask.causal, span_q.length, span_kv.length))
        key_mask = masked_row(mask, span_q, position)
    probabilities = schedule.probabilities
    scale_log2 = softmax_scale * LOG2_E
    pitch = geometry.plan.score_places * geometry.tile_kv
    scores, across = (
        tmem.row_address(tmem_base, geometry.tmem_scores + which * pitch, thread // 32) for which in (tile, 1 - tile)
    )
    row = Row(
        tile=tile,
        warp=cute.arch.make_warp_uniform(thread // 32),
        scores=scores,
        stored=across if const_expr(geometry.plan.crossed) else scores,
        factor=shared.factors + (tile * geometry.factors * geometry.rows + thread),
        scale_log2=scale_log2,
        visible=visible,
        work=work,
        start=own.start,
        other_start=None if const_expr(other is None) else other.start,
        shared=shared,
        geometry=geometry,
        schedule=schedule,
        probabilities=probabilities,
        may_hide=variant.causal or variant.masked,
        key_mask=key_mask,
    )
    state = RowState(-Float32.inf, Float32(0.0))
    if own.events > 0:
        state = _visit(row, state, own)
    end = end_of_row(state.maximum, softmax_scale, state.total, probabilities.bias, NATURAL, ending.output_scale)
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
        if const_expr(not geometry.plan.ahead):
            if own.events > 0:
                # The correction has read the last rescale, whose place the factor takes.
                shared.probabilities_early.wait_full(tile, own.events - 1)
        _tell_factor(row, end.factor, cutlass.max(own.events - 1, 0))
    if const_expr(variant.lse):
        if position < span_q.length:
            lse[span_q.start + position, head] = end.log_sum * ending.lse_factor


@cute.jit
def _visit(row: Row, state: RowState, own: TileWork) -> RowState:
    """Visit the tiles that the query tile takes part in: partial ones, whose numbers are read a tile ahead where a key
    mask lists them, then whole ones."""
    tile = upcoming = None
    if const_expr(row.key_mask is not None):
        tile, upcoming = tile_at(row.work, own.start), partial_tile(row.work, own.start + 1)
    state = _step(row, state, Int32(0), True, True, tile)
    whole = cutlass.max(row.work.masked - own.start, 1)
    if const_expr(row.may_hide):  # else only the first tile is partial
        for event in cutlass.range(1, whole, unroll=1):
            if const_expr(row.key_mask is not None):
                tile, upcoming = upcoming, partial_tile(row.work, own.start + event + 1)
            state = _step(row, state, event, True, False, tile)
    for event in cutlass.range(whole, own.events, unroll=1):
        state = _step(row, state, event, False, False)
    return state


@cute.jit
def _step(
    row: Row, state: RowState, event: Int32, masked: cutlass.Constexpr, is_first: cutlass.Constexpr,
    listed: Int32 | None = None,
) -> RowState:  # fmt: skip
    """Turn scores of one KV tile into probabilities; tells the correction by how much to rescale, and the MMAs to go
    on. listed: with a key mask, the tile's number, if some row may not see all of it."""
    words = None
    if const_expr(listed is not None):
        words = read_words(row.key_mask, listed)
    tile_kv = row.geometry.tile_kv
    shared = row.shared
    growth = row.probabilities.growth(state.total, 1)
    place, number = place_of(row.geometry.plan, row.tile, event)
    shared.scores_full.wait_full(place, number)
    tmem.fence_after()
    place_columns = Int32(0) if const_expr(row.geometry.plan.score_places == 1) else (place - row.tile) * tile_kv
    if const_expr(row.schedule.maximum_on_load and not masked):
        scores, maxima = tmem.load_with_maximum(row.scores + place_columns, tile_kv)
        tmem.wait_loads()
        seen = row_maximum(maxima)
    else:
        scores = tmem.load(row.scores + place_columns, tile_kv)
        tmem.wait_loads()
        if const_expr(masked):
            if const_expr(words is None):
                scores = mask_row(scores, row.visible - tile_at(row.work, row.start + event) * tile_kv)
            else:
                scores = mask_missing(scores, seen_keys(words, row.visible - listed * tile_kv))
        seen = row_maximum(scores, nan=row.schedule.emulated > 0)
    if const_expr(row.geometry.plan.crossed):
        tmem.fence_before()
        if const_expr(is_first):
            _meet_first_readers(row)
        shared.scores_read.hand_over(row.tile)
    may_hide_row = const_expr(masked and row.may_hide)
    maximum = cute.arch.fmax(state.maximum, beyond(seen, state, growth, row.scale_log2))
    total = Float32(0.0)
    if const_expr(not is_first):
        factor = rescale_factor(state.maximum, maximum, row.scale_log2, may_hide_row)
        _tell_factor(row, factor, event - 1)
        total = state.total * factor
    if const_expr(row.schedule.emulated > 0):
        total = nan_or(total, seen)
    offset = offset_of(maximum, row.scale_log2, row.probabilities.bias, may_hide_row)
    if const_expr(row.geometry.plan.crossed):
        total = _make_all(row, scores, offset, total, event, is_first)
    else:
        total = _make_early_and_late(row, scores, offset, total, place, row.stored + place_columns)
    return RowState(maximum, total)


@cute.jit
def _make_early_and_late(
    row: Row, scores: list, offset: Float32, total: Float32, place: Int32, stored_at: Int32
) -> Float32:
    """Make probabilities over their own scores, in score place number `place`, told in two steps. Returns `total` and
    their sum."""
    tile_kv = row.geometry.tile_kv
    dtype = numeric(row.probabilities.dtype)
    values = []
    for chunk in cutlass.range_constexpr(0, tile_kv, STORED_COLUMNS):
        stored = exponentials(
            scores[chunk : chunk + STORED_COLUMNS], row.scale_log2, offset, chunk, row.schedule.emulated
        )
        tmem.store(stored_at + chunk * dtype.width // 32, packed_words(stored, dtype))
        values += stored
        if const_expr(chunk + STORED_COLUMNS == tile_kv * 3 // 4):
            _tell(row.shared.probabilities_early, place)
    _tell(row.shared.probabilities_late, place)
    return sum_of(values, total)


@cute.jit
def _make_all(
    row: Row, scores: list, offset: Float32, total: Float32, event: Int32, is_first: cutlass.Constexpr
) -> Float32:
    """Make probabilities over the scores of the other query tile, when it has read them and the values before have been
    added. Returns `total` and their sum."""
    tile_kv = row.geometry.tile_kv
    dtype = numeric(row.probabilities.dtype)
    words, sums, made, ends = [], Sums(total), [], []
    in_order = row.schedule.in_order
    last = LAST_COLUMNS_IN_ORDER if const_expr(in_order) else LAST_COLUMNS
    # Without turns, both query tiles would compute exponentials at half speed, and then leave the unit idle.
    _await_turn(row, row.start + event + row.tile - 1)
    if const_expr(in_order):
        offset = behind_waits(offset)
    for group in cutlass.range_constexpr(0, tile_kv, GROUP):
        if const_expr(in_order and group >= GROUPS_AHEAD * GROUP):
            offset = behind(offset, ends[-GROUPS_AHEAD])
        made = exponentials(
            scores[group : group + GROUP],
            row.scale_log2,
            offset,
            group,
            row.schedule.emulated,
            _packed_and_added(made, dtype, words, sums),
        )
        ends.append(made[-3])  # the exponential unit's last one: what is behind it is emulated
        if const_expr(group + GROUP == tile_kv - last):
            row.shared.turns.hand_over(4 * row.tile + row.warp, behind=ends[-1] if const_expr(in_order) else None)
    run_out(_packed_and_added(made, dtype, words, sums))
    # The second query tile's values are added after the first one's next scores have been computed. Where the other
    # query tile has scores there, they were computed behind the values before.
    over = row.start + event + row.tile
    there = (over >= row.other_start) & (over < row.work.tiles)
    _wait_full_of(row.shared.scores_read, 1 - row.tile, over - row.other_start if there else Int32(-1))
    if const_expr(not is_first):
        _wait_full_of(row.shared.output_full, row.tile, Int32(-1) if there else event - 1)
    tmem.fence_after()
    tmem.store(row.stored, words)
    _tell(row.shared.probabilities_early, row.tile)
    return sums.total()


def _packed_and_added(values: list, dtype, words: list, sums: Sums) -> Iterator[None]:
    """Pack the values as words of `dtype` behind `words`, and add them to `sums`, step by step."""
    for first in range(0, len(values), 4):
        words += packed_words(values[first : first + 4], dtype)
        yield
    yield from sums.adding(values)


@cute.jit
def _await_turn(row: Row, count: Int32) -> None:
    """Wait until the other query tile, if it visits KV tile number `count`, needs the exponential unit no more for
    it."""
    _wait_full_of(row.shared.turns, 4 * (1 - row.tile) + row.warp, count - row.other_start)


@cute.jit
def _meet_first_readers(row: Row) -> None:
    """Wait, for the second query tile, until the first one's first scores have been read. The second tile's first
    probabilities wait for the first one's second scores, and a wait by parity needs what is before to be over, and
    nothing behind: no second scores are made before this."""
    before = row.start - row.other_start
    _wait_full_of(row.shared.scores_read, 1 - row.tile, before if row.tile == 1 else Int32(-1))


@cute.jit
def _wait_full_of(signals, tile: Int32, event: Int32) -> None:
    """Wait for an event; a negative one stands for none."""
    if event >= 0:
        signals.wait_full(tile, event)


@cute.jit
def _tell_factor(row: Row, factor: Float32, number: Int32) -> None:
    """Hand factor number `number` of this row to the correction."""
    place = number % row.geometry.factors
    (row.factor + place * row.geometry.rows)[0] = factor
    row.shared.factors_full.hand_over(row.tile * row.geometry.factors + place)


@cute.jit
def _tell(signals, index: Int32) -> None:
    tmem.wait_stores()
    tmem.fence_before()
    signals.hand_over(index)
