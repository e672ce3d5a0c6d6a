"""Role `attend` of the Blackwell decode: scores to probabilities, rescaling of the output, and its way out.

The first half of a tile's scores lies on lanes 0-63 of tensor memory, the second on lanes 64-127, so a query row
belongs to two threads, each with half of the keys (and of the output's dims). They agree on the row's maximum through
shared memory, in two places by turns: a thread that writes a place again has passed the barrier of the exchange in
between, which nobody reaches before reading. The maximum that exponents refer to rarely moves
(`parts/blackwell/row_softmax.py`), so the threads rescale the output themselves."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...decode.results import Results
from ...decode.segments import Segment
from ...parts.alignment import aligned
from ...parts.blackwell import tmem
from ...parts.blackwell.pair import rank_of
from ...parts.blackwell.row_softmax import (
    RowState,
    beyond,
    exponentials,
    mask_missing,
    mask_outside,
    offset_of,
    rescale_factor,
    row_maximum,
    scaled,
    sum_of,
)
from ...parts.division import quotient
from ...parts.keys.scales import RowScales
from ...parts.keys.visible import VisibleKeys, keys_of_row, seen_by_all
from ...parts.precision import Probabilities, numeric, packed_words
from ...parts.row_end import BASE_2, end_of_row
from .assignment import Assignment, for_each_segment
from .finish import HELD_COLUMNS, finish, wait_output
from .geometry import CTA_ROWS, ROW_THREADS, DecodeGeometry
from .keys.gather import there_of
from .keys.scales import anchor_of_segment, folded, row_factor, unfolded_sum
from .schedule import ROW_BARRIER
from .storage import Shared


class Lane(NamedTuple):
    """Where this thread stands: its row of the CTA's 64, which half of the row's columns, its tensor-memory lanes, and
    the named barrier of the row's threads."""

    row: Int32
    half: Int32
    address: Int32
    barrier: Int32


class RowKeys(NamedTuple):
    """What this thread's row sees, and what every row of the warp does."""

    mine: VisibleKeys
    all: VisibleKeys


class Turn(NamedTuple):
    """The tile that a thread attends: its number in the kernel, that of its exchange, its first key. later: whether the
    output already holds earlier tiles of the segment."""

    tile: Int32
    exchange: Int32
    first_key: Int32
    later: Boolean


class Attended(NamedTuple):
    """What the worker has attended: tiles; exchanges between the threads of a row, one for each tile and one for each
    segment; segments that have tiles."""

    tiles: Int32
    exchanges: Int32
    segments: Int32


def attend(
    geometry: cutlass.Constexpr[DecodeGeometry],
    probabilities: cutlass.Constexpr[Probabilities],
    shared: Shared,
    assignment: Assignment,
    scales: RowScales | None,
    results: Results,
    scale_log2: Float32,
):
    """Attend all segments. Where rows have scales (`scales.py`), scores are exponents from the start."""
    lane = _lane(shared)

    @cute.jit
    def attend_to(segment: Segment, done: Attended) -> Attended:
        row = rank_of(geometry.is_pair) * CTA_ROWS + lane.row
        keys = _row_keys(assignment, segment, row)
        factor, exponents, unfolded = None, scale_log2, ()
        scale_anchor = Float32(1.0)
        if const_expr(scales is not None):
            factor = row_factor(scales, segment, row, assignment, scale_log2)
            exponents, unfolded = Float32(1.0), (Float32(0.0),)
            if segment.tiles > 0:
                scale_anchor = anchor_of_segment(geometry, scales.keys, assignment, segment)
        state = RowState(-Float32.inf, Float32(0.0))
        for i in cutlass.range(segment.tiles, unroll=1):
            first_key = (segment.first_tile + i) * geometry.tile_kv
            turn = Turn(done.tiles + i, done.exchanges + i, first_key, i > 0)
            state, unfolded = _tile(
                geometry, probabilities, shared, lane, keys, turn, state, unfolded, exponents, factor
            )
        tiles, exchanges = done.tiles + segment.tiles, done.exchanges + segment.tiles
        total = unfolded[0] if const_expr(scales is not None) else state.total
        mine, other = _exchange(shared, lane, total, exchanges)
        end = end_of_row(state.maximum, exponents, mine + other, probabilities.bias, BASE_2)
        if const_expr(scales is not None):
            end = end._replace(factor=end.factor * scale_anchor)
        finish(geometry, shared, lane, segment, row, end, results, tiles, done.segments)
        segments = done.segments
        if segment.tiles > 0:
            segments += 1
        return Attended(tiles, exchanges + 1, segments)

    for_each_segment(geometry, assignment, attend_to, Attended(Int32(0), Int32(0), Int32(0)), empty_too=True)


