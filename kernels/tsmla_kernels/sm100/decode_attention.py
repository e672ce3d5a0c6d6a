"""The attention kernel of the Blackwell decode: launch, kernel entry, and what its roles share.

Output in 256 tensor-memory columns, two score tiles beside it, and separate warps for loads and products, after
CUTLASS's Blackwell MLA example (77). Unlike there, the softmax warps rescale the output themselves, which they seldom
need to, and no warp stands between them and the products.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from tsmla.support import LATENT_DIM, ROPE_DIM
from tsmla.variant import DecodeVariant

from ..geometry import TILE_ALIGNMENT, TMEM_COLUMNS
from ..parts import paged, tmem
from ..parts.decode_work import Terms, deal_work, first_unit, on_the_line, terms_of
from ..parts.partials import Partials
from ..parts.pipeline import ClusterEdge
from ..parts.precision import Probabilities, numeric
from ..parts.visible import Visibility
from .decode_finish import Results
from .decode_geometry import (
    EXCHANGE_OFFSET,
    ROWS,
    S_SLOTS,
    SWIZZLE,
    TENSOR_ADDRESS_OFFSET,
    DecodeGeometry,
    DecodeSchedule,
)
from .decode_load import KeyMaps, Map, load_keys, load_values
from .decode_mma import Products, multiply
from .decode_softmax import attend
from .decode_task import Task, is_leader


class Attention:
    """One variant's attention kernel with one geometry."""

    def __init__(self, variant: DecodeVariant, geometry: DecodeGeometry):
        self.variant = variant
        self.geometry = geometry
        self.schedule = DecodeSchedule()
        self.products = Products(variant.dtype, geometry)
        self.probabilities = Probabilities.of(variant.dtype)
        self.dtype = numeric(variant.dtype)

    @cute.jit
    def launch(
        self,
        query: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        view: Visibility,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: Partials,
        scale_log2: Float32,
        output_scale: Float32,
        parts: Int32,
        stream,
    ):
        """`parts` CTAs or pairs; the rest as `decode_arguments` has it, the softmax scale times log2(e)."""
        geometry = self.geometry
        batch, q_len, heads, _ = query.shape
        rows = q_len * heads
        load_op = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO if geometry.is_pair else CtaGroup.ONE)
        layouts = self._layouts()

        def query_map(first, width, chunks, layout):
            flat_rows = cute.make_layout((width, batch * rows, chunks), stride=(1, LATENT_DIM + ROPE_DIM, width))
            tensor = cute.make_tensor(query.iterator + first, flat_rows)
            return Map(*cpasync.make_tiled_tma_atom(load_op, tensor, layout, (width, ROWS, chunks)))

        def box_map(first, width, chunks, box_chunks, layout):
            boxes = paged.boxes_view(kv_cache, first, width, chunks)
            tiler = (width, paged.GROUP, box_chunks, paged.BOX_KEYS // paged.GROUP, 1)
            return Map(*cpasync.make_tiled_tma_atom(load_op, boxes, layout, tiler))

        def flat(tensor, *dims):
            return cute.make_tensor(tensor.iterator, cute.make_layout((batch * rows, *dims), stride=(*dims, 1)))

        wide, narrow, chunks = geometry.chunk, geometry.narrow, geometry.row_chunks
        has_narrow = const_expr(narrow > 0)
        maps = KeyMaps(
            q_wide=query_map(0, wide, chunks, layouts.q_wide),
            q_narrow=query_map(chunks * wide, narrow, 1, layouts.q_narrow) if has_narrow else None,
            k_wide=box_map(0, wide, chunks, geometry.k_chunks, layouts.k_box),
            k_narrow=box_map(chunks * wide, narrow, 1, 1, layouts.k_narrow_box) if has_narrow else None,
        )
        pair = const_expr(geometry.is_pair)
        v_map = box_map(0, wide, LATENT_DIM // wide, geometry.v_chunks, layouts.v_box) if pair else None
        flat_lse = flat(lse) if const_expr(lse is not None) else None
        results = Results(flat(out, LATENT_DIM), flat_lse, partials, output_scale)
        terms = terms_of(geometry.deal, batch, q_len, heads, parts, partials.slots)
        view = on_the_line(geometry.deal, view, terms)
        self.kernel(maps, v_map, kv_cache, block_tables, view, terms, results, scale_log2).launch(
            grid=(geometry.ctas * parts, 1, 1),
            block=(self.schedule.threads, 1, 1),
            cluster=(geometry.ctas, 1, 1),
            smem=geometry.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.variant.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        maps: KeyMaps,
        v_map: Map | None,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        view: Visibility,
        terms: Terms,
        results: Results,
        scale_log2: Float32,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        tensor_address = cute.recast_ptr(base + TENSOR_ADDRESS_OFFSET, dtype=Int32)
        edges = self._edges(base)
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, tensor_address, is_two_cta=geometry.is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=geometry.is_pair)
        if warp == schedule.key_warp:
            with cute.arch.elect_one():
                for edge in edges:
                    if const_expr(edge is not None):
                        edge.init()
            cute.arch.mbarrier_init_fence()
        _meet(geometry)
        shared = self._shared(base, edges, cute.make_tensor(tensor_address, 1)[0])
        if const_expr(self.variant.pdl):
            cute.arch.griddepcontrol_wait()
        part = cute.arch.make_warp_uniform(cute.arch.block_idx()[0] // geometry.ctas)
        work = deal_work(geometry.deal, view, terms, part)
        task = Task(kv_cache, block_tables, view, work, first_unit(geometry.deal, work, view))

        if warp < schedule.softmax_warps:
            attend(geometry, self.probabilities, shared, task, results, scale_log2)
        elif warp == schedule.mma_warp:
            if is_leader(geometry):
                multiply(self.products, shared, task)
        elif warp == schedule.key_warp:
            load_keys(shared, geometry, maps, task, results.partials.records)
        elif const_expr(geometry.is_pair):
            if warp == schedule.value_warp:
                load_values(shared, geometry, v_map, task)

        cute.arch.griddepcontrol_launch_dependents()
        # No CTA may leave while products, copies or arrivals still reach into it.
        tmem.fence_before()
        _meet(geometry)
        if warp == schedule.mma_warp:
            tmem.fence_after()
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_address)
            cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=geometry.is_pair)

    def _edges(self, base: cute.Pointer) -> Edges:
        geometry = self.geometry
        barriers = cute.recast_ptr(base, dtype=Int64)
        softmax_warps = geometry.ctas * self.schedule.softmax_warps
        stages_and_arrivals = {
            "q": (1, 1, 1),
            "k": (geometry.k_slots, 1, 1),
            "v": (geometry.v_slots, geometry.ctas, 1),
            "s": (S_SLOTS, 1, softmax_warps),
            "p": (geometry.p_slots, softmax_warps, 1),
        }
        edges, first = {}, 0
        for name, (stages, full, empty) in stages_and_arrivals.items():
            edges[name] = ClusterEdge(barriers + first, stages, geometry.ctas, full, empty) if stages else None
            first += ClusterEdge.barrier_count(stages)
        assert first * 8 <= TENSOR_ADDRESS_OFFSET
        return Edges(**edges)

    def _shared(self, base: cute.Pointer, edges: Edges, tmem_base: Int32) -> Shared:
        """Carve up shared memory; addresses for descriptors, swizzled pointers for bulk copies, words for lanes."""
        geometry = self.geometry
        layouts = self._layouts()

        def pointer(offset, swizzle):
            return cute.recast_ptr(base + offset, cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), self.dtype)

        def tile(offset, layout, swizzle=SWIZZLE):
            return cute.make_tensor(pointer(offset, swizzle), layout.outer)

        def words(offset, dtype=Int32):
            return cute.recast_ptr(base + offset, dtype=dtype)

        def address(offset):
            return base.toint() + offset

        narrow = geometry.narrow_bytes
        return Shared(
            q=address(geometry.q_offset),
            k=address(geometry.k_offset),
            k_narrow_at=address(geometry.k_narrow_offset),
            v=address(geometry.v_offset),
            p=address(geometry.p_offset),
            q_wide=tile(geometry.q_offset, layouts.q_wide),
            q_narrow=tile(geometry.q_offset + geometry.q_wide_bytes, layouts.q_narrow, narrow) if narrow else None,
            k_wide=tile(geometry.k_offset, layouts.k_box),
            k_narrow=tile(geometry.k_narrow_offset, layouts.k_narrow_box, narrow) if narrow else None,
            k_words=words(geometry.k_offset),
            v_wide=tile(geometry.v_offset, layouts.v_box) if geometry.is_pair else None,
            v_words=words(geometry.v_offset),
            p_words=words(geometry.p_offset),
            exchange=words(EXCHANGE_OFFSET, Float32),
            tmem_base=tmem_base,
            q_edge=edges.q,
            k_edge=edges.k,
            v_edge=edges.v,
            s_edge=edges.s,
            p_edge=edges.p,
        )

    def _layouts(self) -> Layouts:
        geometry = self.geometry
        groups = paged.BOX_KEYS // paged.GROUP

        def rows(swizzle, width, chunks):
            outer = cute.make_layout((width, ROWS, chunks), stride=(1, width, width * ROWS))
            return cute.make_composed_layout(cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), 0, outer)

        narrow = geometry.narrow > 0
        return Layouts(
            q_wide=rows(SWIZZLE, geometry.chunk, geometry.row_chunks),
            q_narrow=rows(geometry.narrow_bytes, geometry.narrow, 1) if narrow else None,
            k_box=paged.box_layout(SWIZZLE, geometry.chunk, geometry.k_chunks, groups),
            k_narrow_box=paged.box_layout(geometry.narrow_bytes, geometry.narrow, 1, groups) if narrow else None,
            v_box=paged.box_layout(SWIZZLE, geometry.chunk, geometry.v_chunks, groups),
        )


