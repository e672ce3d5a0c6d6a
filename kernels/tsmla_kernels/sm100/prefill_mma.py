"""Role `multiply` of the Blackwell prefill: one warp that issues every tcgen05 MMA of the CTA."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..geometry import Sm100PrefillGeometry
from ..parts import tmem, umma
from .prefill_work import TileWork


class Operands(NamedTuple):
    """MMA operations, shared-memory fragments (one mode per slot) and where each query tile's accumulators are."""

    qk_op: object
    pv_op: object
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    scores: tuple
    probabilities: tuple
    outputs: tuple


@cute.jit
def multiply(mmas, shared, geometry: cutlass.Constexpr[Sm100PrefillGeometry], tmem_base, works, tiles: Int32) -> None:
    """Per step: values of the KV tile before, then scores of this one, for one query tile and then for the other, so
    that the softmax of one runs under the products of the other. `works` are the query tiles' TileWork."""
    operands = _operands(mmas, shared, geometry, tmem_base)
    per_tile = geometry.k_slots + geometry.v_slots
    first, second = works
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        shared.q_edge.wait_full(Int32(tile))
    _wait_slots(shared, Int32(0), geometry.k_slots)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        _scores(operands, shared, geometry, works[tile], tile, Int32(0), Int32(0))
    shared.ring_edge.release_after_mmas(Int32(0), geometry.k_slots)
    for count in cutlass.range(1, tiles, unroll=1):
        k_first = count * per_tile
        v_first = k_first - geometry.v_slots
        _wait_slots(shared, v_first, geometry.v_slots)
        _values(operands, shared, geometry, first, 0, count - 1, v_first)
        _wait_slots(shared, k_first, geometry.k_slots)
        _scores(operands, shared, geometry, first, 0, count, k_first)
        _values(operands, shared, geometry, second, 1, count - 1, v_first)
        shared.ring_edge.release_after_mmas(v_first, geometry.v_slots)
        _scores(operands, shared, geometry, second, 1, count, k_first)
        shared.ring_edge.release_after_mmas(k_first, geometry.k_slots)
    last = tiles - 1
    v_first = tiles * per_tile - geometry.v_slots
    _wait_slots(shared, v_first, geometry.v_slots)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        _values(operands, shared, geometry, works[tile], tile, last, v_first)
        shared.output_full.arrive_after_mmas(tile)


@cute.jit
def _operands(mmas, shared, geometry: cutlass.Constexpr[Sm100PrefillGeometry], base: cute.Pointer) -> Operands:
    mma_qk, mma_pv = mmas
    qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
    transposed = cute.make_tensor(shared.ring.iterator, cute.select(shared.ring.layout, mode=[1, 0, 2]))
    scores = qk.make_fragment_C(qk.partition_shape_C((geometry.rows, geometry.tile_kv)))
    output = pv.make_fragment_C(pv.partition_shape_C((geometry.rows, geometry.slot_elements)))
    probabilities = pv.make_fragment_A(pv.partition_shape_A((geometry.rows, geometry.tile_kv)))
    score_columns = [geometry.tmem_scores + tile * geometry.tile_kv for tile in range(geometry.query_tiles)]
    output_columns = [geometry.tmem_output + tile * geometry.d_v for tile in range(geometry.query_tiles)]
    narrow = cute.recast_ptr(base, dtype=probabilities.element_type)
    per_column = 4 // geometry.element_bytes
    return Operands(
        qk_op=mma_qk.op,
        pv_op=mma_pv.op,
        q=qk.make_fragment_A(qk.partition_A(shared.q)),
        k=qk.make_fragment_B(qk.partition_B(shared.ring)),
        v=pv.make_fragment_B(pv.partition_B(transposed)),
        scores=tuple(cute.make_tensor(base + column, scores.layout) for column in score_columns),
        probabilities=tuple(
            cute.make_tensor(narrow + column * per_column, probabilities.layout) for column in score_columns
        ),
        outputs=tuple(
            tuple(
                cute.make_tensor(base + column + slot * geometry.slot_elements, output.layout)
                for slot in range(geometry.v_slots)
            )
            for column in output_columns
        ),
    )


@cute.jit
def _wait_slots(shared, first: Int32, slots: cutlass.Constexpr) -> None:
    for slot in cutlass.range_constexpr(slots):
        shared.ring_edge.wait_full(first + slot)
    tmem.fence_after()


@cute.jit
def _scores(
    operands: Operands, shared, geometry: cutlass.Constexpr[Sm100PrefillGeometry], work: TileWork,
    tile: cutlass.Constexpr, count: Int32, k_first: Int32,
) -> None:  # fmt: skip
    """Scores of KV tile number `count`, if this query tile visits it."""
    if count >= work.start:
        for slot in cutlass.range_constexpr(geometry.k_slots):
            umma.issue(
                operands.qk_op,
                operands.scores[tile],
                operands.q[None, None, None, tile * geometry.q_pitch + slot],
                operands.k[None, None, None, shared.ring_edge.stage(k_first + slot)],
                slot > 0,
            )
        shared.scores_full.arrive_after_mmas(tile)


@cute.jit
def _values(
    operands: Operands, shared, geometry: cutlass.Constexpr[Sm100PrefillGeometry], work: TileWork,
    tile: cutlass.Constexpr, count: Int32, v_first: Int32,
) -> None:  # fmt: skip
    """Add the values of KV tile number `count`, if this query tile visits it; the last quarter of the keys when the
    softmax has got there."""
    if count >= work.start:
        event = count - work.start
        steps = cute.size(operands.probabilities[tile], mode=[2])
        early = steps * 3 // 4
        shared.probabilities_early.wait(tile, event)
        tmem.fence_after()
        for slot in cutlass.range_constexpr(geometry.v_slots):
            v = operands.v[None, None, None, shared.ring_edge.stage(v_first + slot)]
            umma.issue(
                operands.pv_op, operands.outputs[tile][slot], operands.probabilities[tile], v, event > 0, (0, early)
            )
        shared.probabilities_late.wait(tile, event)
        tmem.fence_after()
        for slot in cutlass.range_constexpr(geometry.v_slots):
            v = operands.v[None, None, None, shared.ring_edge.stage(v_first + slot)]
            umma.issue(
                operands.pv_op, operands.outputs[tile][slot], operands.probabilities[tile], v, True, (early, steps)
            )
