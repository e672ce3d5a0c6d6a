"""Role `multiply` of the Blackwell prefill: one thread that issues every tcgen05 MMA of the CTA."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from tsmla.identity.variant import PrefillVariant

from ...parts.blackwell import tmem, umma
from ...parts.precision import Probabilities
from .geometry import PrefillGeometry
from .plan import place_of
from .storage import Shared
from .work import TileWork


class Products:
    """The two products of one variant as MMA facts: scores = Q K^T, output += P V with P in tensor memory."""

    def __init__(self, variant: PrefillVariant, geometry: PrefillGeometry):
        self.geometry = geometry
        plan = geometry.plan
        self.form = umma.PAIR if plan.ctas > 1 else umma.ONE
        self.kind = umma.kind_of(variant.dtype)
        row_bytes = geometry.slot_elements * geometry.element_bytes
        operands = Probabilities.of(variant.dtype).operands
        self.operand = umma.operand(row_bytes)
        rows, self.v_columns = plan.ctas * geometry.rows, plan.ctas * geometry.slot_elements
        self.scores = umma.instruction(variant.dtype, variant.dtype, rows, geometry.tile_kv, False)
        self.values = umma.instruction(*operands, rows, self.v_columns, True)
        self.k_steps = row_bytes // umma.K_BYTES
        self.v_steps = geometry.tile_kv * geometry.element_bytes // umma.K_BYTES
        self.v_slot_steps = self.v_steps // plan.ctas
        self.early_steps = self.v_steps if plan.crossed else self.v_steps * 3 // 4
        self.k_step = umma.k_step_k_major()
        self.v_step = umma.k_step_mn_major(geometry.element_bytes, row_bytes)
        self.probability_columns = umma.K_BYTES // 4


class Places(NamedTuple):
    """Descriptors of the first Q slot and the first ring slot, and the tensor memory address."""

    q: Int64
    ring: Int64
    tmem_base: Int32


@cute.jit
def multiply(products: cutlass.Constexpr[Products], shared: Shared, tmem_base: Int32, works, tiles: Int32) -> None:
    """Issue scores and values of the KV tiles, for one query tile and then for the other, so that the softmax of one
    runs under the products of the other. `works` are the query tiles' TileWork."""
    geometry = products.geometry
    places = Places(
        umma.at(products.operand, shared.q.iterator.toint()),
        umma.at(products.operand, shared.ring.iterator.toint()),
        tmem_base,
    )
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        shared.q_edge.wait_full(Int32(tile))
    _wait_slots(shared, Int32(0), geometry.k_slots)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        _scores(products, places, shared, works[tile], tile, Int32(0), Int32(0))
    shared.ring_edge.release_after_mmas(Int32(0), geometry.k_slots)
    if const_expr(geometry.plan.crossed):
        _go_on_crossed(products, places, shared, works, tiles)
    elif const_expr(geometry.plan.ahead):
        _go_on_ahead(products, places, shared, works[0], tiles)
    else:
        _go_on_in_place(products, places, shared, works, tiles)
    last = tiles - 1
    v_first = tiles * (geometry.k_slots + geometry.v_slots) - geometry.v_slots
    _wait_slots(shared, v_first, geometry.v_slots)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        _values(products, places, shared, works[tile], tile, last, v_first)
        if const_expr(not geometry.plan.ahead):
            if works[tile].events > 0:  # else nobody waits, and the arrival could outlive the CTA
                shared.output_full.fill_after_mmas(tile)


@cute.jit
def _go_on_in_place(products: cutlass.Constexpr[Products], places: Places, shared: Shared, works, tiles: Int32) -> None:
    """Issue all but the first scores and the last values. Per step: values of the KV tile before, then scores of this
    one, which take the place of those probabilities."""
    geometry = products.geometry
    per_tile = geometry.k_slots + geometry.v_slots
    first, second = works
    for count in cutlass.range(1, tiles, unroll=1):
        k_first = count * per_tile
        v_first = k_first - geometry.v_slots
        _wait_slots(shared, v_first, geometry.v_slots)
        _values(products, places, shared, first, 0, count - 1, v_first)
        _wait_slots(shared, k_first, geometry.k_slots)
        _scores(products, places, shared, first, 0, count, k_first)
        _values(products, places, shared, second, 1, count - 1, v_first)
        shared.ring_edge.release_after_mmas(v_first, geometry.v_slots)
        _scores(products, places, shared, second, 1, count, k_first)
        shared.ring_edge.release_after_mmas(k_first, geometry.k_slots)


@cute.jit
def _go_on_crossed(products: cutlass.Constexpr[Products], places: Places, shared: Shared, works, tiles: Int32) -> None:
    """Issue all but the first scores and the last values. Scores of one query tile take the place of the other's
    probabilities: they come behind the values of those, and the second query tile's values therefore after the first
    one's next scores."""
    geometry = products.geometry
    per_tile = geometry.k_slots + geometry.v_slots
    first, second = works
    for count in cutlass.range(1, tiles, unroll=1):
        k_first = count * per_tile
        v_first = k_first - geometry.v_slots
        # Scores follow values at once: what else they wait for is awaited before, while probabilities are made.
        _wait_slots(shared, k_first, geometry.k_slots)
        _await_readers(shared, first, 0, count - 1)
        if count > 1:
            _values(products, places, shared, second, 1, count - 2, v_first - per_tile)
            shared.ring_edge.release_after_mmas(v_first - per_tile, geometry.v_slots)
        else:
            _await_readers(shared, second, 1, count - 1)
        _scores(products, places, shared, first, 0, count, k_first)
        _wait_slots(shared, v_first, geometry.v_slots)
        _await_readers(shared, second, 1, count - 1)
        _values(products, places, shared, first, 0, count - 1, v_first)
        _scores(products, places, shared, second, 1, count, k_first)
        shared.ring_edge.release_after_mmas(k_first, geometry.k_slots)
    if tiles > 1:
        v_first = (tiles - 1) * per_tile - geometry.v_slots
        _values(products, places, shared, second, 1, tiles - 2, v_first)


