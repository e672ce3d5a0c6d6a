"""Role `attend` of the Blackwell decode: scores to probabilities, rescaling of the output, and its way out.

The first half of a tile's scores lies on lanes 0-63 of tensor memory, the second on lanes 64-127, so a query row belongs
to two threads, each with half of the keys (and of the output's dims). They agree on the row's maximum
through shared memory, in two places used in turn: a thread that writes the place again has passed the barrier of the
exchange between, which nobody reaches before reading.

The reference that exponents are taken against follows the maximum only when that has grown by more than
`slack` (log2): until then probabilities may exceed 1 and nothing needs rescaling (FlashAttention-4, arXiv 2603.05451).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .decode_geometry import ROW_BARRIER, ROW_THREADS, ROWS, SWIZZLE, DecodeGeometry
from ..parts import tcgen05
from ..parts.alignment import aligned
from ..parts.decode_work import Segment, first_unit, next_unit, segment_of
from ..parts.maximum import max3
from ..parts.pair_pipeline import rank_of
from ..parts.visible import keys_of_row
from .decode_finish import Results, finish
from .decode_task import Task


class Lane(NamedTuple):
    """Where this thread stands: its row of the CTA's 64, which half of the row's columns, its tensor-memory lane."""

    row: Int32
    half: Int32
    address: Int32
    barrier: Int32


class Range(NamedTuple):
    """Keys lo .. hi - 1 of this thread's row; every row of the warp sees keys all_lo .. all_hi - 1."""

    lo: Int32
    hi: Int32
    all_lo: Int32
    all_hi: Int32


class Running(NamedTuple):
    """A row's softmax so far: the reference of its exponents (unscaled) and this thread's part of the sum."""

    reference: Float32
    total: Float32


@cute.jit
def attend(
    geometry: cutlass.Constexpr[DecodeGeometry],
    dtype: cutlass.Constexpr,
    shared,
    task: Task,
    results: Results,
    scale_log2: Float32,
):
    lane = _lane(shared)
    tile = Int32(0)
    exchanges = Int32(0)
    deal = geometry.deal
    unit = first_unit(deal, task.work, task.view)
    while unit.start < task.work.end:
        segment = segment_of(deal, task.work, task.view, unit)
        if segment.valid:
            row = rank_of(geometry.ctas) * ROWS + lane.row
            keys = _range(task, segment, row)
            running = Running(-Float32.inf, Float32(0.0))
            tiles = segment.tiles * geometry.tiles_per_deal
            for i in cutlass.range(tiles, unroll=1):
                first_key = segment.first_tile * deal.tile_kv + i * geometry.tile_kv
                running = _tile(
                    geometry, dtype, shared, lane, keys, running, tile + i, exchanges + i, first_key, i > 0, scale_log2
                )
            tile += tiles
            exchanges += tiles
            if tiles > 0:
                shared.p_ring.wait_empty(tile - 1 + geometry.p_slots)
                tcgen05.fence_after()
            total = _sum(_exchange(shared, lane, running.total, exchanges))
            exchanges += 1
            finish(geometry, lane, segment, row, running.reference * scale_log2, total, task.work.rows, results)
        unit = next_unit(deal, task.work, task.view, unit)


