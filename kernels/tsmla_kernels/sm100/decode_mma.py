"""Role `multiply` of the Blackwell decode: one warp (of a pair, the leader's) issues every product.

Scores of tile i + 1 are started before the values of tile i, so that the tensor core has work while the softmax warps
turn scores into probabilities.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from tsmla.support import LATENT_DIM

from .decode_geometry import ATOM, ROWS, SWIZZLE, DecodeGeometry
from ..parts import tcgen05
from ..parts.decode_work import first_unit, next_unit, segment_of
from .decode_task import Task

HALVES = 2
"""Products of 256 columns that the output takes."""


@cute.jit
def multiply(shared, geometry: cutlass.Constexpr[DecodeGeometry], dtype: cutlass.Constexpr, task: Task):
    """`shared` as `Attention` makes it."""
    tile = Int32(0)
    segments = Int32(0)
    deal = geometry.deal
    unit = first_unit(deal, task.work, task.view)
    while unit.start < task.work.end:
        segment = segment_of(deal, task.work, task.view, unit)
        if segment.valid and segment.tiles > 0:
            tiles = segment.tiles * geometry.tiles_per_deal
            shared.q_ring.wait_full(segments)
            _scores(shared, geometry, dtype, tile)
            for i in cutlass.range(1, tiles, unroll=1):
                _scores(shared, geometry, dtype, tile + i)
                _values(shared, geometry, dtype, tile + i - 1, i > 1)
            with cute.arch.elect_one():
                shared.q_ring.commit_empty(segments)
            _values(shared, geometry, dtype, tile + tiles - 1, tiles > 1)
            segments += 1
            tile += tiles
        unit = next_unit(deal, task.work, task.view, unit)


@cute.jit
def _scores(shared, geometry: cutlass.Constexpr[DecodeGeometry], dtype: cutlass.Constexpr, tile: Int32):
    """S = Q K^T of tile number `tile`."""
    kind = tcgen05.instruction(dtype, geometry.deal.row_tile, geometry.tile_kv)
    q_wide = tcgen05.descriptor(SWIZZLE, 0, ATOM)
    k_wide = tcgen05.descriptor(SWIZZLE, 0, geometry.k_chunks * ATOM)
    narrow = tcgen05.descriptor(64, 0, 8 * 64)
    slots_per_part = geometry.k_slots_per_tile // geometry.k_parts
    shared.s_ring.wait_empty(tile)
    tcgen05.fence_after()
    target = shared.tensor_memory + geometry.s_column + shared.s_ring.slot(tile) * geometry.s_columns
    for part in cutlass.range_constexpr(geometry.k_parts):
        count = tile * geometry.k_slots_per_tile + part
        for slot in cutlass.range_constexpr(slots_per_part):
            shared.k_ring.wait_full(count + slot)
        slot = shared.k_ring.slot(count)
        with cute.arch.elect_one():
            a, b = tcgen05.at(q_wide, shared.q), tcgen05.at(k_wide, shared.k + slot * geometry.k_wide_bytes)
            for chunk in cutlass.range_constexpr(geometry.k_chunks):
                row_chunk = part * geometry.k_chunks + chunk
                for step in cutlass.range_constexpr(0, SWIZZLE, tcgen05.STEP_BYTES):
                    tcgen05.multiply(
                        geometry.ctas,
                        dtype,
                        target,
                        tcgen05.advance(a, row_chunk * ROWS * SWIZZLE + step),
                        tcgen05.advance(b, chunk * ATOM + step),
                        kind,
                        Boolean(row_chunk + step > 0),
                    )
            if const_expr(geometry.narrow > 0):
                a = tcgen05.at(narrow, shared.q + geometry.q_wide_bytes)
                b = tcgen05.at(narrow, shared.k_narrow_at + slot * geometry.k_narrow_bytes)
            for step in cutlass.range_constexpr(0, geometry.narrow_bytes, tcgen05.STEP_BYTES):
                tcgen05.multiply(
                    geometry.ctas,
                    dtype,
                    target,
                    tcgen05.advance(a, step),
                    tcgen05.advance(b, step),
                    kind,
                    Boolean(True),
                )
            if const_expr(geometry.is_pair):
                shared.k_ring.commit_empty(count)
            if const_expr(part == geometry.k_parts - 1):
                shared.s_ring.commit_full(tile)


@cute.jit
def _values(shared, geometry: cutlass.Constexpr[DecodeGeometry], dtype: cutlass.Constexpr, tile: Int32, keep: Boolean):
    """O (+)= P V of tile number `tile`; `keep` adds to what there is. Solo, V is the latent part of K."""
    pair = const_expr(geometry.is_pair)
    ring, base = (shared.v_ring, shared.v) if pair else (shared.k_ring, shared.k)
    slot_bytes, slot_keys = (geometry.v_bytes, geometry.v_keys) if pair else (geometry.k_wide_bytes, geometry.k_keys)
    chunks, slots = (geometry.v_chunks, geometry.v_slots_per_tile) if pair else (geometry.k_chunks, HALVES)
    half_chunks = geometry.block_dims // geometry.chunk
    kind = tcgen05.instruction(dtype, geometry.deal.row_tile, LATENT_DIM // HALVES, b_rows_contiguous=True)
    p_wide = tcgen05.descriptor(SWIZZLE, 0, ATOM)
    v_wide = tcgen05.descriptor(SWIZZLE, ATOM, chunks * ATOM)
    step_keys = tcgen05.STEP_BYTES // geometry.element_bytes
    shared.p_ring.wait_full(tile)
    tcgen05.fence_after()
    p = shared.p + shared.p_ring.slot(tile) * geometry.p_bytes
    for part in cutlass.range_constexpr(slots):
        count = tile * slots + part
        if const_expr(geometry.is_pair):
            ring.wait_full(count)
        with cute.arch.elect_one():
            a, b = tcgen05.at(p_wide, p), tcgen05.at(v_wide, base + ring.slot(count) * slot_bytes)
            for half in cutlass.range_constexpr(HALVES):
                target = shared.tensor_memory + half * (geometry.o_columns // HALVES)
                for key in cutlass.range_constexpr(0, slot_keys, step_keys):
                    first = (part * slot_keys + key) * geometry.element_bytes
                    tcgen05.multiply(
                        geometry.ctas,
                        dtype,
                        target,
                        tcgen05.advance(a, first // SWIZZLE * ROWS * SWIZZLE + first % SWIZZLE),
                        tcgen05.advance(b, (key // 8 * chunks + half * half_chunks) * ATOM),
                        kind,
                        keep if part + key == 0 else Boolean(True),
                    )
            ring.commit_empty(count)
            if const_expr(part == slots - 1):
                shared.p_ring.commit_empty(tile)