@cute.jit
def _meet(geometry: cutlass.Constexpr[DecodeGeometry]):
    """A barrier of all CTAs that work together."""
    if const_expr(geometry.is_pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


class Layouts(NamedTuple):
    """Of bulk copies' targets in shared memory."""

    q_wide: cute.ComposedLayout
    q_narrow: cute.ComposedLayout | None
    k_box: cute.ComposedLayout
    k_narrow_box: cute.ComposedLayout | None
    v_box: cute.ComposedLayout


class Edges(NamedTuple):
    q: ClusterEdge
    k: ClusterEdge
    v: ClusterEdge | None
    s: ClusterEdge
    p: ClusterEdge


class Shared(NamedTuple):
    """Addresses in shared memory (for descriptors), views of the same places, tensor memory, and who waits for whom.
    Solo there is no V."""

    q: Int32
    k: Int32
    k_narrow_at: Int32
    v: Int32
    p: Int32
    q_wide: cute.Tensor
    q_narrow: cute.Tensor | None
    k_wide: cute.Tensor
    k_narrow: cute.Tensor | None
    k_words: cute.Pointer
    v_wide: cute.Tensor | None
    v_words: cute.Pointer
    p_words: cute.Pointer
    exchange: cute.Pointer
    tmem_base: Int32
    q_edge: ClusterEdge
    k_edge: ClusterEdge
    v_edge: ClusterEdge | None
    s_edge: ClusterEdge
    p_edge: ClusterEdge
