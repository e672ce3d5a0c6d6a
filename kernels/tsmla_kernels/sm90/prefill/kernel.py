"""Ragged attention forward for Hopper: host entry and kernel entry.

Warpgroup 0 loads Q, K and V by TMA (`load`) and widens 8-bit values (`widen_values`); each other warpgroup
attends 64 query rows (`attend`). Structure after FlashAttention-3 (arXiv 2407.08608): warp specialisation, and within a
warpgroup the score product of one KV tile overlaps the value product of the one before.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from tsmla.identity.call import PREFILL
from tsmla.identity.variant import PrefillVariant

from ...entry import host_entry
from ...limits import TILE_ALIGNMENT, WARPGROUP
from ...parts.dependent_launch import launch
from ...parts.pipeline import Barriers
from ...parts.precision import Probabilities, numeric
from ...parts.query import Map
from ...prefill import tma
from ...prefill.call import Copied, PrefillResults, results_of
from ...prefill.tile_scheduler import Packs, packs_of, query_tile, tile_bound
from ...prefill.visits import KeyMask, key_mask_of, launch_survey
from .attend import attend
from .geometry import LONG_KEYS, TASKS_AT, PrefillGeometry
from .load import load
from .schedule import PrefillSchedule
from .storage import Layouts, layouts_of, shared_of
from .tasks import Tasks, TileDeal, deal_of, numbers_of
from .widen import widen_values


class PrefillKernel:
    """The Hopper prefill of one variant. Run-time facts: lengths, head counts, strides, scales."""

    def __init__(self, variant: PrefillVariant):
        self.variant = variant
        self.geometry = PrefillGeometry.of(variant)
        self.schedule = PrefillSchedule.of(self.geometry)
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    __call__ = host_entry(PREFILL)

    @cute.jit
    def launch(self, given):
        """Make the copies' tensor maps, and launch. given: what the call's table lists, by name."""
        geometry, columns = self.geometry, self.geometry.box_columns
        mma_qk, mma_pv = self._mmas()
        layouts = self._layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        q_maps, k_maps = (
            tuple(Map(*cpasync.make_tiled_tma_atom(load_op, piece, box, (rows, columns))) for piece in pieces)
            for pieces, box, rows in (
                (tma.pieces_of(given.q, given.q_pe, geometry.d_qk), layouts.q_box, 64),
                (tma.pieces_of(given.k, given.k_pe, geometry.d_qk), layouts.k_box, geometry.tile_kv),
            )
        )
        v_map = cpasync.make_tiled_tma_atom(
            load_op,
            tma.clippable(tma.rows_first(given.v)),
            cute.select(layouts.v, mode=[0, 1]),
            (geometry.tile_kv, geometry.d_v),
        )
        packs, sequences = packs_of(given), given.cum_seq_lens_q.shape[0] - 1
        tiles = packs.heads * tile_bound(packs.rows[0], sequences, geometry.tile_q)
        unlike = self.variant.causal or self.variant.masked
        deal = deal_of(geometry, unlike, packs.rows, sequences, packs.heads, given.k.shape[1], given.processors)
        results = results_of(given, self.variant.lse)
        mask = key_mask_of(given, self.variant.masked)
        if const_expr(mask is not None):
            launch_survey(mask, packs, geometry.tile_q, geometry.tile_kv, given.pdl, given.stream)
            given = given._replace(pdl=Int32(1))  # whatever comes before, attention depends on the survey
        copied = Copied(q_maps, k_maps, Map(*v_map))
        arguments = (copied, packs, deal, results, given.softmax_scale, mask, (mma_qk, mma_pv))
        ctas = deal.ctas + tiles - deal.tiles
        if const_expr(geometry.policy.alone_if_long):
            if packs.rows[1] > Int64(LONG_KEYS) * sequences:
                self._attend(True, arguments, tiles, given)
            else:
                self._attend(False, arguments, ctas, given)
        else:
            self._attend(False, arguments, ctas, given)

    @cute.jit
    def _attend(self, alone: cutlass.Constexpr[bool], arguments: tuple, ctas: Int32, given):
        """Launch CTAs that take one query tile each, or ones that may take several."""
        launch(self.kernel(alone, *arguments), given, ctas, self.schedule.threads, self.geometry.shared_bytes)

    @cute.kernel
    def kernel(
        self,
        alone: cutlass.Constexpr[bool],
        copied: Copied,
        packs: Packs,
        deal: TileDeal,
        results: PrefillResults,
        softmax_scale: Float32,
        mask: KeyMask | None,
        mmas: tuple[cute.TiledMma, cute.TiledMma],
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(schedule, self._layouts(), self.dtype, base, barriers)
        if warp == 1:  # 0 loads: it looks for its tile meanwhile
            for found in (*copied.q, *copied.k, copied.v):
                cpasync.prefetch_descriptor(found.atom)
            barriers.init()
        cute.arch.griddepcontrol_wait()

        tile_of = functools.partial(
            query_tile,
            packs=packs,
            tile_q=geometry.tile_q,
            kv_row_bytes=geometry.kv_row_bytes,
            short_last=geometry.policy.short_last,
        )
        cta = cute.arch.block_idx()[0]
        causal = self.variant.causal if const_expr(mask is None) else mask.causal
        if const_expr(alone):
            tasks = Tasks(geometry, causal, packs.heads_per_kv_head, 1, one=tile_of(cta))
        else:
            numbers = numbers_of(deal, cta)
            table = cute.make_tensor(
                cute.recast_ptr(base + TASKS_AT, dtype=Int32), cute.make_layout((geometry.task_words, geometry.tasks))
            )
            tasks = Tasks(geometry, causal, packs.heads_per_kv_head, numbers.count, table, listed=mask is not None)
            if warp < numbers.count:
                tile = tile_of(
                    numbers.of(warp), alternating=deal.tiles, section_bytes=deal.section_bytes, one=deal.most == 1
                )
                with cute.arch.elect_one():
                    tasks.write(warp, tile, mask)
        cute.arch.sync_threads()
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == 0:
                load(copied, shared, geometry, tasks)
            if const_expr(schedule.widen_warps > 0):
                if warp > 0 and warp <= schedule.widen_warps:
                    widen_values(shared, warp - 1, schedule.widen_warps, tasks)
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            attend(self.variant, mmas, shared, tasks, results, softmax_scale, mask)

    def _layouts(self) -> Layouts:
        return layouts_of(self.geometry, self.schedule.attend_warpgroups, self.dtype)

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The products: scores = Q K^T with Q and K in shared memory; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        one = (1, 1, 1)
        qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv)
        )
        operands = map(numeric, Probabilities.of(self.variant.dtype, self.geometry.widens_values).operands)
        pv = hopper.make_trivial_tiled_mma(
            *operands, k_major, mn_major, Float32, one, (64, self.geometry.d_v), warpgroup.OperandSource.RMEM
        )
        return qk, pv
