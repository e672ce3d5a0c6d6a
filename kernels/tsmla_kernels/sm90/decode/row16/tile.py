"""The steps of a tile in the Hopper decode of few rows: scores, probabilities, values.

A warp has 128 columns, those of one scale, of the keys for the scores and of the output. Scores of all warps' columns
are added through shared memory; everything else a warp does on its own, in registers.

Numbers that are summed over may come in any order, if both operands have the same. A lane can therefore read 16 bytes
of a row at a time, whose columns it has for itself. Rows of 656 bytes lie as they are stored, one behind the other: of
every eight, each begins four banks further than the one before. No two lanes of a phase meet in a bank if a block of 8
keys takes every other one of 16, and pairs of columns are keys 2 i and 8 + (2 i + 4) % 8: neither where a lane reads
one key (scores), nor where it reads four (values). bf16 rows lie in the same way, 16 bytes further apart than they
are long; a lane has twice as many vectors of each.

e4m3 is multiplied as f16, which holds all of its numbers. Queries and probabilities are f16, too; a power of two for
each row brings a query's largest number near 16. A key's scale is a factor of scores; for values, its logarithm is
added to the exponent of the probability, so that each warp has references of its own, and any scale is right.

Where pieces lie apart, a key has one scale, and the query is e4m3, too. A warp adds up the scores of a quarter of the
keys, turns them into logarithms with the keys' scales, and adds those of the values for the probabilities: all warps
read the result. This takes the scales of 16 keys only, in registers. Lines of 128 bytes are swizzled: keys of a block
are in the order 0 5 2 7 4 1 6 3, of which neighbours differ in what turns a line by 64 bytes (scores), and every other
one in what turns it by 32 (values)."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cutlass_dsl import select_

from ....limits import VECTOR_BYTES, WARPGROUP
from ....parts.alignment import shared_vector, wipe_vector
from ....parts.hopper.softmax import quad_max
from ....parts.keys.visible import Viewers, VisibleKeys, seen_by_any
from ....parts.precision import numeric, packed_words, widened
from ....parts.ptx import mma_16x8x16
from ....parts.warp import QUAD
from .geometry import BLOCK, STRIP, TEAM_WARPS, TEAMS, TILE_KV, FewRowsGeometry
from .schedule import TEAM_BARRIER

NO_KEYS = -1.0e30
"""Reference of a row before its first visible key."""
BIAS, SLACK = 10.0, 4.0
"""Powers of two: probabilities, float16 or, of bf16 rows, bf16, are times 2^BIAS, and may exceed that by 2^SLACK before
the reference moves."""
SIGNS = -0x7F7F7F80
"""Sign bits of four packed e4m3 numbers."""


class Lane(NamedTuple):
    """Where a lane reads in a stage, in bytes from its beginning, and where it exchanges.

    scored: each vector of its key for scores. rope: 8 bytes of the rope piece. scales: of its
    keys, if they lie there. valued: 16 bytes of either key for values. exchange, sums: addresses of its own scores
    and of the sums."""

    scored: tuple
    rope: Int32 | None
    scales: tuple | None
    valued: tuple
    exchange: Int32
    sums: Int32


class State(NamedTuple):
    """Operands and running state. Lane l has rows l / 4 and l / 4 + 8. `query` [4, steps] and `rope` [4] are first
    operands, `scale_log2` turns products into logarithms of scores (where rows lie apart, but for keys' scales),
    `output` [4, 16] has columns 16 m + block of line m; of 16-bit rows, 8 m + block, those of the second 64 behind."""

    query: cute.Tensor
    rope: cute.Tensor | None
    scale_log2: cute.Tensor
    output: cute.Tensor
    reference: cute.Tensor
    sum_reference: cute.Tensor
    row_sum: cute.Tensor
    row_keys: tuple
    all_keys: VisibleKeys
    lane: Lane
    warp: Int32
    team: Int32


@cute.jit
def lane_of(geometry: cutlass.Constexpr[FewRowsGeometry], exchange: Int32, team: Int32, warp: Int32) -> Lane:
    lane = cute.arch.lane_idx()
    line, quad_lane = lane // QUAD, lane % QUAD
    key = Int32(select_(line % 2 == 0, geometry.key_of(0, line // 2), geometry.key_of(1, line // 2)))
    own = [geometry.key_of(i, quad_lane) for i in range(2)]
    if const_expr(geometry.apart):
        strip = warp * (BLOCK * STRIP)
        scored = tuple(strip + _in_line(key, half * QUAD + quad_lane) for half in range(geometry.vectors))
        rope = geometry.rope_at + _in_line(key, 2 * warp + quad_lane // 2) + quad_lane % 2 * 8
        scales = None
        valued = tuple(strip + _in_line(key, line) for key in own)
    else:
        size, strip = geometry.row_bytes, warp * (STRIP * geometry.number_bytes)
        scored = (key * size + strip + quad_lane * VECTOR_BYTES,) * geometry.vectors
        rope = scales = None
        if const_expr(geometry.stored.has("rope")):
            rope = key * size + geometry.rope_at + warp * 32 + quad_lane * 8
        if const_expr(not geometry.plain):
            scales = tuple(key * size + geometry.scales_at + warp * 4 for key in own)
        valued = tuple(key * size + strip + line * VECTOR_BYTES for key in own)
    return Lane(
        scored=scored,
        rope=rope,
        scales=scales,
        valued=valued,
        exchange=exchange + team * geometry.exchange_bytes + lane * VECTOR_BYTES,
        sums=exchange + TEAMS * geometry.exchange_bytes + team * geometry.sums_bytes + lane * VECTOR_BYTES,
    )


def _in_line(key: Int32, vector: Int32) -> Int32:
    """Where 16 bytes of a key's line lie, behind the first line of its block."""
    return key * STRIP + (vector ^ key) * VECTOR_BYTES


@cute.jit
def scores_of(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, stage: Int32, first_key: Int32, scales: tuple | None,
    there: tuple | None,
) -> tuple:  # fmt: skip
    """Score a tile that begins with `first_key`, over all columns. Returns scores (4, blocks) of this lane, but for
    `scale_log2`; logarithms of its keys' scales, if they lie in rows; whether one of these is negative. there: where
    rows are gathered, which keys of the tile are there, unless their scales say it.

    Where rows lie apart, `scales` are those of this lane's keys of the quarter; scores are then the logarithms of
    probabilities times scales, and that is all."""
    blocks = geometry.blocks
    scores = cute.make_rmem_tensor((4, blocks), Float32)
    scores.fill(0.0)
    for vector in cutlass.range_constexpr(geometry.vectors):
        words = cute.make_rmem_tensor((4, blocks), Int32)
        for block in cutlass.range_constexpr(blocks):
            place = stage + state.lane.scored[vector]
            if const_expr(not geometry.apart):
                place = place + vector * (QUAD * VECTOR_BYTES)
            place = place + geometry.latent_of(block)
            cute.autovec_copy(shared_vector(Int32, place), words[None, block])
        for step in cutlass.range_constexpr(geometry.vector_steps):
            query = [state.query[i, vector * geometry.vector_steps + step] for i in range(4)]
            for block in cutlass.range_constexpr(blocks):
                if const_expr(geometry.plain):
                    low, high = words[2 * step, block], words[2 * step + 1, block]
                else:
                    low, high = widened(words[step, block], cutlass.Float8E4M3FN)
                mma_16x8x16(geometry.product, scores[None, block], query, low, high)
    logs, signs = None, Int32(0)
    if const_expr(geometry.scales_at is not None):
        logs = cute.make_rmem_tensor((2, blocks), Float32)
        for block in cutlass.range_constexpr(blocks):
            for i in cutlass.range_constexpr(2):
                scale = _floats(stage + state.lane.scales[i] + geometry.latent_of(block))[0]
                signs = signs | scale.bitcast(Int32)
                logs[i, block] = cute.math.log2(cute.math.absf(scale), fastmath=True)
                for row in cutlass.range_constexpr(2):
                    scores[2 * row + i, block] = scores[2 * row + i, block] * scale
    if const_expr(geometry.stored.has("rope")):
        rope = [state.rope[i] for i in range(4)]
        for block in cutlass.range_constexpr(blocks):
            words = cute.make_rmem_tensor(2, Int32)
            cute.autovec_copy(_words(2, stage + state.lane.rope + geometry.rope_of(block)), words)
            mma_16x8x16(numeric(geometry.stored.piece("rope").dtype), scores[None, block], rope, words[0], words[1])
    _add_up(geometry, state, scores, first_key, scales, there)
    return scores, logs, signs < 0


@cute.jit
def _add_up(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, scores: cute.Tensor, first_key: Int32,
    scales: tuple | None, there: tuple | None,
) -> None:  # fmt: skip
    """Add the scores of the other warps' columns. A warp does that for a quarter of the tile's keys, hides what rows
    may not see of these, and counts them; then all read all sums. Scores and sums have places of their own, so that
    the two barriers are enough."""
    barrier = TEAM_BARRIER + state.team
    size = 32 * VECTOR_BYTES
    blocks, own_blocks = geometry.blocks, geometry.own_blocks
    warp_bytes = blocks * size
    exchange = state.lane.exchange
    written = exchange + state.warp * warp_bytes
    for block in cutlass.range_constexpr(blocks):
        cute.autovec_copy(scores[None, block], shared_vector(Float32, written + block * size))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    quarter = cute.make_rmem_tensor((4, own_blocks), Float32)
    quarter.fill(0.0)
    own = own_blocks * state.warp * size
    for other in cutlass.range_constexpr(TEAM_WARPS):
        for block in cutlass.range_constexpr(own_blocks):
            theirs = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(shared_vector(Float32, exchange + own + other * warp_bytes + block * size), theirs)
            for i in cutlass.range_constexpr(4):
                quarter[i, block] = quarter[i, block] + theirs[i]
    told = quarter
    if const_expr(geometry.apart):
        told = _scaled(geometry, state, quarter, scales)
    if const_expr(geometry.brings_scales):
        _hide_missing(geometry, quarter, told, scales)
    hides = state.all_keys.lacks(first_key, geometry.tile_kv)
    if const_expr(there is not None):
        hides = hides | (functools.reduce(operator.and_, there) != -1)
    if hides:
        _hide(geometry, state, quarter, first_key, there)
        if const_expr(geometry.apart):
            _hide(geometry, state, told, first_key, there)
    for block in cutlass.range_constexpr(own_blocks):
        cute.autovec_copy(told[None, block], shared_vector(Float32, state.lane.sums + own + block * size))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    _read_sums(geometry, state, scores)
    _count(geometry, state, quarter)


@cute.jit
def _read_sums(geometry: cutlass.Constexpr[FewRowsGeometry], state: State, scores: cute.Tensor) -> None:
    """Read the scores of all columns. They stay where they are until all of the team have come to those of its next
    tile."""
    for block in cutlass.range_constexpr(geometry.blocks):
        place = state.lane.sums + block * (32 * VECTOR_BYTES)
        cute.autovec_copy(shared_vector(Float32, place), scores[None, block])


@cute.jit
def _scaled(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, quarter: cute.Tensor, scales: tuple
) -> cute.Tensor:
    """Turn products into logarithms of scores, in place, and return logarithms of probabilities times their values'
    scales. A key whose scale is 0 is hidden."""
    told = cute.make_rmem_tensor((4, geometry.own_blocks), Float32)
    for block in cutlass.range_constexpr(geometry.own_blocks):
        for i in cutlass.range_constexpr(2):
            scale = scales[2 * block + i]
            small = scale < 1.0  # it may be too small to be a normal number
            log = cute.math.log2(Float32(select_(small, scale * 2.0**32, scale)), fastmath=True)
            log = log - Float32(select_(small, Float32(32.0), Float32(0.0)))
            none = Float32(select_(scale == 0.0, Float32(-Float32.inf), Float32(0.0)))
            for row in cutlass.range_constexpr(2):
                place = (2 * row + i, block)
                quarter[place] = cute.math.fma(quarter[place], scale * state.scale_log2[row], none)
                told[place] = quarter[place] + log
    return told


@cute.jit
def _hide_missing(
    geometry: cutlass.Constexpr[FewRowsGeometry], quarter: cute.Tensor, told: cute.Tensor, scales: tuple
) -> None:
    """Set scores of keys that are not there to -inf: their scales are 0, whatever is in a query."""
    for block in cutlass.range_constexpr(geometry.own_blocks):
        for i in cutlass.range_constexpr(2):
            there = scales[2 * block + i] != 0.0
            for row in cutlass.range_constexpr(2):
                for scores in (quarter, told):
                    place = (2 * row + i, block)
                    scores[place] = Float32(select_(there, scores[place], Float32(-Float32.inf)))


@cute.jit
def _hide(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, quarter: cute.Tensor, first_key: Int32,
    there: tuple | None,
) -> None:  # fmt: skip
    """Set scores of keys that a row may not see, or that are not there, to -inf; `first_key` is the tile's first."""
    quad_lane = cute.arch.lane_idx() % QUAD
    first = first_key + geometry.first_of(geometry.own_blocks * state.warp)
    for row in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(geometry.own_blocks):
            for i in cutlass.range_constexpr(2):
                key = first + geometry.first_of(block) + geometry.key_of(i, quad_lane)
                seen = state.row_keys[row].holds(key)
                if const_expr(there is not None):
                    word = there[0]
                    if const_expr(len(there) > 1):
                        word = Int32(select_(state.warp < TEAM_WARPS // 2, *there))
                    seen = seen & (word >> (key & 31) & 1 != 0)
                score = quarter[2 * row + i, block]
                quarter[2 * row + i, block] = Float32(select_(seen, score, Float32(-Float32.inf)))


@cute.jit
def _count(geometry: cutlass.Constexpr[FewRowsGeometry], state: State, quarter: cute.Tensor) -> None:
    """Add the exponentials of some scores to the sums of rows. A lane has a sum of its own columns, and a reference of
    its own: their maximum so far."""
    for row in cutlass.range_constexpr(2):
        highest = Float32(-Float32.inf)
        for block in cutlass.range_constexpr(geometry.own_blocks):
            for i in cutlass.range_constexpr(2):
                highest = cute.arch.fmax(highest, quarter[2 * row + i, block])
        factor = Float32(1.0)  # scores are logarithms already
        if const_expr(not geometry.apart):
            factor = state.scale_log2[row]
        now = cute.arch.fmax(state.sum_reference[row], highest * factor)
        total = state.row_sum[row] * cute.math.exp2(state.sum_reference[row] - now, fastmath=True)
        for block in cutlass.range_constexpr(geometry.own_blocks):
            for i in cutlass.range_constexpr(2):
                exponent = cute.math.fma(quarter[2 * row + i, block], factor, -now)
                total = total + cute.math.exp2(exponent, fastmath=True)
        state.row_sum[row] = total
        state.sum_reference[row] = now


@cute.jit
def wipe(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, stage: Int32, viewers: Viewers, first_key: Int32
) -> None:
    """Zero this warp's values of keys that no row may see, and set their scales, if they lie there, to 1."""
    lane = cute.arch.lane_idx()
    for start in cutlass.range(0, TILE_KV, 32, unroll=1):
        key = start + lane
        if not seen_by_any(viewers, first_key + key):
            line = _values_of(geometry, stage, state.warp, key)
            for vector in cutlass.range(STRIP // VECTOR_BYTES, unroll=1):
                wipe_vector(shared_vector(Int32, line + vector * VECTOR_BYTES))
            if const_expr(not geometry.apart):
                _forget_scale(stage + key * geometry.row_bytes + geometry.scales_at + state.warp * 4)
    cute.arch.fence_view_async_shared()  # copies will write there
    cute.arch.sync_warp()


def _forget_scale(address: Int32) -> None:
    _floats(address)[0] = Float32(1.0)


def _values_of(geometry: FewRowsGeometry, stage: Int32, warp: Int32, key: Int32) -> Int32:
    """Where a key's values of this warp lie."""
    if geometry.apart:
        return stage + ((key // BLOCK * TEAM_WARPS + warp) * BLOCK + key % BLOCK) * STRIP
    return stage + key * geometry.row_bytes + warp * STRIP


@cute.jit
def probabilities_of(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, scores: cute.Tensor, logs: cute.Tensor | None,
    negative: Boolean, stage: Int32,
) -> cute.Tensor:  # fmt: skip
    """Probabilities, times scales, as first operands (4, steps of 16 keys); `scores` become their logarithms. negative:
    whether one of this lane's scales is."""
    highest = _refer(geometry, state, scores, logs)
    beyond = Boolean(False)
    for row in cutlass.range_constexpr(2):
        limit = Float32(select_(state.reference[row] == NO_KEYS, Float32(NO_KEYS), Float32(BIAS + SLACK)))
        beyond = beyond | (highest[row] > limit)
    if cute.arch.vote_any_sync(beyond | negative):  # one branch: another would part exponentials from values
        _move(state, highest)
        _read_sums(geometry, state, scores)
        _refer(geometry, state, scores, logs)
        if const_expr(logs is not None):
            if cute.arch.vote_any_sync(negative):
                _turn(stage, state.warp, geometry.row_bytes, geometry.scales_at)
    packed = cute.make_rmem_tensor((4, geometry.key_steps), Int32)
    for row in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(geometry.blocks):
            values = [cute.math.exp2(scores[2 * row + i, block], fastmath=True) for i in range(2)]
            packed[row + 2 * (block % 2), block // 2] = packed_words(values, geometry.product)[0]
    return packed


@cute.jit
def _refer(
    geometry: cutlass.Constexpr[FewRowsGeometry], state: State, scores: cute.Tensor, logs: cute.Tensor | None
) -> cute.Tensor:
    """Turn scores into the exponents of probabilities times scales, relative to the rows' references; returns each
    row's largest of this lane.

    The logarithm of a scale is added last, to what is left of a score beside the reference: added to a score that is
    not near 0, it would be rounded, for each strip differently. For the same reason exponents are not moved to another
    reference, but made again."""
    highest = cute.make_rmem_tensor(2, Float32)
    highest.fill(-Float32.inf)
    for row in cutlass.range_constexpr(2):
        base = _base(state, row)
        for column in cutlass.range_constexpr(2 * geometry.blocks):
            place = (2 * row + column % 2, column // 2)
            if const_expr(geometry.apart):
                scores[place] = scores[place] - base
            else:
                scores[place] = cute.math.fma(scores[place], state.scale_log2[row], -base)
            if const_expr(logs is not None):
                scores[place] = scores[place] + logs[column % 2, column // 2]
            highest[row] = cute.arch.fmax(highest[row], scores[place])
    return highest


def _base(state: State, row: int) -> Float32:
    """What exponents of a row refer to: its reference, or 0 before it has one."""
    return Float32(select_(state.reference[row] == NO_KEYS, Float32(0.0), state.reference[row]))


@cute.jit
def _turn(stage: Int32, warp: Int32, row_bytes: cutlass.Constexpr[int], scales_at: cutlass.Constexpr[int]) -> None:
    """Turn the signs of this warp's values of keys whose scales are negative: probabilities know the logarithms of
    these, not their signs."""
    lane = cute.arch.lane_idx()
    for start in cutlass.range(0, TILE_KV, 32, unroll=1):
        row = stage + (start + lane) * row_bytes
        if _floats(row + scales_at + warp * 4)[0].bitcast(Int32) < 0:
            for vector in cutlass.range(STRIP // VECTOR_BYTES, unroll=1):
                place = shared_vector(Int32, row + warp * STRIP + vector * VECTOR_BYTES)
                words = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(place, words)
                for i in cutlass.range_constexpr(4):
                    words[i] = words[i] ^ SIGNS
                cute.autovec_copy(words, place)
    cute.arch.fence_view_async_shared()  # copies will write there
    cute.arch.sync_warp()


@cute.jit
def _move(state: State, highest: cute.Tensor) -> None:
    """Move references to the rows' maxima, and rescale what referred to others. `highest` [rows] are this lane's
    largest exponents."""
    for row in cutlass.range_constexpr(2):
        now = cute.arch.fmax(state.reference[row], quad_max(highest[row]) + _base(state, row) - BIAS)
        factor = cute.math.exp2(state.reference[row] - now, fastmath=True)
        state.reference[row] = now
        for block in cutlass.range_constexpr(STRIP // BLOCK):
            for i in cutlass.range_constexpr(2):
                state.output[2 * row + i, block] = state.output[2 * row + i, block] * factor


@cute.jit
def add_values(geometry: cutlass.Constexpr[FewRowsGeometry], state: State, packed: cute.Tensor, stage: Int32) -> None:
    """Add probabilities times values to the output."""
    for step in cutlass.range_constexpr(geometry.key_steps):
        weights = [packed[i, step] for i in range(4)]
        for part in cutlass.range_constexpr(geometry.number_bytes):
            words = cute.make_rmem_tensor((4, 4), Int32)
            for key in cutlass.range_constexpr(4):
                place = stage + state.lane.valued[key % 2] + geometry.latent_of(2 * step + key // 2) + part * STRIP
                cute.autovec_copy(shared_vector(Int32, place), words[None, key])
            for word in cutlass.range_constexpr(4):
                numbers = [_columns(geometry, words[word, 2 * i], words[word, 2 * i + 1]) for i in range(2)]
                for column, (low, high) in enumerate(zip(*numbers, strict=True)):
                    output = state.output[None, part * geometry.vector_columns + word * len(numbers[0]) + column]
                    mma_16x8x16(geometry.product, output, weights, low, high)


def _columns(geometry: FewRowsGeometry, one: Int32, other: Int32) -> list[Int32]:
    """Put a word's columns of two keys together: for each column both keys' numbers as products take them."""
    if geometry.plain:
        return [Int32(cute.arch.prmt(one, other, Int32(selector))) for selector in (0x5410, 0x7632)]
    columns = []
    for selector in (0x5140, 0x7362):
        columns += widened(Int32(cute.arch.prmt(one, other, Int32(selector))), cutlass.Float8E4M3FN)
    return columns


def _words(count: int, address: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _floats(address: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))
