"""Ragged attention forward for Hopper: host entry, kernel entry, and what its roles share.

Warpgroup 0 loads Q, K and V by TMA (`load`); each other warpgroup attends 64 query rows (`attend`). Structure after
FlashAttention-3 (arXiv 2407.08608): warp specialisation, and within a warpgroup the score product of one KV tile
overlaps the value product of the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla.variant import PrefillVariant

from ..geometry import BARRIER_BYTES, TILE_ALIGNMENT, PrefillGeometry
from ..parts import tma
from ..parts.pipeline import TmaEdge
from ..parts.precision import numeric
from ..parts.seqlen import span_of
from ..parts.tile_scheduler import query_tile, tile_bound
from ..parts.work_range import work_range
from ..schedule import WARPGROUP, PrefillSchedule
from .prefill_attend import attend
from .prefill_load import load


class PrefillKernel:
    """Compiles one PrefillVariant. Run-time facts: lengths, head counts, strides, scales."""

    def __init__(self, variant: PrefillVariant):
        self.variant = variant
        self.geometry = PrefillGeometry.of(variant)
        self.schedule = PrefillSchedule.of(self.geometry)
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    def fake_arguments(self) -> tuple:
        """Arguments in calling order, shapes and strides symbolic: q, k, v, out, [lse], cum_seq_lens_q,
        cum_seq_lens_kv, softmax_scale, output_scale; the stream comes from the TVM-FFI environment."""

        def pack(rows, heads, dim, dtype):
            stride = tuple(cute.sym_int64(divisibility=8) for _ in range(2))
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
        mma_qk, mma_pv = self._mmas()
        layouts = self._shared_layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        q_map = cpasync.make_tiled_tma_atom(
            load_op, tma.rows_first(q), cute.select(layouts.q, mode=[0, 1]), (64, geometry.d_qk)
        )
        k_map = cpasync.make_tiled_tma_atom(
            load_op, tma.rows_first(k), cute.select(layouts.k, mode=[0, 1]), (geometry.tile_kv, geometry.d_qk)
        )
        v_map = cpasync.make_tiled_tma_atom(
            load_op,
            tma.clippable(tma.rows_first(v)),
            cute.select(layouts.v, mode=[0, 1]),
            (geometry.tile_kv, geometry.d_v),
        )
        out_map = cpasync.make_tiled_tma_atom(
            store_op, tma.clippable(tma.rows_first(out)), cute.select(layouts.out, mode=[0, 1]), (64, geometry.d_v)
        )
        heads = q.shape[1]
        tiles = tile_bound(q.shape[0], cum_seq_lens_q.shape[0] - 1, geometry.tile_q)
        self.kernel(
            q_map[0], q_map[1], k_map[0], k_map[1], v_map[0], v_map[1], out_map[0], out_map[1],
            lse, cum_seq_lens_q, cum_seq_lens_kv,
            heads, heads // k.shape[1], softmax_scale, output_scale, mma_qk, mma_pv,
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
        heads: Int32,
        heads_per_kv_head: Int32,
        softmax_scale: Float32,
        output_scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (q_atom, k_atom, v_atom, out_atom):
                cpasync.prefetch_descriptor(atom)
        shared = self._shared_tensors(self._shared_layouts())
        if warp == 0:
            with cute.arch.elect_one():
                shared.q_edge.init()
                shared.k_edge.init()
                shared.v_edge.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.variant.pdl):
            cute.arch.griddepcontrol_wait()

        tile = query_tile(
            cute.arch.block_idx()[0],
            cum_seq_lens_q,
            cum_seq_lens_kv,
            heads,
            heads_per_kv_head,
            geometry.tile_q,
            (geometry.d_qk + geometry.d_v) * geometry.element_bytes,
        )
        if tile.valid:
            span_q = span_of(cum_seq_lens_q, tile.sequence)
            span_kv = span_of(cum_seq_lens_kv, tile.sequence)
            first_row = tile.tile * geometry.tile_q
            work = work_range(
                first_row, geometry.tile_q, geometry.tile_kv, span_q.length, span_kv.length, self.variant.causal
            )
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(schedule.load_registers)
                if warp == 0:
                    load(
                        (q_atom, tma.head_rows(q, tile.head, span_q)),
                        (k_atom, tma.head_rows(k, tile.head // heads_per_kv_head, span_kv)),
                        (v_atom, tma.clipped_head_rows(v, tile.head // heads_per_kv_head, span_kv)),
                        shared,
                        geometry,
                        tile.tile,
                        work,
                    )
            else:
                cute.arch.setmaxregister_increase(schedule.attend_registers)
                attend(
                    self.variant,
                    (mma_qk, mma_pv),
                    shared,
                    (out_atom, tma.clipped_head_rows(out, tile.head, span_q)),
                    lse,
                    tile,
                    (span_q, span_kv),
                    work,
                    (softmax_scale, output_scale),
                )

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Scores = Q K^T with Q and K in shared memory; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        one = (1, 1, 1)
        qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv)
        )
        pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, mn_major, Float32, one, (64, self.geometry.d_v),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def _shared_layouts(self) -> SharedLayouts:
        """128-byte swizzled tiles, innermost dimension contiguous, last mode the stage (or the warpgroup).

        A warpgroup's output takes the place of its own Q slice, which the other warpgroup does not read.
        """
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)

        def tiles(rows, dim, count):
            return cute.tile_to_shape(atom, (rows, dim, count), order=(0, 1, 2))

        geometry, groups = self.geometry, self.schedule.attend_warpgroups
        one_out = cute.tile_to_shape(atom, (64, geometry.d_v), order=(0, 1))
        q_slices = cute.make_layout(groups, stride=64 * geometry.d_qk)
        return SharedLayouts(
            q=tiles(64, geometry.d_qk, groups),
            k=tiles(geometry.tile_kv, geometry.d_qk, geometry.stages),
            v=tiles(geometry.tile_kv, geometry.d_v, geometry.stages),
            out=cute.make_composed_layout(one_out.inner, one_out.offset, cute.append(one_out.outer, q_slices)),
        )

    def _shared_tensors(self, layouts: SharedLayouts) -> SharedTensors:
        """Carve up shared memory: barriers, Q (whose place each warpgroup's output takes), K ring, V ring."""
        geometry, schedule = self.geometry, self.schedule
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

        def tensor(offset, layout, dtype):
            pointer = cute.recast_ptr(base + offset, layout.inner, dtype)
            return cute.make_tensor(pointer, layout.outer)

        k_offset = BARRIER_BYTES + geometry.q_bytes
        v_offset = k_offset + geometry.stages * geometry.k_bytes
        barriers = cute.recast_ptr(base, dtype=cutlass.Int64)
        warps = schedule.attend_warps
        kv_words = TmaEdge.barrier_count(geometry.stages)
        return SharedTensors(
            q=tensor(BARRIER_BYTES, layouts.q, self.dtype),
            k=tensor(k_offset, layouts.k, self.dtype),
            v=tensor(v_offset, layouts.v, self.dtype),
            out=tensor(BARRIER_BYTES, layouts.out, self.out_dtype),
            q_edge=TmaEdge(barriers, 1, geometry.q_bytes, warps),
            k_edge=TmaEdge(barriers + 2, geometry.stages, geometry.k_bytes, warps),
            v_edge=TmaEdge(barriers + 2 + kv_words, geometry.stages, geometry.v_bytes, warps),
        )


class SharedLayouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    out: cute.ComposedLayout


class SharedTensors(NamedTuple):
    """Tiles as (rows, dim, stage or warpgroup) and the edges that fill them."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    q_edge: TmaEdge
    k_edge: TmaEdge
    v_edge: TmaEdge
