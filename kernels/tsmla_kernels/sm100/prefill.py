"""Ragged attention forward for Blackwell: host entry, kernel entry, and what its roles share.

A CTA computes two tiles of 128 query rows of one head. Warpgroups 0 and 1 are the softmax of a tile each (`softmax`),
warpgroup 2 rescales and writes the output (`correct`), one warp issues the MMAs (`multiply`), one the copies (`load`).
Structure after FlashAttention-4 (arXiv 2603.05451): two query tiles in ping-pong, accumulators and probabilities in
tensor memory, correction apart from the softmax and rarely needed.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla.variant import PrefillVariant

from ..geometry import SM100_HEADER_BYTES, TILE_ALIGNMENT, Sm100PrefillGeometry
from ..parts import tma, tmem
from ..parts.division import quotient
from ..parts.pipeline import Signals, TmaEdge
from ..parts.precision import numeric
from ..parts.tile_scheduler import query_tile, tile_bound
from ..parts.work_range import work_range
from ..schedule import WARPGROUP, Sm100PrefillSchedule
from .prefill_correct import correct
from .prefill_load import load
from .prefill_mma import Products, multiply
from .prefill_softmax import softmax
from .prefill_work import tile_work


class PrefillKernel:
    """Compiles one PrefillVariant. Run-time facts: lengths, head counts, strides, scales."""

    def __init__(self, variant: PrefillVariant):
        self.variant = variant
        self.geometry = Sm100PrefillGeometry.of(variant)
        self.schedule = Sm100PrefillSchedule.of(variant)
        self.products = Products(variant, self.geometry)
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    def fake_arguments(self) -> tuple:
        """Arguments in calling order, shapes and strides symbolic: q, k, v, out, [lse], cum_seq_lens_q,
        cum_seq_lens_kv, softmax_scale, output_scale; the stream comes from the TVM-FFI environment."""

        def pack(rows, heads, dim, dtype):
            stride = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(2))
            return make_fake_tensor(dtype, (rows, heads, dim), (*stride, 1), assumed_align=16)

        rows_q, rows_kv, heads_q, heads_kv, ends = (cute.sym_int() for _ in range(5))
        variant = self.variant
        lse = make_fake_tensor(Float32, (rows_q, heads_q), (cute.sym_int64(), 1), assumed_align=4)
        cum_seq_lens = [make_fake_tensor(Int32, (ends,), (1,), assumed_align=4) for _ in range(2)]
        return (
            pack(rows_q, heads_q, variant.d_qk, self.dtype),
            pack(rows_kv, heads_kv, variant.d_qk, self.dtype),
            pack(rows_kv, heads_kv, variant.d_v, self.dtype),
            pack(rows_q, heads_q, variant.d_v, self.out_dtype),
            lse if variant.lse else None,
            *cum_seq_lens,
            Float32(1.0),
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        cum_seq_lens_q: cute.Tensor,
        cum_seq_lens_kv: cute.Tensor,
        softmax_scale: Float32,
        output_scale: Float32,
        stream,
    ):
        geometry = self.geometry
        layouts = self._shared_layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        slot, slot_shape = cute.select(layouts.ring, mode=[0, 1]), (geometry.rows, geometry.slot_elements)
        q_map = cpasync.make_tiled_tma_atom(load_op, tma.rows_first(q), slot, slot_shape)
        k_map = cpasync.make_tiled_tma_atom(load_op, tma.rows_first(k), slot, slot_shape)
        v_map = cpasync.make_tiled_tma_atom(load_op, tma.clippable(tma.rows_first(v)), slot, slot_shape)
        out_map = cpasync.make_tiled_tma_atom(
            store_op,
            tma.clippable(tma.rows_first(out)),
            cute.select(layouts.out, mode=[0, 1]),
            (geometry.rows, geometry.d_v),
        )
        heads = q.shape[1]
        tiles = tile_bound(q.shape[0], cum_seq_lens_q.shape[0] - 1, geometry.rows * geometry.query_tiles)
        self.kernel(
            q_map[0], q_map[1], k_map[0], k_map[1], v_map[0], v_map[1], out_map[0], out_map[1],
            lse, cum_seq_lens_q, cum_seq_lens_kv, (q.shape[0], k.shape[0]),
            heads, heads // k.shape[1], softmax_scale, output_scale,
        ).launch(
            grid=(tiles * heads, 1, 1),
            block=(self.schedule.threads, 1, 1),
            smem=geometry.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.variant.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q: cute.Tensor,
        k_atom: cute.CopyAtom,
        k: cute.Tensor,
        v_atom: cute.CopyAtom,
        v: cute.Tensor,
        out_atom: cute.CopyAtom,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        cum_seq_lens_q: cute.Tensor,
        cum_seq_lens_kv: cute.Tensor,
        rows: tuple[Int32, Int32],
        heads: Int32,
        heads_per_kv_head: Int32,
        softmax_scale: Float32,
        output_scale: Float32,
    ):
        geometry, schedule, variant = self.geometry, self.schedule, self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == schedule.load_warp:
            for atom in (q_atom, k_atom, v_atom, out_atom):
                cpasync.prefetch_descriptor(atom)
        shared = self._shared_tensors(self._shared_layouts())
        if warp == schedule.mma_warp:
            with cute.arch.elect_one():
                for edge in shared.edges():
                    edge.init()
            cute.arch.mbarrier_init_fence()
        if const_expr(variant.pdl):
            cute.arch.griddepcontrol_wait()

        cta_rows = geometry.rows * geometry.query_tiles
        tile = query_tile(
            cute.arch.block_idx()[0],
            cum_seq_lens_q,
            cum_seq_lens_kv,
            rows,
            heads,
            heads_per_kv_head,
            cta_rows,
            (geometry.d_qk + geometry.d_v) * geometry.element_bytes,
        )
        if tile.valid:
            if warp == schedule.correct_warpgroup * 4:
                cute.arch.alloc_tmem(geometry.tmem_columns, shared.tmem_base)
                cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.sync_threads()
            tmem.fence_after()
            base = shared.tmem_base[0]
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
                own = works[0]
                if index == 1:
                    own = works[1]
                softmax(
                    variant, geometry, schedule, shared, base, lse, tile.head, spans, work, own, index,
                    (softmax_scale, output_scale),
                )  # fmt: skip
            elif warp < schedule.mma_warp:
                cute.arch.setmaxregister_decrease(schedule.correct_registers)
                correct(
                    variant,
                    geometry,
                    shared,
                    base,
                    (out_atom, tma.clipped_head_rows(out, tile.head, tile.q)),
                    tile.tile,
                    works,
                    work.tiles,
                )
                if warp == schedule.correct_warpgroup * 4:
                    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_base)
                    cute.arch.dealloc_tmem(pointer, geometry.tmem_columns)
            else:
                cute.arch.setmaxregister_decrease(schedule.issue_registers)
                if work.tiles > 0:
                    if warp == schedule.mma_warp:
                        with cute.arch.elect_one():
                            multiply(self.products, shared, base, works, work.tiles)
                    if warp == schedule.load_warp:
                        kv_head = quotient(tile.head, heads_per_kv_head)
                        load(
                            (q_atom, tma.head_rows(q, tile.head, tile.q)),
                            (k_atom, tma.head_rows(k, kv_head, tile.kv)),
                            (v_atom, tma.clipped_head_rows(v, kv_head, tile.kv)),
                            shared,
                            geometry,
                            tile.tile,
                            work,
                        )

    def _shared_layouts(self) -> SharedLayouts:
        """Slots of (rows, 64 elements), swizzled over their whole width, last mode the slot; the output's tiles as
        (rows, d_v, query tile)."""
        geometry = self.geometry
        kinds = tcgen05.SmemLayoutAtomKind
        kind = {128: kinds.K_SW128, 64: kinds.K_SW64}[geometry.slot_elements * geometry.element_bytes]
        atom = tcgen05.make_smem_layout_atom(kind, self.dtype)
        out_atom = tcgen05.make_smem_layout_atom(kinds.K_SW128, self.out_dtype)

        def slots(number):
            return cute.tile_to_shape(atom, (geometry.rows, geometry.slot_elements, number), order=(0, 1, 2))

        one_out = cute.tile_to_shape(out_atom, (geometry.rows, geometry.d_v), order=(0, 1))
        pitch = geometry.q_pitch * geometry.slot_bytes // geometry.out_bytes
        tiles = cute.make_layout(geometry.query_tiles, stride=pitch)
        return SharedLayouts(
            q=slots(geometry.query_tiles * geometry.q_pitch),
            ring=slots(geometry.ring_slots),
            out=cute.make_composed_layout(one_out.inner, one_out.offset, cute.append(one_out.outer, tiles)),
        )

    def _shared_tensors(self, layouts: SharedLayouts) -> SharedTensors:
        """Carve up shared memory: barriers, tensor memory address, row factors; Q slots (outputs later); the ring."""
        geometry = self.geometry
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

        def tensor(offset, layout, dtype):
            pointer = cute.recast_ptr(base + offset, layout.inner, dtype)
            return cute.make_tensor(pointer, layout.outer)

        q_offset = SM100_HEADER_BYTES
        ring_offset = q_offset + geometry.query_tiles * geometry.q_pitch * geometry.slot_bytes
        factor_offset = SM100_HEADER_BYTES - geometry.query_tiles * geometry.rows * 4
        tmem_offset = factor_offset - 16
        barriers = cute.recast_ptr(base, dtype=cutlass.Int64)
        tiles = geometry.query_tiles
        q_words = TmaEdge.barrier_count(tiles)
        ring_words = TmaEdge.barrier_count(geometry.ring_slots)
        signals = barriers + q_words + ring_words
        warps = WARPGROUP // 32
        assert (q_words + ring_words + 5 * tiles) * 8 <= tmem_offset, geometry
        return SharedTensors(
            q=tensor(q_offset, layouts.q, self.dtype),
            ring=tensor(ring_offset, layouts.ring, self.dtype),
            out=tensor(q_offset, layouts.out, self.out_dtype),
            factors=cute.recast_ptr(base + factor_offset, dtype=Float32),
            tmem_base=cute.recast_ptr(base + tmem_offset, dtype=Int32),
            q_edge=TmaEdge(barriers, tiles, geometry.q_bytes, 1),
            ring_edge=TmaEdge(barriers + q_words, geometry.ring_slots, geometry.slot_bytes, 1),
            scores_full=Signals(signals, tiles, 1),
            probabilities_early=Signals(signals + tiles, tiles, 2 * warps),
            probabilities_late=Signals(signals + 2 * tiles, tiles, warps),
            factors_full=Signals(signals + 3 * tiles, tiles, warps),
            output_full=Signals(signals + 4 * tiles, tiles, 1),
        )


class SharedLayouts(NamedTuple):
    q: cute.ComposedLayout
    ring: cute.ComposedLayout
    out: cute.ComposedLayout


class SharedTensors(NamedTuple):
    """Tiles in shared memory, and who tells whom that they are ready.

    factors: per query tile and row, by what the correction multiplies the output: at each event after the first the
    rescale, at the end the inverse of the sum. No barrier of their own guards their reuse: the softmax writes the next
    factor after scores that the MMA warp started only when the correction had arrived for the one before, and waits
    for that arrival before it writes the last.
    """

    q: cute.Tensor
    ring: cute.Tensor
    out: cute.Tensor
    factors: cute.Pointer
    tmem_base: cute.Pointer
    q_edge: TmaEdge
    ring_edge: TmaEdge
    scores_full: Signals
    probabilities_early: Signals
    probabilities_late: Signals
    factors_full: Signals
    output_full: Signals

    def edges(self) -> tuple:
        return (
            self.q_edge, self.ring_edge, self.scores_full, self.probabilities_early, self.probabilities_late,
            self.factors_full, self.output_full,
        )  # fmt: skip