@cute.jit
def _go_on_ahead(
    products: cutlass.Constexpr[Products], places: Places, shared: Shared, work: TileWork, tiles: Int32
) -> None:
    """Issue all but the first scores and the last values of the only query tile. Scores take the place of the
    probabilities of the KV tile before the last, whose values are issued before them."""
    geometry = products.geometry
    per_tile = geometry.k_slots + geometry.v_slots
    for count in cutlass.range(1, tiles, unroll=1):
        k_first = count * per_tile
        v_first = k_first - geometry.v_slots
        _wait_slots(shared, k_first, geometry.k_slots)
        _scores(products, places, shared, work, 0, count, k_first)
        shared.ring_edge.release_after_mmas(k_first, geometry.k_slots)
        _wait_slots(shared, v_first, geometry.v_slots)
        _values(products, places, shared, work, 0, count - 1, v_first)
        shared.ring_edge.release_after_mmas(v_first, geometry.v_slots)


@cute.jit
def _await_readers(shared: Shared, work: TileWork, tile: cutlass.Constexpr, count: Int32) -> None:
    """Wait until the scores of KV tile number `count`, if this query tile visits it, have been read. Asked for both
    query tiles before the first one's second scores: then whoever awaits readers by parity knows that the first ones
    are done."""
    if count >= work.start:
        shared.scores_read.wait_full(tile, count - work.start)
        tmem.fence_after()


@cute.jit
def _wait_slots(shared: Shared, first: Int32, slots: cutlass.Constexpr) -> None:
    for slot in cutlass.range_constexpr(slots):
        shared.ring_edge.wait_full(first + slot)


@cute.jit
def _ring_slot(products: cutlass.Constexpr[Products], places: Places, shared: Shared, count: Int32) -> Int64:
    """The descriptor of ring slot number `count`."""
    return places.ring + Int64(shared.ring_edge.stage(count) * (products.geometry.slot_bytes >> 4))


@cute.jit
def _scores(
    products: cutlass.Constexpr[Products], places: Places, shared: Shared, work: TileWork, tile: cutlass.Constexpr,
    count: Int32, k_first: Int32,
) -> None:  # fmt: skip
    """Issue scores of KV tile number `count`, if this query tile visits it."""
    geometry = products.geometry
    if count >= work.start:
        place, _ = place_of(geometry.plan, tile, count - work.start)
        scores = places.tmem_base + (geometry.tmem_scores + place * geometry.tile_kv)
        for slot in cutlass.range_constexpr(geometry.k_slots):
            q = places.q + (tile * geometry.q_pitch + slot) * (geometry.q_slot_bytes >> 4)
            k = _ring_slot(products, places, shared, k_first + slot)
            for step in cutlass.range_constexpr(products.k_steps):
                ahead = step * products.k_step
                umma.multiply(
                    products.kind, scores, q + ahead, k + ahead, products.scores, slot + step > 0, products.form
                )
        shared.scores_full.fill_after_mmas(place)


@cute.jit
def _values(
    products: cutlass.Constexpr[Products], places: Places, shared: Shared, work: TileWork, tile: cutlass.Constexpr,
    count: Int32, v_first: Int32,
) -> None:  # fmt: skip
    """Add the values of KV tile number `count`, if this query tile visits it; where probabilities are not crossed, the
    last quarter of the keys when the softmax has got there."""
    plan = products.geometry.plan
    if count >= work.start:
        event = count - work.start
        place, number = place_of(plan, tile, event)
        over = 1 - tile if const_expr(plan.crossed) else place
        shared.probabilities_early.wait_full(place, number)
        tmem.fence_after()
        _add_values(products, places, shared, tile, over, v_first, 0, products.early_steps, event > 0)
        if const_expr(not plan.crossed):
            shared.probabilities_late.wait_full(place, number)
            tmem.fence_after()
            _add_values(products, places, shared, tile, over, v_first, products.early_steps, products.v_steps, True)
        if const_expr(plan.ahead):
            shared.output_full.fill_after_mmas(place)


@cute.jit
def _add_values(
    products: cutlass.Constexpr[Products], places: Places, shared: Shared, tile: cutlass.Constexpr, over,
    v_first: Int32, begin: cutlass.Constexpr, end: cutlass.Constexpr, keep,
) -> None:  # fmt: skip
    """Add the values of steps `begin` to `end` of the keys, whose probabilities are in score place number `over`."""
    geometry = products.geometry
    probabilities = places.tmem_base + (geometry.tmem_scores + over * geometry.tile_kv)
    for slot in cutlass.range_constexpr(geometry.v_slots):
        block, first = divmod(slot * products.v_slot_steps, products.v_steps)
        if const_expr(first < end and begin < first + products.v_slot_steps):
            output = places.tmem_base + (geometry.tmem_output + tile * geometry.d_v + block * products.v_columns)
            v = _ring_slot(products, places, shared, v_first + slot)
            for step in cutlass.range_constexpr(max(begin, first), min(end, first + products.v_slot_steps)):
                umma.multiply_tmem(
                    products.kind, output, probabilities + step * products.probability_columns,
                    v + (step - first) * products.v_step, products.values, True if const_expr(step > 0) else keep,
                    products.form,
                )  # fmt: skip
