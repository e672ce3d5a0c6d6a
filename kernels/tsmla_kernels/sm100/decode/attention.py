"""The attention kernel of the Blackwell decode: launch and kernel entry.

Output in 256 tensor-memory columns, two score tiles beside it, and separate warps for loads and products, after
CUTLASS's Blackwell MLA example (77). Unlike there, the softmax warps rescale the output themselves, which they seldom
need to, and no warp stands between them and the products.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from tsmla.identity.variant import DecodeVariant

from ...decode.line import Terms, deal_work, in_lanes, on_the_line, terms_of
from ...decode.partials import Partials
from ...decode.results import Results
from ...decode.segments import first_unit
from ...limits import TILE_ALIGNMENT, TMEM_COLUMNS
from ...parts.blackwell import tmem
from ...parts.blackwell.pair import meet
from ...parts.dependent_launch import launch
from ...parts.keys import paged
from ...parts.keys.listed import ListedKeys
from ...parts.keys.scales import RowScales
from ...parts.keys.source import BOX_KEYS, KeySource, key_source
from ...parts.keys.visible import Visibility
from ...parts.pipeline import Barriers
from ...parts.precision import Probabilities
from ...parts.query import Map, Query, QueryRows, query_of, query_rows
from ...parts.row_end import Ending, log_sums_of
from .assignment import Assignment, is_leader
from .geometry import LARGE_KEYS, TENSOR_ADDRESS_OFFSET, DecodeGeometry
from .keys.convert import convert_keys
from .keys.gather import gather_keys, gather_values, tell_rows
from .keys.load import KeyMaps, Maps, load_keys, load_queries, load_values
from .keys.scales import load_listed_scales, load_scales
from .mma import Products, multiply
from .schedule import START_BARRIER, DecodeSchedule
from .softmax import attend
from .storage import Shared, layouts_of, shared_of


class AttentionKernel:
    """The attention kernel of one variant with one geometry."""

    def __init__(self, variant: DecodeVariant, geometry: DecodeGeometry):
        self.geometry = geometry
        self.schedule = DecodeSchedule(geometry)
        self.probabilities = Probabilities.of(variant.dtype)
        self.products = Products(self.probabilities, geometry)

    @cute.jit
    def launch(
        self,
        given,
        source: KeySource | ListedKeys,
        view: Visibility,
        partials: Partials,
        scale_log2: Float32,
        ending: Ending,
    ):
        """Launch attention on `given.workers` CTAs or pairs. given: what the call's table lists, by name; `scale_log2`
        is its softmax scale times log2(e)."""
        geometry = self.geometry
        batch, q_len, heads, _ = given.query.shape
        rows = batch * q_len * heads
        load_op = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO if geometry.is_pair else CtaGroup.ONE)
        layouts = layouts_of(geometry)

        apart = geometry.row.apart
        rope_cache, rope_column = given.kv_cache, geometry.row_chunks * geometry.chunk
        if const_expr(apart):
            rope_cache, rope_column = given.rope_cache, 0

        def box_maps(cache, first, width, chunks, box_chunks, small, large):
            boxes = paged.boxes_view(cache, first, width, chunks, apart)

            def of(keys, layout):
                tiler = (width, paged.GROUP, box_chunks, keys // paged.GROUP, 1)
                return Map(*cpasync.make_tiled_tma_atom(load_op, boxes, layout, tiler))

            return Maps(of(BOX_KEYS, small), of(LARGE_KEYS, large) if geometry.is_pair else None)

        wide, tail, chunks = geometry.chunk, geometry.tail, geometry.row_chunks
        has_tail = const_expr(tail > 0)
        query = query_of(query_rows(given, geometry.query_tile), geometry.query_tile, load_op)
        maps, v_maps, values = KeyMaps(None, None), None, geometry.row.value_columns
        if const_expr(not (geometry.converts or geometry.gathers)):
            maps = KeyMaps(
                box_maps(given.kv_cache, 0, wide, chunks, geometry.k_chunks, layouts.k_box, layouts.k_large),
                box_maps(rope_cache, rope_column, tail, 1, 1, layouts.k_tail_box, layouts.k_tail_large)
                if has_tail
                else None,
            )
            if const_expr(geometry.is_pair):
                v_chunks = geometry.v_chunks
                v_maps = box_maps(given.kv_cache, 0, wide, values // wide, v_chunks, layouts.v_box, layouts.v_large)
        scales = RowScales(given.scale_cache, given.query_scales) if const_expr(geometry.row.scales) else None
        out = cute.make_tensor(given.out.iterator, cute.make_layout((rows, values), stride=(values, 1)))
        results = Results(out, log_sums_of(given.lse), partials, ending)
        terms = terms_of(geometry.deal, view, heads, given.workers, partials.slots)
        view = on_the_line(geometry.deal, view, terms)
        listed = source if const_expr(geometry.gathers) else source.table
        kernel = self.kernel(query, maps, v_maps, given.kv_cache, scales, listed, view, terms, results, scale_log2)
        ctas = geometry.ctas * given.workers
        launch(kernel, given, ctas, self.schedule.threads, geometry.shared_bytes, geometry.ctas)

    @cute.kernel
    def kernel(
        self,
        query: Query,
        maps: KeyMaps,
        v_maps: Maps | None,
        kv_cache: cute.Tensor,
        scales: RowScales | None,
        listed: ListedKeys | cute.Tensor,
        view: Visibility,
        terms: Terms,
        results: Results,
        scale_log2: Float32,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        tensor_address = cute.recast_ptr(base + TENSOR_ADDRESS_OFFSET, dtype=Int32)
        barriers = Barriers(schedule.edges, base)
        if warp == schedule.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, tensor_address, is_two_cta=geometry.is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=geometry.is_pair)
        if warp == schedule.key_warp:
            barriers.init()
            of_keys = [each for both in (maps.k_wide, maps.k_tail, v_maps) if both is not None for each in both]
            for copied in (*query.maps, *of_keys):
                if const_expr(copied is not None):
                    cpasync.prefetch_descriptor(copied.atom)
        # CTAs of a pair need each other, and tensor memory, only when work is dealt. Solo, the warp that has made the
        # barriers waits for nobody.
        if const_expr(geometry.is_pair):
            cute.arch.cluster_arrive()
        elif warp == schedule.key_warp:
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=schedule.threads)
        else:
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=schedule.threads)
        cute.arch.griddepcontrol_wait()
        start = (barriers, base, kv_cache, listed, view, terms)
        if const_expr(geometry.converts or geometry.gathers):
            self._bring_and_attend(warp, start, query, scales, results, scale_log2)
        else:
            self._load_and_attend(warp, start, query, maps, v_maps, scales, results, scale_log2)

        # No CTA may leave while products, copies or arrivals still reach into it.
        tmem.fence_before()
        meet(geometry.is_pair)
        if warp == schedule.mma_warp:
            tmem.fence_after()
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tensor_address)
            cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=geometry.is_pair)

    def _started(
        self,
        barriers: Barriers,
        base: cute.Pointer,
        kv_cache: cute.Tensor,
        listed: ListedKeys | cute.Tensor,
        view: Visibility,
        terms: Terms,
    ) -> tuple[Shared, Assignment]:
        """Shared memory, and what there is to do, once all CTAs that work together are there. Roles that use tensor
        memory also call `_with_tensor_memory`."""
        geometry = self.geometry
        worker = cute.arch.make_warp_uniform(cute.arch.block_idx()[0] // geometry.ctas)
        work = deal_work(geometry.deal, view, terms, worker)
        source = listed if geometry.gathers else key_source(kv_cache, listed)
        first = first_unit(geometry.deal, work)
        assignment = Assignment(kv_cache, source, work, first)
        if const_expr(geometry.converts or geometry.q_held > 0):
            assignment = assignment._replace(work=in_lanes(work))
        if const_expr(geometry.is_pair):
            cute.arch.cluster_wait()
        return shared_of(geometry, base, barriers, Int32(0)), assignment

    def _with_tensor_memory(self, shared: Shared, base: cute.Pointer) -> Shared:
        """Add the address of tensor memory, for warps that have waited until it is allocated: the one that loads keys,
        solo, has not."""
        tensor_address = cute.recast_ptr(base + TENSOR_ADDRESS_OFFSET, dtype=Int32)
        return shared._replace(tmem_base=cute.make_tensor(tensor_address, 1)[0])

    @cute.jit
    def _load_and_attend(
        self,
        warp: Int32,
        start: tuple,
        query: Query,
        maps: KeyMaps,
        v_maps: Maps | None,
        scales: RowScales | None,
        results: Results,
        scale_log2: Float32,
    ):
        """Run the roles where products read rows as they are stored."""
        geometry, schedule = self.geometry, self.schedule
        shared, assignment = self._started(*start)
        if warp < schedule.softmax_warps:
            shared = self._with_tensor_memory(shared, start[1])
            attend(geometry, self.probabilities, shared, assignment, scales, results, scale_log2)
        elif warp == schedule.mma_warp:
            if is_leader(geometry):
                multiply(self.products, self._with_tensor_memory(shared, start[1]), assignment)
        elif warp == schedule.key_warp:
            load_keys(shared, geometry, query, maps, assignment, results.partials.records)
            # The combine's CTAs may come now. Earlier, all would go where CTAs leave first: to few SMs.
            cute.arch.griddepcontrol_launch_dependents()
        elif const_expr(geometry.is_pair):
            if warp == schedule.value_warp:
                load_values(shared, geometry, v_maps, assignment)
        if const_expr(geometry.row.scales):
            if warp == schedule.scale_warp:
                load_scales(shared, geometry, scales.keys, assignment)

    @cute.jit
    def _bring_and_attend(
        self,
        warp: Int32,
        start: tuple,
        query: Query,
        scales: RowScales | None,
        results: Results,
        scale_log2: Float32,
    ):
        """Run the roles where warps convert or gather rows. Each asks on its own what there is to do, behind the move
        of registers: numbers that live across it must be in registers that all roles have, and ptxas spills them."""
        geometry, schedule = self.geometry, self.schedule
        if warp < schedule.softmax_warps:
            cute.arch.setmaxregister_increase(schedule.registers.attend)
            shared, assignment = self._started(*start)
            shared = self._with_tensor_memory(shared, start[1])
            attend(geometry, self.probabilities, shared, assignment, scales, results, scale_log2)
        elif warp < schedule.first_bring_warp:
            cute.arch.setmaxregister_decrease(schedule.registers.issue)
            shared, assignment = self._started(*start)
            if warp == schedule.mma_warp:
                if is_leader(geometry):
                    multiply(self.products, self._with_tensor_memory(shared, start[1]), assignment)
            elif warp == schedule.query_warp:
                load_queries(shared, geometry, query, assignment, results.partials.records)
            elif const_expr(geometry.gathers):
                if warp == schedule.tell_warp:
                    tell_rows(shared, geometry, assignment)
                if const_expr(geometry.row.scales):
                    if warp == schedule.scale_warp:
                        load_listed_scales(shared, geometry, scales.keys, assignment)
        elif const_expr(geometry.converts):
            cute.arch.setmaxregister_increase(schedule.registers.bring)
            shared, assignment = self._started(*start)
            convert_keys(shared, geometry, warp - schedule.first_bring_warp, assignment)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_decrease(schedule.registers.bring)
            shared, assignment = self._started(*start)
            if const_expr(geometry.q_held > 0):
                shared = self._with_tensor_memory(shared, start[1])
            self._gather(warp - schedule.first_bring_warp, shared, assignment, query.rows)
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _gather(self, warp: Int32, shared: Shared, assignment: Assignment, query: QueryRows):
        geometry, warps = self.geometry, len(self.schedule.gather_keys.warps)
        if const_expr(geometry.is_pair):
            if warp < warps:
                gather_keys(shared, geometry, warp, warps, assignment, query)
            else:
                gather_values(shared, geometry, warp - warps, warps, assignment)
        else:
            gather_keys(shared, geometry, warp, warps, assignment, query)
