"""Ragged attention forward for Hopper: host entry, kernel entry, and what its roles share.

Warpgroup 0 loads Q, K and V by TMA (`load`) and transposes 8-bit values (`transpose_values`); each other warpgroup
attends 64 query rows (`attend`). Structure after FlashAttention-3 (arXiv 2407.08608): warp specialisation, and within a
warpgroup the score product of one KV tile overlaps the value product of the one before.
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

from ..geometry import BARRIER_BYTES, TILE_ALIGNMENT, PrefillGeometry, swizzle_bytes
from ..parts import tma
from ..parts.division import quotient
from ..parts.pipeline import TmaEdge, WarpEdge
from ..parts.precision import Probabilities, numeric
from ..parts.tile_scheduler import query_tile, tile_bound
from ..parts.work_range import work_range
from ..schedule import WARPGROUP, PrefillSchedule
from .prefill_attend import attend
from .prefill_load import load
from .prefill_transpose import transpose_values

_SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


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
            lse, cum_seq_lens_q, cum_seq_lens_kv, (q.shape[0], k.shape[0]),
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
        rows: tuple[Int32, Int32],
        heads: Int32,
        heads_per_kv_head: Int32,
        softmax_scale: Float32,
        output_scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._shared_tensors(self._shared_layouts())
        if warp == 1:  # 0 loads: it looks for its tile meanwhile
            for atom in (q_atom, k_atom, v_atom, out_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                shared.q_edge.init()
                shared.k_edge.init()
                shared.v_edge.init()
                if const_expr(geometry.transposes_values):
                    shared.values_edge.init()
            cute.arch.mbarrier_init_fence()
        if const_expr(self.variant.pdl):
            cute.arch.griddepcontrol_wait()

        tile = query_tile(
            cute.arch.block_idx()[0],
            cum_seq_lens_q,
            cum_seq_lens_kv,
            rows,
            heads,
            heads_per_kv_head,
            geometry.tile_q,
            (geometry.d_qk + geometry.d_v) * geometry.element_bytes,
        )
        cute.arch.sync_threads()
        if tile.valid:
            first_row = tile.tile * geometry.tile_q
            work = work_range(
                first_row, geometry.tile_q, geometry.tile_kv, tile.q.length, tile.kv.length, self.variant.causal
            )
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(schedule.load_registers)
                if warp == 0:
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
                if const_expr(schedule.transpose_warps > 0):
                    if warp > 0 and warp <= schedule.transpose_warps:
                        transpose_values(shared, warp - 1, schedule.transpose_warps, work)
            else:
                cute.arch.setmaxregister_increase(schedule.attend_registers)
                attend(
                    self.variant,
                    (mma_qk, mma_pv),
                    shared,
                    (out_atom, tma.clipped_head_rows(out, tile.head, tile.q)),
                    lse,
                    tile,
                    work,
                    (softmax_scale, output_scale),
                )

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Scores = Q K^T with Q and K in shared memory; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        v_major = k_major if self.geometry.transposes_values else mn_major
        one = (1, 1, 1)
        qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv)
        )
        probability = numeric(Probabilities.of(self.variant.dtype).dtype)
        pv = hopper.make_trivial_tiled_mma(
            probability, self.dtype, k_major, v_major, Float32, one, (64, self.geometry.d_v),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def _shared_layouts(self) -> SharedLayouts:
        """Swizzled tiles, innermost dimension contiguous, last mode the stage (or the warpgroup).

        A warpgroup's output takes the place of its own Q slice, which the other warpgroup does not read.
        """

        def tile(rows, dim, dtype):
            atom = warpgroup.make_smem_layout_atom(_SWIZZLES[swizzle_bytes(dim * dtype.width // 8)], dtype)
            return cute.tile_to_shape(atom, (rows, dim), order=(0, 1))

        def repeated(layout, count, stride):
            steps = cute.make_layout(count, stride=stride)
            return cute.make_composed_layout(layout.inner, layout.offset, cute.append(layout.outer, steps))

        geometry, groups, dtype = self.geometry, self.schedule.attend_warpgroups, self.dtype
        tile_kv, d_qk, d_v, stages = geometry.tile_kv, geometry.d_qk, geometry.d_v, geometry.stages
        slot = geometry.q_slot_bytes
        return SharedLayouts(
            q=repeated(tile(64, d_qk, dtype), groups, slot * 8 // dtype.width),
            k=repeated(tile(tile_kv, d_qk, dtype), stages, tile_kv * d_qk),
            v=repeated(tile(tile_kv, d_v, dtype), stages, tile_kv * d_v),
            values=repeated(tile(d_v, tile_kv, dtype), stages, tile_kv * d_v),
            out=repeated(tile(64, d_v, self.out_dtype), groups, slot * 8 // self.out_dtype.width),
        )

    def _shared_tensors(self, layouts: SharedLayouts) -> SharedTensors:
        """Carve up shared memory: barriers, Q (whose place each warpgroup's output takes), K ring, V ring, and the ring
        of transposed values."""
        geometry, schedule = self.geometry, self.schedule
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

        def tensor(offset, layout, dtype):
            pointer = cute.recast_ptr(base + offset, layout.inner, dtype)
            return cute.make_tensor(pointer, layout.outer)

        groups = schedule.attend_warpgroups
        k_offset = BARRIER_BYTES + groups * geometry.q_slot_bytes
        v_offset = k_offset + geometry.stages * geometry.k_bytes
        barriers = cute.recast_ptr(base, dtype=cutlass.Int64)
        warps, transposers = schedule.attend_warps, schedule.transpose_warps
        q_words, kv_words = TmaEdge.barrier_count(groups), TmaEdge.barrier_count(geometry.stages)
        v = tensor(v_offset, layouts.v, self.dtype)
        v_edge = TmaEdge(barriers + q_words + kv_words, geometry.stages, geometry.v_bytes, transposers or warps)
        if const_expr(geometry.transposes_values):
            values = tensor(v_offset + geometry.stages * geometry.v_bytes, layouts.values, self.dtype)
            values_edge = WarpEdge(barriers + q_words + 2 * kv_words, geometry.stages, transposers, warps)
        else:
            values = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 0, 2]))
            values_edge = v_edge
        return SharedTensors(
            q=tensor(BARRIER_BYTES, layouts.q, self.dtype),
            k=tensor(k_offset, layouts.k, self.dtype),
            v=v,
            values=values,
            out=tensor(BARRIER_BYTES, layouts.out, self.out_dtype),
            q_edge=TmaEdge(barriers, groups, geometry.q_bytes // groups, warps // groups),
            k_edge=TmaEdge(barriers + q_words, geometry.stages, geometry.k_bytes, warps),
            v_edge=v_edge,
            values_edge=values_edge,
        )


class SharedLayouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    values: cute.ComposedLayout
    out: cute.ComposedLayout


class SharedTensors(NamedTuple):
    """Tiles as (rows, dim, stage or warpgroup) and the edges that fill them.

    `values` are V's tiles as (dim, rows, stage): transposed copies when V has 8 bits, else `v` itself, on its edge.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    values: cute.Tensor
    out: cute.Tensor
    q_edge: TmaEdge
    k_edge: TmaEdge
    v_edge: TmaEdge
    values_edge: TmaEdge | WarpEdge
