"""Ragged attention forward for Blackwell: host entry and kernel entry.

A CTA computes two tiles of 128 query rows of one head or, where tensor memory holds only one output, a pair of CTAs
computes one each (`plan`). A warpgroup for each tile is its softmax (`softmax`), another one rescales and writes the
output (`correct`), one warp issues the MMAs (`multiply`), one the copies (`load`). Structure after FlashAttention-4
(arXiv 2603.05451): two query tiles in ping-pong, accumulators and probabilities in tensor memory, correction apart from
the softmax and rarely needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from tsmla.identity.call import PREFILL
from tsmla.identity.variant import PrefillVariant

from ...entry import host_entry
from ...limits import TILE_ALIGNMENT
from ...parts.blackwell import tmem
from ...parts.blackwell.pair import meet, rank_of
from ...parts.dependent_launch import launch
from ...parts.division import quotient
from ...parts.pipeline import LEADER, Barriers
from ...parts.precision import numeric
from ...parts.query import Map
from ...prefill import tma
from ...prefill.call import Copied, PrefillResults, results_of, rows_of
from ...prefill.tile_scheduler import Packs, packs_of, query_tile, tile_bound
from ...prefill.visits import KeyMask, key_mask_of, launch_survey, list_of, listed_work
from ...prefill.work_range import work_range
from .correct import correct
from .geometry import SECTION_HEADS, PrefillGeometry
from .load import load
from .mma import Products, multiply
from .schedule import PrefillSchedule
from .softmax import softmax
from .storage import Layouts, layouts_of, shared_of
from .work import first_tile, tile_work


class PrefillKernel:
    """The Blackwell prefill of one variant. Run-time facts: lengths, head counts, strides, scales."""

    def __init__(self, variant: PrefillVariant):
        self.variant = variant
        self.geometry = PrefillGeometry.of(variant)
        self.schedule = PrefillSchedule.of(variant)
        self.products = Products(variant, self.geometry)
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    __call__ = host_entry(PREFILL)

    def launch(self, given):
        """Make the copies' tensor maps, and launch. given: what the call's table lists, by name."""
        geometry, plan = self.geometry, self.geometry.plan
        layouts = self._layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO if plan.ctas > 1 else CtaGroup.ONE)
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        q_slot, slot = (cute.select(layout, mode=[0, 1]) for layout in (layouts.q, layouts.ring))
        q_shape, slot_shape = ((rows, geometry.slot_elements) for rows in (geometry.rows, geometry.slot_rows))
        q_maps, k_maps = (
            tuple(Map(*cpasync.make_tiled_tma_atom(load_op, piece, box, shape)) for piece in pieces)
            for pieces, box, shape in (
                (tma.pieces_of(given.q, given.q_pe, geometry.d_qk), q_slot, q_shape),
                (tma.pieces_of(given.k, given.k_pe, geometry.d_qk), slot, slot_shape),
            )
        )
        v_map = cpasync.make_tiled_tma_atom(load_op, tma.clippable(tma.rows_first(given.v)), slot, slot_shape)
        out_map = cpasync.make_tiled_tma_atom(
            store_op,
            tma.clippable(tma.rows_first(given.out)),
            cute.select(layouts.out, mode=[0, 1]),
            (geometry.rows, geometry.d_v),
        )
        packs = packs_of(given)
        tiles = tile_bound(packs.rows[0], given.cum_seq_lens_q.shape[0] - 1, geometry.rows_together)
        copied, results = Copied(q_maps, k_maps, Map(*v_map)), results_of(given, self.variant.lse)
        mask = key_mask_of(given, self.variant.masked)
        if mask is not None:
            launch_survey(mask, packs, geometry.rows_together, geometry.tile_kv, given.pdl, given.stream)
            given = given._replace(pdl=Int32(1))  # whatever comes before, attention depends on the survey
        kernel = self.kernel(copied, Map(*out_map), packs, results, given.softmax_scale, mask)
        ctas, cluster = tiles * packs.heads * plan.ctas, plan.ctas if plan.ctas > 1 else None
        launch(kernel, given, ctas, self.schedule.threads, geometry.shared_bytes, cluster)

    @cute.kernel
    def kernel(
        self,
        copied: Copied,
        stored: Map,
        packs: Packs,
        results: PrefillResults,
        softmax_scale: Float32,
        mask: KeyMask | None,
    ):
        geometry, schedule, variant, plan = self.geometry, self.schedule, self.variant, self.geometry.plan
        is_pair = plan.ctas > 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == schedule.load_warp:
            for found in (*copied.q, *copied.k, copied.v, stored):
                cpasync.prefetch_descriptor(found.atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(geometry, self._layouts(), self.dtype, self.out_dtype, base, barriers)
        if warp == schedule.mma_warp:
            barriers.init()
        cute.arch.griddepcontrol_wait()

        tile = query_tile(
            cute.arch.block_idx()[0] // plan.ctas if const_expr(is_pair) else cute.arch.block_idx()[0],
            packs,
            geometry.rows_together,
            (geometry.d_qk + geometry.d_v) * geometry.element_bytes,
            section_heads=SECTION_HEADS if const_expr(variant.causal or variant.masked) else None,
        )
        if tile.valid:
            if warp == schedule.correct_warpgroup * 4:
                cute.arch.alloc_tmem(geometry.tmem_columns, shared.tmem_base, is_two_cta=is_pair)
                cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_pair)
            if const_expr(mask is not None):
                if warp == schedule.load_warp:
                    with cute.arch.elect_one():
                        for index, word in enumerate(list_of(mask, tile, geometry.rows_together)):
                            shared.visits[index] = word
            meet(is_pair)
            tmem.fence_after()
            tmem_base = shared.tmem_base[0]
            spans = (tile.q, tile.kv)
            first_row = tile.tile * geometry.rows_together
            if const_expr(mask is None):
                causal = variant.causal
                work = work_range(
                    first_row, geometry.rows_together, geometry.tile_kv, tile.q.length, tile.kv.length, causal
                )
            else:
                causal = mask.causal
                work = listed_work(shared.visits)
            rank = rank_of(is_pair)
            own_row = first_row + rank * (geometry.query_tiles * geometry.rows)
            works = tuple(
                tile_work(geometry, own_row + index * geometry.rows, spans, causal, work)
                for index in range(geometry.query_tiles)
            )
            if warp < schedule.correct_warpgroup * 4:
                cute.arch.setmaxregister_increase(schedule.softmax_registers)
                index = warp // 4
                if const_expr(geometry.query_tiles == 1):
                    index, own, other = Int32(0), works[0], None
                else:
                    own, other = works
                    if index == 1:
                        other, own = works
                softmax(
                    variant, geometry, schedule, shared, tmem_base, results, tile, work, (own, other), index,
                    softmax_scale, mask,
                )  # fmt: skip
            elif warp < schedule.mma_warp:
                cute.arch.setmaxregister_decrease(schedule.correct_registers)
                stored_rows = (stored.atom, tma.clipped_head_rows(stored.view, tile.head, tile.q))
                correct(
                    geometry, schedule, shared, tmem_base, stored_rows, tile, works, work.tiles, results.earlier
                )  # fmt: skip
                if const_expr(not is_pair):
                    if warp == schedule.correct_warpgroup * 4:
                        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
                        cute.arch.dealloc_tmem(pointer, geometry.tmem_columns)
            else:
                cute.arch.setmaxregister_decrease(schedule.issue_registers)
                if work.tiles > 0:
                    if warp == schedule.mma_warp:
                        if rank == LEADER:
                            with cute.arch.elect_one():
                                multiply(self.products, shared, tmem_base, works, work.tiles)
                    if warp == schedule.load_warp:
                        rows = rows_of(copied, tile, quotient(tile.head, packs.heads_per_kv_head))
                        load(rows, shared, geometry, rank, first_tile(geometry, tile), work)
            if const_expr(is_pair):
                # No CTA may leave while products, copies or arrivals still reach into it.
                tmem.fence_before()
                meet(is_pair)
                if warp == schedule.correct_warpgroup * 4:
                    tmem.fence_after()
                    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
                    cute.arch.dealloc_tmem(pointer, geometry.tmem_columns, is_two_cta=True)

    def _layouts(self) -> Layouts:
        return layouts_of(self.geometry, self.dtype, self.out_dtype)
