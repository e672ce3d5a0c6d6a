"""Absorbed MLA decode over a paged cache for Hopper: host entry, kernel entry, and what its roles share.

One CTA per part of the plan walks its segments (`parts/decode_work.py`): 64 query rows against a range of KV tiles. Two
warpgroups attend, one warp loads by TMA, one wipes what lies beyond the visible keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from tsmla.plan import DEALS
from tsmla.variant import DecodeVariant

from ..geometry import BARRIER_BYTES, TILE_ALIGNMENT
from ..decode.combine import launch_combine
from ..decode.arguments import decode_arguments
from ..parts.partials import Partials, partials_of
from ..parts.pipeline import TmaEdge
from ..parts.precision import numeric
from ..parts.visible import Visibility
from ..schedule import WARPGROUP
from .decode_attend import attend
from .decode_deal import RING, WORDS, Dealt, deal, leave, take
from .decode_geometry import (
    BOX_ROWS,
    CLEAN_WARP,
    DEAL_WARP,
    DEALT_AT,
    GROUP_ROWS,
    LOAD_WARP,
    DecodeGeometry,
    DecodeSchedule,
)
from .decode_load import clean, load


class DecodeKernel:
    """Compiles one DecodeVariant. Run-time facts: lengths, heads, q_len, pages and their size, masks, parts, scales."""

    def __init__(self, variant: DecodeVariant):
        self.variant = variant
        self.geometry = DecodeGeometry.of(variant)
        self.schedule = DecodeSchedule.of(self.geometry)
        self.deal = DEALS[variant.arch]
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)

    def fake_arguments(self) -> tuple:
        """Arguments in calling order; the signature that decode kernels share."""
        return decode_arguments(self.variant)

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        causal_seqs: cute.Tensor,
        visible: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        workspace: cute.Tensor,
        softmax_scale: Float32,
        output_scale: Float32,
        causal: Int32,
        window_left: Int32,
        cp_world: Int32,
        cp_rank: Int32,
        cp_interleave: Int32,
        parts: Int32,
        stream,
    ):
        geometry = self.geometry
        mma_qk, mma_pv = self._mmas()
        layouts = self._layouts()
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        heads, q_len = query.shape[2], query.shape[1]
        rows = cute.make_tensor(
            query.iterator,
            cute.make_layout(
                (q_len * heads, geometry.d_qk, query.shape[0]),
                stride=(geometry.d_qk, 1, Int64(q_len * heads) * geometry.d_qk),
            ),
        )
        q_map = cpasync.make_tiled_tma_atom(load_op, rows, layouts.q, (geometry.tile_q, geometry.d_qk))
        halves = tuple(
            cpasync.make_tiled_tma_atom(
                load_op,
                _boxes(kv_cache, first, columns, geometry.chunk),
                layout,
                (geometry.chunk, GROUP_ROWS, columns // geometry.chunk, BOX_ROWS // GROUP_ROWS, 1),
            )
            for first, columns, layout in zip((0, geometry.d_half), geometry.half_columns, layouts.boxes, strict=True)
        )
        view = Visibility(seq_lens, causal_seqs, visible, q_len, causal, window_left, cp_world, cp_rank, cp_interleave)
        self.kernel(
            q_map[0], q_map[1], halves[0][0], halves[0][1], halves[1][0], halves[1][1],
            block_tables, view, out, lse, workspace, heads, kv_cache.shape[0], kv_cache.shape[1], parts,
            softmax_scale, output_scale, mma_qk, mma_pv,
        ).launch(
            grid=(parts, 1, 1),
            block=(self.schedule.threads, 1, 1),
            smem=geometry.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.variant.pdl,
        )  # fmt: skip
        launch_combine(
            self.deal, self.variant.pdl, view, heads, parts, workspace, out, lse, output_scale, stream
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q: cute.Tensor,
        left_atom: cute.CopyAtom,
        left: cute.Tensor,
        right_atom: cute.CopyAtom,
        right: cute.Tensor,
        block_tables: cute.Tensor,
        view: Visibility,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        workspace: cute.Tensor,
        heads: Int32,
        pages: Int32,
        page_size: Int32,
        parts: Int32,
        softmax_scale: Float32,
        output_scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for atom in (q_atom, left_atom, right_atom):
                cpasync.prefetch_descriptor(atom)
        shared = self._shared(self._layouts())
        if warp == 0:
            with cute.arch.elect_one():
                shared.q_edge.init()
                shared.dealt.edge.init()
                for edge in shared.kv_edges:
                    edge.init()
                for i in range(geometry.stages):
                    cute.arch.mbarrier_init(shared.landed + i, 2)
                for i in range(schedule.warps_per_group):
                    cute.arch.mbarrier_init(shared.exchanged + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.variant.pdl):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        partials = partials_of(self.deal, workspace, view.q_len * heads)
        results = Results(out, lse, partials, view.q_len * heads)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            number, edges = Int32(0), Int32(0)
            if warp == DEAL_WARP:
                deal(self.deal, shared.dealt, view, heads, parts, partials.slots)
            elif warp == LOAD_WARP:
                q_tiles = self._partition_q(q_atom, q, shared.q)
                halves = tuple(
                    self._partition_half(atom, source, target)
                    for atom, source, target in zip(
                        (left_atom, right_atom), (left, right), shared.kv_boxes, strict=True
                    )
                )
                task = take(shared.dealt, number)
                while task.more:
                    edges = load(q_tiles, halves, block_tables, shared, geometry, task, page_size, pages, edges)
                    leave(shared.dealt, number)
                    number += 1
                    task = take(shared.dealt, number)
            elif warp == CLEAN_WARP:
                task = take(shared.dealt, number)
                while task.more:
                    edges = clean(shared, geometry, task, edges)
                    leave(shared.dealt, number)
                    number += 1
                    task = take(shared.dealt, number)
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            scales = (softmax_scale, output_scale)
            for mine in cutlass.range_constexpr(2):
                if warp // (WARPGROUP // 32) == 1 + mine:
                    number = Int32(0)
                    task = take(shared.dealt, number)
                    while task.more:
                        attend(geometry, mine, (mma_qk, mma_pv), shared, view, number, task, heads, results, scales)
                        leave(shared.dealt, number)
                        number += 1
                        task = take(shared.dealt, number)

    def _partition_q(self, atom, q: cute.Tensor, shared: cute.Tensor):
        """(copy atom, tiles by row tile and request, shared tile)."""
        tiles = cute.local_tile(q, (self.geometry.tile_q, self.geometry.d_qk), (None, 0, None))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return atom, source, target

    def _partition_half(self, atom, half: cute.Tensor, shared: cute.Tensor):
        """(copy atom, boxes by place in the page and page, shared boxes by place in the tile and stage)."""
        geometry = self.geometry
        shape = (geometry.chunk, GROUP_ROWS, cute.size(shared, mode=[2]), BOX_ROWS // GROUP_ROWS, 1)
        tiles = cute.local_tile(half, shape, (0, 0, 0, None, None))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 5), cute.group_modes(tiles, 0, 5)
        )
        return atom, source, target

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Scores = Q K^T with both in shared memory; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        one = (1, 1, 1)
        qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv)
        )
        pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, mn_major, Float32, one, (64, self.geometry.d_half),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def _layouts(self) -> Layouts:
        """128-byte swizzled. A half of the cache tile lies in groups of 8 rows, each all of its chunks of 128 bytes, so
        that 16 rows of a page are one box whatever the page size, and descriptor strides are constant over the tile."""
        geometry = self.geometry
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        swizzle = atom.inner

        def composed(outer):
            return cute.make_composed_layout(swizzle, 0, outer)

        chunk = geometry.chunk
        pattern = GROUP_ROWS * chunk
        groups = geometry.tile_kv // GROUP_ROWS
        boxes, box_stages, keys, values, words, q_halves = [], [], [], [], [], []
        for columns in geometry.half_columns:
            chunks = columns // chunk
            stage = geometry.tile_kv * columns
            box_shape = (chunk, GROUP_ROWS, chunks, BOX_ROWS // GROUP_ROWS, 1)
            box_stride = (1, chunk, pattern, chunks * pattern, 0)
            rows, row_strides = (GROUP_ROWS, groups), (chunk, chunks * pattern)
            boxes.append(composed(cute.make_layout(box_shape, stride=box_stride)))
            box_stages.append(
                composed(
                    cute.make_layout(
                        (*box_shape, geometry.tile_kv // BOX_ROWS, geometry.stages),
                        stride=(*box_stride, BOX_ROWS * columns, stage),
                    )
                )
            )
            keys.append(
                composed(
                    cute.make_layout(
                        (rows, (chunk, chunks), geometry.stages), stride=(row_strides, (1, pattern), stage)
                    )
                )
            )
            values.append(
                composed(
                    cute.make_layout(
                        ((chunk, geometry.d_half // chunk), rows, geometry.stages),
                        stride=((1, pattern), row_strides, stage),
                    )
                )
            )
            words.append(
                cute.make_layout(
                    (4, rows, (8, chunks), geometry.stages),
                    stride=(1, (32, chunks * 32 * GROUP_ROWS), (4, 32 * GROUP_ROWS), stage * geometry.element_bytes // 4),
                )
            )
            q_halves.append(
                composed(
                    cute.make_layout(
                        ((GROUP_ROWS, geometry.tile_q // GROUP_ROWS), (chunk, chunks)),
                        stride=((chunk, pattern), (1, geometry.tile_q * chunk)),
                    )
                )
            )
        return Layouts(
            q=cute.tile_to_shape(atom, (geometry.tile_q, geometry.d_qk), order=(0, 1)),
            q_halves=tuple(q_halves),
            boxes=tuple(boxes),
            box_stages=tuple(box_stages),
            keys=tuple(keys),
            values=tuple(values),
            words=tuple(words),
        )

    def _shared(self, layouts: Layouts) -> Shared:
        """Carve up shared memory: barriers and row sums, Q, both rings, the exchange of probabilities."""
        geometry, schedule = self.geometry, self.schedule
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

        def tensor(offset, layout, dtype):
            pointer = cute.recast_ptr(base + offset, layout.inner, dtype)
            return cute.make_tensor(pointer, layout.outer)

        def plain(offset, layout, dtype):
            return cute.make_tensor(cute.recast_ptr(base + offset, dtype=dtype), layout)

        left = BARRIER_BYTES + geometry.q_bytes
        right = left + geometry.stages * geometry.half_bytes[0]
        halves = (left, right)
        exchange = right + geometry.stages * geometry.half_bytes[1]
        references = exchange + geometry.tile_q * geometry.tile_kv * 2
        row_sums = references + WARPGROUP * 8
        barriers = cute.recast_ptr(base, dtype=cutlass.Int64)
        ring = TmaEdge.barrier_count(geometry.stages)
        warps = schedule.warps_per_group
        vectors = geometry.tile_q * geometry.tile_kv // WARPGROUP // 8
        q_right = BARRIER_BYTES + geometry.tile_q * geometry.d_half * geometry.element_bytes
        return Shared(
            q=tensor(BARRIER_BYTES, layouts.q, self.dtype),
            q_halves=tuple(
                tensor(offset, layout, self.dtype)
                for offset, layout in zip((BARRIER_BYTES, q_right), layouts.q_halves, strict=True)
            ),
            k_halves=tuple(tensor(at, layout, self.dtype) for at, layout in zip(halves, layouts.keys, strict=True)),
            v_halves=tuple(tensor(at, layout, self.dtype) for at, layout in zip(halves, layouts.values, strict=True)),
            kv_boxes=tuple(
                tensor(at, layout, self.dtype) for at, layout in zip(halves, layouts.box_stages, strict=True)
            ),
            kv_words=tuple(plain(at, layout, Int32) for at, layout in zip(halves, layouts.words, strict=True)),
            exchange=plain(
                exchange, cute.make_layout((8, vectors, WARPGROUP), stride=(1, 8 * WARPGROUP, 8)), self.dtype
            ),
            references=plain(references, cute.make_layout((2, WARPGROUP)), Float32),
            row_sums=plain(row_sums, cute.make_layout((geometry.tile_q, 2, 2)), Float32),
            q_edge=TmaEdge(barriers, 1, geometry.q_bytes, 2 * warps),
            kv_edges=tuple(
                TmaEdge(barriers + 2 + half * ring, geometry.stages, geometry.half_bytes[half], warps)
                for half in range(2)
            ),
            landed=barriers + 2 + 2 * ring,
            landed_after=(2 * ring, ring),
            exchanged=barriers + 2 + 2 * ring + geometry.stages,
            dealt=Dealt(
                plain(DEALT_AT, cute.make_layout((WORDS, RING)), Int32),
                TmaEdge(
                    barriers + 2 + 2 * ring + geometry.stages + warps, RING, 0, schedule.warps_per_group * 2 + 2
                ),
            ),
        )


class Results(NamedTuple):
    """Where rows go; `rows` is q_len x heads."""

    out: cute.Tensor
    lse: cute.Tensor | None
    partials: Partials
    rows: Int32


class Layouts(NamedTuple):
    """Of shared memory; pairs are those of the two halves of a cache row."""

    q: cute.ComposedLayout
    q_halves: tuple
    boxes: tuple
    box_stages: tuple
    keys: tuple
    values: tuple
    words: tuple


class Shared(NamedTuple):
    """Tiles in shared memory, seen by the products (q_halves, k_halves, v_halves), by TMA (q, kv_boxes) and as 32-bit
    words; what the attending warpgroups exchange; the edges; where edge tiles land, in turns (also
    as 64-bit words after the first barrier of either ring); the warp pairs' barriers;
    the tasks."""

    q: cute.Tensor
    q_halves: tuple
    k_halves: tuple
    v_halves: tuple
    kv_boxes: tuple
    kv_words: tuple
    exchange: cute.Tensor
    references: cute.Tensor
    row_sums: cute.Tensor
    q_edge: TmaEdge
    kv_edges: tuple
    landed: cute.Pointer
    landed_after: tuple
    exchanged: cute.Pointer
    dealt: Dealt


def _boxes(cache: cute.Tensor, first: int, columns: int, chunk: int) -> cute.Tensor:
    """`columns` of the cache from `first` on as (chunk, 8 rows, chunks, groups of rows in a page, pages)."""
    pages, page_size, d_qk = cache.shape
    layout = cute.make_layout(
        (chunk, GROUP_ROWS, columns // chunk, page_size // GROUP_ROWS, pages),
        stride=(1, d_qk, chunk, GROUP_ROWS * d_qk, cache.stride[0]),
    )
    return cute.make_tensor(cache.iterator + first, layout)