@cute.jit
def _lane(shared: Shared) -> Lane:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread = warp * 32 + cute.arch.lane_idx()
    row, half = thread & (CTA_ROWS - 1), warp // 2
    return Lane(row, half, tmem.row_address(shared.tmem_base, 0, warp), ROW_BARRIER + (warp & 1))


@cute.jit
def _row_keys(assignment: Assignment, segment: Segment, row: Int32) -> RowKeys:
    row = cutlass.min(row, segment.rows - 1)
    token = quotient(segment.first_row + row, assignment.work.terms.heads)
    keys = keys_of_row(assignment.work.view, segment.request, segment.end_token, token)
    return RowKeys(keys, seen_by_all(keys))


@cute.jit
def _exchange(shared: Shared, lane: Lane, value: Float32, count: Int32) -> tuple[Float32, Float32]:
    """Exchange a number between the two threads of a row, as exchange number `count` of the kernel; returns both."""
    place = shared.exchange + ((count & 1) * CTA_ROWS + lane.row) * ROW_THREADS
    place[lane.half] = value
    cute.arch.barrier(barrier_id=lane.barrier, number_of_threads=32 * ROW_THREADS)
    values = cute.make_rmem_tensor(ROW_THREADS, Float32)
    cute.autovec_copy(cute.make_tensor(aligned(place, 4 * ROW_THREADS), ROW_THREADS), values)
    return values[0], values[1]


@cute.jit
def _tile(
    geometry: cutlass.Constexpr[DecodeGeometry],
    probabilities: cutlass.Constexpr[Probabilities],
    shared: Shared,
    lane: Lane,
    keys: RowKeys,
    turn: Turn,
    state: RowState,
    unfolded: tuple,
    scale_log2: Float32,
    factor: Float32 | None,
) -> tuple[RowState, tuple]:
    """Make P of a tile's S. Where rows have scales, `factor` is this row's, and `unfolded` its sum without those of
    keys."""
    columns = geometry.s_columns
    tile, exchanged, first_key, later = turn
    shared.edges.s.wait_full(tile)
    tmem.fence_after()
    scores = tmem.load(lane.address + geometry.s_column + shared.edges.s.stage(tile) * columns, columns)
    tmem.wait_loads()
    tmem.fence_before()
    shared.edges.s.release(tile)
    if const_expr(factor is not None):
        scores = folded(shared, geometry, lane.half, scores, factor, tile)
    if const_expr(geometry.gathers):
        there = _there(shared, geometry, lane, tile)
        if functools.reduce(operator.and_, there) != -1:
            scores = mask_missing(scores, there)
    if keys.all.lacks(first_key, geometry.tile_kv):
        mine = first_key + lane.half * columns
        scores = mask_outside(scores, keys.mine.first - mine, keys.mine.end - mine)
    seen = beyond(row_maximum(scores), state, probabilities.growth(state.total, ROW_THREADS), scale_log2)
    one, other = _exchange(shared, lane, seen, exchanged)
    maximum = cute.arch.fmax(state.maximum, cute.arch.fmax(one, other))
    moved = cute.arch.vote_any_sync(maximum != state.maximum)
    rescale = rescale_factor(state.maximum, maximum, scale_log2, True)
    offset = offset_of(maximum, scale_log2, probabilities.bias, True)
    values = exponentials(scores, scale_log2, offset, 0, 0)
    total = sum_of(values, state.total * rescale)
    # With two slots, this one was read before these scores were multiplied. A wait here would also part exponentials
    # from sums and conversions, all of which ptxas then puts behind it.
    if const_expr(geometry.p_slots == 1):
        shared.edges.p.wait_empty(tile)
    _store(geometry, probabilities, shared, lane, values, tile)
    cute.arch.fence_view_async_shared()
    # Last: the output waits for the product of the tile before, which 8-bit probabilities need not wait for.
    if moved and later:
        wait_output(geometry, shared, tile)
        _rescale(geometry, lane, rescale)
    tmem.fence_before()
    shared.edges.p.hand_over(tile)
    if const_expr(factor is not None):
        unfolded = (unfolded_sum(shared, geometry, lane.half, values, unfolded[0] * rescale, tile),)
    return RowState(maximum, total), unfolded


