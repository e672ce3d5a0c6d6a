"""Role `multiply` of the Blackwell decode: one warp (in a pair, the leader's) issues every MMA.

Scores run a tile ahead of the values, so that the tensor core has work while the softmax warps turn scores into
probabilities. Solo, values free the place of keys still to come, so they go first when those are not there yet."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ...decode.segments import Segment
from ...limits import SWIZZLE_BYTES
from ...parts.blackwell import tmem, umma
from ...parts.precision import Probabilities
from .assignment import Assignment, Done, for_each_segment
from .geometry import ATOM, CTA_ROWS, DecodeGeometry
from .storage import Shared

OUTPUT_HALVES = 2
"""Products of 256 columns that the output takes."""


class Products:
    """The two products of a variant as MMA facts: scores = Q K^T, output += P V, all operands in shared memory. A rope
    piece of another dtype than the latent one adds to the same scores, by instructions of another kind."""

    def __init__(self, probabilities: Probabilities, geometry: DecodeGeometry):
        latent, last = (geometry.row.pieces[i].dtype for i in (0, -1))
        self.geometry = geometry
        self.form = umma.PAIR_HALVED if geometry.is_pair else umma.ONE_HALVED
        self.kind, self.tail_kind = umma.kind_of(latent), umma.kind_of(last)
        rows = geometry.deal.row_tile
        self.scores = umma.instruction(latent, latent, rows, geometry.tile_kv, False)
        self.tail_scores = umma.instruction(last, last, rows, geometry.tile_kv, False)
        self.values = umma.instruction(*probabilities.operands, rows, geometry.row.value_columns // OUTPUT_HALVES, True)
        self.q = umma.operand(SWIZZLE_BYTES)
        self.k = umma.operand(SWIZZLE_BYTES, geometry.k_chunks * ATOM)
        self.tail = umma.operand(geometry.tail_bytes) if geometry.tail else 0
        self.p = umma.operand(geometry.p_row_bytes)
        chunks = geometry.v_chunks if geometry.is_pair else geometry.k_chunks
        self.v = umma.operand(SWIZZLE_BYTES, chunks * ATOM, ATOM)
        self.v_group_bytes = chunks * ATOM
        self.v_half_bytes = geometry.block_dims // geometry.chunk * ATOM
        self.v_slots = geometry.v_slots_per_tile if geometry.is_pair else geometry.k_slots_per_tile
        self.v_slot_keys = geometry.tile_kv // self.v_slots

    def issue(
        self, accumulator: Int32, a: Int64, b: Int64, a_bytes: int, b_bytes: int, instruction: int, keep, kind: str = ""
    ):
        """Issue one MMA of operands that lie `a_bytes` and `b_bytes` behind descriptors, of the latent dtype or of
        `kind`."""
        a, b = a + (a_bytes >> 4), b + (b_bytes >> 4)
        umma.multiply(kind or self.kind, accumulator, a, b, instruction, keep, self.form)

    def issue_held(self, accumulator: Int32, a: Int32, b: Int64, b_bytes: int, instruction: int, keep):
        """Issue one MMA whose first operand is in tensor memory, at `a`."""
        umma.multiply_tmem(self.kind, accumulator, a, b + (b_bytes >> 4), instruction, keep, self.form)


def multiply(products: cutlass.Constexpr[Products], shared: Shared, assignment: Assignment):
    """Issue the products of all segments. `shared` must know tensor memory (`AttentionKernel._with_tensor_memory`)."""
    geometry = products.geometry

    @cute.jit
    def products_of(segment: Segment, done: Done) -> Done:
        shared.edges.q.wait_full(done.segments)
        if const_expr(geometry.q_held > 0):
            tmem.fence_after()
        for ahead in cutlass.range(segment.tiles + 1, unroll=1):
            scores_first = Boolean(True)
            if const_expr(not geometry.is_pair):
                if ahead > 0 and ahead < segment.tiles:
                    last_slot = (done.tiles + ahead + 1) * geometry.k_slots_per_tile - 1
                    scores_first = _keys_come_first(geometry, shared, last_slot, done.tiles + ahead - 1)
            if ahead > 0 and not scores_first:
                _values(products, shared, done.tiles + ahead - 1, ahead > 1, None, done.segments)
            if ahead < segment.tiles:
                _scores(products, shared, done.tiles + ahead)
                if ahead == segment.tiles - 1:
                    with cute.arch.elect_one():
                        shared.edges.q.release_after_mmas(done.segments)
            if ahead > 0 and scores_first:
                _values(products, shared, done.tiles + ahead - 1, ahead > 1, ahead == segment.tiles, done.segments)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, products_of, Done.nothing())


@cute.jit
def _keys_come_first(geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, slot: Int32, tile: Int32) -> Boolean:
    """Whether scores of keys whose last slot is number `slot` go before values of tile number `tile`. Where there is
    room for three tiles, the warp waits for the keys or for the probabilities, whichever come first: on its way to the
    probabilities it would miss the keys. Where there is less, values free what memory waits for: it asks once."""
    keys, settled = Boolean(False), Boolean(False)
    while not settled:
        keys = (shared.edges.rope if geometry.rope_apart else shared.edges.k).is_full(slot)
        settled = Boolean(True)
        if const_expr(geometry.k_slots > 2 * geometry.k_slots_per_tile):
            if not keys:
                settled = shared.edges.p.is_full(tile)
    return keys


@cute.jit
def _scores(products: cutlass.Constexpr[Products], shared: Shared, tile: Int32):
    """Issue S = Q K^T of tile number `tile`."""
    geometry = products.geometry
    slots_together = geometry.k_slots_per_tile // geometry.k_cuts
    shared.edges.s.wait_empty(tile)
    tmem.fence_after()
    target = shared.tmem_base + geometry.s_column + shared.edges.s.stage(tile) * geometry.s_columns
    for index in cutlass.range_constexpr(geometry.k_cuts):
        count = tile * geometry.k_slots_per_tile + index
        if const_expr(geometry.rope_apart):
            shared.edges.rope.wait_full(tile)
            with cute.arch.elect_one():
                _tail_scores(products, shared, target, 0, False)
                shared.edges.rope.release_after_mmas(tile)
        for slot in cutlass.range_constexpr(slots_together):
            shared.edges.k.wait_full(count + slot)
        slot = shared.edges.k.stage(count)
        with cute.arch.elect_one():
            q = umma.at(products.q, shared.operands.q)
            k = umma.at(products.k, shared.operands.k + slot * geometry.k_wide_bytes)
            for chunk in cutlass.range_constexpr(geometry.k_chunks):
                row_chunk = index * geometry.k_chunks + chunk
                for step in cutlass.range_constexpr(0, SWIZZLE_BYTES, umma.K_BYTES):
                    more, k_bytes = geometry.rope_apart or row_chunk + step > 0, chunk * ATOM + step
                    if const_expr(row_chunk < geometry.q_held):
                        held = shared.tmem_base + geometry.q_column + (row_chunk * SWIZZLE_BYTES + step) // 4
                        products.issue_held(target, held, k, k_bytes, products.scores, more)
                    else:
                        q_bytes = (row_chunk - geometry.q_held) * CTA_ROWS * SWIZZLE_BYTES + step
                        products.issue(target, q, k, q_bytes, k_bytes, products.scores, more)
            if const_expr(geometry.tail > 0 and not geometry.rope_apart):
                _tail_scores(products, shared, target, slot, True)
            if const_expr(geometry.is_pair):
                shared.edges.k.release_after_mmas(count)
            if const_expr(index == geometry.k_cuts - 1):
                shared.edges.s.fill_after_mmas(tile)


def _tail_scores(products: Products, shared: Shared, target: Int32, slot: Int32 | int, keep: bool) -> None:
    """Issue the products of the tail in a slot, by one thread; `keep` adds to scores that are there."""
    geometry = products.geometry
    q = umma.at(products.tail, shared.operands.q + geometry.q_wide_bytes)
    k = umma.at(products.tail, shared.operands.k_tail + slot * geometry.k_tail_bytes)
    for step in range(0, geometry.tail_bytes, umma.K_BYTES):
        more = keep or step > 0
        products.issue(target, q, k, step, step, products.tail_scores, more, products.tail_kind)


@cute.jit
def _values(
    products: cutlass.Constexpr[Products],
    shared: Shared,
    tile: Int32,
    keep: Boolean,
    last: Boolean | None,
    segments: Int32,
):
    """Issue O (+)= P V of tile number `tile`; `keep` adds to what there is; solo, V is the latent part of K. For a
    `last` tile of segment number `segments`, half of the output's columns are handed over before the others are
    multiplied; None where a tile is never the last."""
    geometry = products.geometry
    pair = const_expr(geometry.is_pair)
    edge, base = (shared.edges.v, shared.operands.v) if pair else (shared.edges.k, shared.operands.k)
    slot_bytes = geometry.v_bytes if pair else geometry.k_wide_bytes
    step_keys = umma.K_BYTES // geometry.element_bytes
    shared.edges.p.wait_full(tile)
    tmem.fence_after()
    for index in cutlass.range_constexpr(products.v_slots):
        count = tile * products.v_slots + index
        if const_expr(geometry.is_pair):
            edge.wait_full(count)
        with cute.arch.elect_one():
            p = umma.at(products.p, shared.operands.p + shared.edges.p.stage(tile) * geometry.p_bytes)
            v = umma.at(products.v, base + edge.stage(count) * slot_bytes)
            for half in cutlass.range_constexpr(OUTPUT_HALVES):
                target = shared.tmem_base + half * (geometry.o_columns // OUTPUT_HALVES)
                for key in cutlass.range_constexpr(0, products.v_slot_keys, step_keys):
                    row_byte = (index * products.v_slot_keys + key) * geometry.element_bytes
                    chunk, within = row_byte // geometry.p_row_bytes, row_byte % geometry.p_row_bytes
                    p_bytes = chunk * CTA_ROWS * geometry.p_row_bytes + within
                    v_bytes = key // 8 * products.v_group_bytes + half * products.v_half_bytes
                    more = keep if const_expr(index + key == 0) else True
                    products.issue(target, p, v, p_bytes, v_bytes, products.values, more)
                if const_expr(last is not None and half == 0 and index == products.v_slots - 1):
                    if last:
                        shared.edges.half.fill_after_mmas(segments)
            edge.release_after_mmas(count)
            if const_expr(index == products.v_slots - 1):
                shared.edges.p.release_after_mmas(tile)