@cute.jit
def _lane(shared) -> Lane:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = warp * 32 + cute.arch.lane_idx()
    address = shared.tensor_memory + (warp * 32 << tcgen05.LANE_SHIFT)
    return Lane(lane & (ROWS - 1), warp // 2, address, ROW_BARRIER + (warp & 1))


@cute.jit
def _range(task: Task, segment: Segment, row: Int32) -> Range:
    row = cutlass.min(row, segment.rows - 1)
    keys = keys_of_row(task.view, segment.request, (segment.first_row + row) // task.work.heads)
    first, end = cute.arch.warp_redux_sync(keys.first, "max"), cute.arch.warp_redux_sync(keys.end, "min")
    return Range(keys.first, keys.end, first, end)


@cute.jit
def _exchange(shared, lane: Lane, value: Float32, count: Int32) -> cute.Tensor:
    """What every thread of the row has: exchange number `count` of the kernel."""
    place = shared.exchange + ((count & 1) * ROWS + lane.row) * ROW_THREADS
    place[lane.half] = value
    cute.arch.barrier(barrier_id=lane.barrier, number_of_threads=32 * ROW_THREADS)
    values = cute.make_rmem_tensor(ROW_THREADS, Float32)
    cute.autovec_copy(cute.make_tensor(aligned(place, 4 * ROW_THREADS), ROW_THREADS), values)
    return values


@cute.jit
def _sum(values: cute.Tensor) -> Float32:
    return values.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@cute.jit
def _tile(
    geometry: cutlass.Constexpr[DecodeGeometry],
    dtype: cutlass.Constexpr,
    shared,
    lane: Lane,
    keys: Range,
    running: Running,
    tile: Int32,
    exchanged: Int32,
    first_key: Int32,
    later: Boolean,
    scale_log2: Float32,
) -> Running:
    """Tile number `tile` of the kernel: S to P; `later` when the output already holds earlier tiles."""
    columns = geometry.s_columns
    first_column = lane.half * columns
    shared.s_ring.wait_full(tile)
    tcgen05.fence_after()
    scores = tcgen05.load(lane.address + geometry.s_column + shared.s_ring.slot(tile) * columns, columns)
    tcgen05.wait_loads()
    tcgen05.fence_before()
    shared.s_ring.release(tile)
    if first_key < keys.all_lo or first_key + geometry.tile_kv > keys.all_hi:
        for column in cutlass.range_constexpr(columns):
            key = first_key + first_column + column
            scores[column] = scores[column] if key >= keys.lo and key < keys.hi else -Float32.inf

    found = _exchange(shared, lane, _maximum(scores), exchanged)
    highest = found.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
    reference = running.reference
    total = running.total
    grown = (highest - reference) * scale_log2 > geometry.slack
    if cute.arch.vote_any_sync(grown):
        factor = Float32(1.0)
        if grown:
            factor = cute.arch.exp2((reference - highest) * scale_log2)
            reference = highest
        total *= factor
        if later:
            shared.p_ring.wait_empty(tile - 1 + geometry.p_slots)
            tcgen05.fence_after()
            _rescale(geometry, lane, factor)
    shift = geometry.bias - (Float32(0.0) if reference == -Float32.inf else reference * scale_log2)
    sums = (Float32(0.0), Float32(0.0))
    for column in cutlass.range_constexpr(0, columns, 2):
        pair = cute.arch.fma_packed_f32x2(
            (scores[column], scores[column + 1]), (scale_log2, scale_log2), (shift, shift)
        )
        scores[column] = cute.arch.exp2(pair[0])
        scores[column + 1] = cute.arch.exp2(pair[1])
        sums = cute.arch.add_packed_f32x2((scores[column], scores[column + 1]), sums)
    shared.p_ring.wait_empty(tile)
    _store(geometry, dtype, shared, lane, scores, first_column, tile)
    cute.arch.fence_view_async_shared()
    tcgen05.fence_before()
    shared.p_ring.fill(tile)
    return Running(reference, total + (sums[0] + sums[1]))


@cute.jit
def _maximum(values: cute.Tensor) -> Float32:
    chains = 4
    best = [values[chain] for chain in range(chains)]
    for column in cutlass.range_constexpr(chains, cute.size(values), 2):
        chain = column // 2 % chains
        best[chain] = max3(best[chain], values[column], values[column + 1])
    return max3(best[0], best[1], cute.arch.fmax(best[2], best[3]))


@cute.jit
def _rescale(
    geometry: cutlass.Constexpr[DecodeGeometry],
    lane: Lane,
    factor: Float32,
):
    """Multiply this thread's part of its output row by `factor`."""
    width = 32
    for first in cutlass.range_constexpr(0, geometry.o_columns, width):
        values = tcgen05.load(lane.address + first, width)
        tcgen05.wait_loads()
        for column in cutlass.range_constexpr(0, width, 2):
            values[column], values[column + 1] = cute.arch.mul_packed_f32x2(
                (values[column], values[column + 1]), (factor, factor)
            )
        tcgen05.store(lane.address + first, values)
    tcgen05.wait_stores()


@cute.jit
def _store(
    geometry: cutlass.Constexpr[DecodeGeometry],
    dtype: cutlass.Constexpr,
    shared,
    lane: Lane,
    probabilities: cute.Tensor,
    first_column: Int32,
    tile: Int32,
):
    """Round to the operand type and store to P: chunks of (64 rows, 128 bytes), swizzled."""
    rounded = cute.make_rmem_tensor_like(probabilities, dtype)
    rounded.store(probabilities.load().to(dtype))
    words = cute.recast_tensor(rounded, Int32)
    first_byte = first_column * geometry.element_bytes
    chunk = shared.p_ring.slot(tile) * geometry.p_chunks + first_byte // SWIZZLE
    row = (chunk * ROWS + lane.row) * SWIZZLE
    for piece in cutlass.range_constexpr(cute.size(words) // 4):
        byte = (first_byte % SWIZZLE + piece * 16) ^ ((lane.row & 7) * 16)
        target = aligned(shared.p_words + (row + byte) // 4, 16)
        mine = cute.make_tensor(words.iterator + piece * 4, 4)
        cute.autovec_copy(mine, cute.make_tensor(target, 4))
