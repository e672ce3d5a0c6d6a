"""Ragged attention forward for Blackwell: host entry and kernel entry.

A CTA computes two tiles of 128 query rows of one head. Warpgroups 0 and 1 are the softmax of a tile each (`softmax`),
warpgroup 2 rescales and writes the output (`correct`), one warp issues the MMAs (`multiply`), one the copies (`load`).
Structure after FlashAttention-4 (arXiv 2603.05451): two query tiles in ping-pong, accumulators and probabilities in
tensor memory, correction apart from the softmax and rarely needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.call import PREFILL
from tsmla.identity.variant import PrefillVariant

from ...entry import host_entry
from ...limits import TILE_ALIGNMENT
from ...parts import tma
from ...parts.blackwell import tmem
from ...parts.division import quotient
from ...parts.pipeline import Barriers
from ...parts.precision import numeric
from ...parts.prefill_call import Copied, PrefillResults, results_of
from ...parts.query import Map
from ...parts.tile_scheduler import Packs, packs_of, query_tile, tile_bound
from ...parts.work_range import work_range
from .correct import correct
from .geometry import SECTION_HEADS, PrefillGeometry
from .load import load
from .mma import Products, multiply
from .schedule import PrefillSchedule
from .softmax import softmax
from .storage import Layouts, layouts_of, shared_of
from .work import tile_work


class PrefillKernel:
    """The Blackwell prefill of one variant. Run-time facts: lengths, head counts, strides, scales."""

    def __init__(self, variant: PrefillVariant):
        self.variant = variant
        self.geometry = PrefillGeometry.of(variant)
        self.schedule = PrefillSchedule.of(variant)
        self.products = Products(variant, self.geometry, self.schedule.crossed)
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    __call__ = host_entry(PREFILL)

    def launch(self, given):
        """Make the copies' tensor maps, and launch. given: what the call's table lists, by name."""
        geometry = self.geometry
        layouts = self._layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        slot, slot_shape = cute.select(layouts.ring, mode=[0, 1]), (geometry.rows, geometry.slot_elements)
        q_maps, k_maps = (
            tuple(Map(*cpasync.make_tiled_tma_atom(load_op, piece, slot, slot_shape)) for piece in pieces)
            for pieces in (
                tma.pieces_of(given.q, given.q_pe, geometry.d_qk),
                tma.pieces_of(given.k, given.k_pe, geometry.d_qk),
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
        tiles = tile_bound(packs.rows[0], given.cum_seq_lens_q.shape[0] - 1, geometry.rows * geometry.query_tiles)
        copied, results = Copied(q_maps, k_maps, Map(*v_map)), results_of(given, self.variant.lse)
        self.kernel(copied, Map(*out_map), packs, results, given.softmax_scale).launch(
            grid=(tiles * packs.heads, 1, 1),
            block=(self.schedule.threads, 1, 1),
            smem=geometry.shared_bytes,
            stream=given.stream,
            min_blocks_per_mp=1,
            use_pdl=given.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        copied: Copied,
        stored: Map,
        packs: Packs,
        results: PrefillResults,
        softmax_scale: Float32,
    ):
        geometry, schedule, variant = self.geometry, self.schedule, self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == schedule.load_warp:
            for found in (*copied.q, *copied.k, copied.v, stored):
                cpasync.prefetch_descriptor(found.atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(geometry, self._layouts(), self.dtype, self.out_dtype, base, barriers, schedule.crossed)
        if warp == schedule.mma_warp:
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()

        cta_rows = geometry.rows * geometry.query_tiles
        tile = query_tile(
            cute.arch.block_idx()[0],
            packs,
            cta_rows,
            (geometry.d_qk + geometry.d_v) * geometry.element_bytes,
            section_heads=SECTION_HEADS if const_expr(variant.causal) else None,
        )
        if tile.valid:
            if warp == schedule.correct_warpgroup * 4:
                cute.arch.alloc_tmem(geometry.tmem_columns, shared.tmem_base)
                cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.sync_threads()
            tmem.fence_after()
            tmem_base = shared.tmem_base[0]
            spans = (tile.q, tile.kv)
            first_row = tile.tile * cta_rows
            work = work_range(first_row, cta_rows, geometry.tile_kv, tile.q.length, tile.kv.length, variant.causal)
            works = tuple(
                tile_work(geometry, first_row + index * geometry.rows, spans, variant.causal, work)
                for index in range(geometry.query_tiles)
            )
            if warp < schedule.correct_warpgroup * 4:
                cute.arch.setmaxregister_increase(schedule.softmax_registers)
                index = warp // 4
                own, other = works
                if index == 1:
                    other, own = works
                softmax(
                    variant, geometry, schedule, shared, tmem_base, results, tile.head, spans, work, (own, other),
                    index, softmax_scale,
                )  # fmt: skip
            elif warp < schedule.mma_warp:
                cute.arch.setmaxregister_decrease(schedule.correct_registers)
                correct(
                    variant,
                    geometry,
                    schedule,
                    shared,
                    tmem_base,
                    (stored.atom, tma.clipped_head_rows(stored.view, tile.head, tile.q)),
                    tile,
                    works,
                    work.tiles,
                    results.earlier,
                )
                if warp == schedule.correct_warpgroup * 4:
                    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
                    cute.arch.dealloc_tmem(pointer, geometry.tmem_columns)
            else:
                cute.arch.setmaxregister_decrease(schedule.issue_registers)
                if work.tiles > 0:
                    if warp == schedule.mma_warp:
                        with cute.arch.elect_one():
                            multiply(self.products, shared, tmem_base, works, work.tiles)
                    if warp == schedule.load_warp:
                        kv_head = quotient(tile.head, packs.heads_per_kv_head)
                        load(
                            tuple((atom, tma.head_rows(piece, tile.head, tile.q)) for atom, piece in copied.q),
                            tuple((atom, tma.head_rows(piece, kv_head, tile.kv)) for atom, piece in copied.k),
                            (copied.v.atom, tma.clipped_head_rows(copied.v.view, kv_head, tile.kv)),
                            shared,
                            geometry,
                            tile.tile,
                            work,
                        )

    def _layouts(self) -> Layouts:
        return layouts_of(self.geometry, self.dtype, self.out_dtype)