@cute.jit
def _there(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], lane: Lane, tile: Int32) -> tuple[Int32, ...]:
    """Which keys of this thread's half of a tile are there, a bit for each."""
    shared.edges.there.wait_full(tile)
    told, words = there_of(shared, geometry, tile), geometry.s_columns // 32
    there = tuple(told[lane.half * words + word] for word in range(words))
    cute.arch.sync_warp()
    shared.edges.there.release(tile)
    return there


@cute.jit
def _rescale(geometry: cutlass.Constexpr[DecodeGeometry], lane: Lane, factor: Float32):
    """Multiply this thread's part of its output row by `factor`: columns are on their way while those before are
    multiplied. Where rows have scales, probabilities stay in registers meanwhile, and where warps convert or gather
    rows, those have many registers: more would spill."""
    if const_expr(geometry.scale_slots > 0 or geometry.converts or geometry.gathers):
        for first in cutlass.range_constexpr(0, geometry.o_columns, HELD_COLUMNS // 2):
            values = tmem.load(lane.address + first, HELD_COLUMNS // 2)
            tmem.wait_loads()
            tmem.store(lane.address + first, scaled(values, factor))
    else:
        ahead = tmem.load(lane.address, HELD_COLUMNS)
        for first in cutlass.range_constexpr(0, geometry.o_columns, HELD_COLUMNS):
            tmem.wait_loads()
            values = ahead
            if const_expr(first + HELD_COLUMNS < geometry.o_columns):
                ahead = tmem.load(lane.address + first + HELD_COLUMNS, HELD_COLUMNS)
            tmem.store(lane.address + first, scaled(values, factor))
    tmem.wait_stores()


@cute.jit
def _store(
    geometry: cutlass.Constexpr[DecodeGeometry],
    probabilities: cutlass.Constexpr[Probabilities],
    shared: Shared,
    lane: Lane,
    values: list,
    tile: Int32,
):
    """Round probabilities to the operand type and store them to P: chunks of (64 rows, p_row_bytes), swizzled."""
    words = packed_words(values, numeric(probabilities.dtype))
    row_bytes = geometry.p_row_bytes
    first_byte = lane.half * geometry.s_columns * geometry.element_bytes
    chunk = first_byte // row_bytes
    row = (chunk * CTA_ROWS + lane.row) * row_bytes + shared.edges.p.stage(tile) * geometry.p_bytes
    # 8 rows of 128 bytes, or 4 pairs of rows of 64, differ in where their vectors of 16 bytes lie.
    rotation = lane.row * row_bytes // 128 & (row_bytes // 16 - 1)
    for vector in cutlass.range_constexpr(len(words) // 4):
        byte = (first_byte % row_bytes + vector * 16) ^ (rotation * 16)
        mine = cute.make_rmem_tensor(4, Int32)
        for word in cutlass.range_constexpr(4):
            mine[word] = words[4 * vector + word]
        cute.autovec_copy(mine, cute.make_tensor(aligned(shared.words.p + (row + byte) // 4, 16), 4))
