"""Absorbed MLA decode over a paged cache for Hopper: host entry and kernel entry.

Each worker of the plan is one CTA, which walks its segments (`parts/decode_work.py`): 64 query rows against a range of
KV tiles. Two warpgroups attend, two warps load by TMA, one wipes what lies beyond the visible keys."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from tsmla.call import DECODE
from tsmla.plan import DEALS
from tsmla.variant import DecodeVariant

from ...decode.combine import launch_combine
from ...entry import host_entry
from ...limits import TILE_ALIGNMENT, WARPGROUP
from ...parts.decode_line import Terms, on_the_line, terms_of
from ...parts.key_source import BOX_KEYS, KeySource, key_source, visibility_in
from ...parts.paged import boxes_view
from ...parts.partials import Partials, partials_of
from ...parts.pipeline import Barriers
from ...parts.precision import PartialRows, Probabilities, numeric
from ...parts.query import Query, query_of, query_rows
from ...parts.row_end import Ending, LogSums, ending_of, log_sums_of
from ...parts.row_scales import RowScales
from ...parts.visible import Visibility, hides, varies
from ..few_rows.kernel import FewRowsKernel
from .attend import attend
from .clean import bring_scales_and_clean, clean
from .convert import convert
from .convert_pair import convert_for_both
from .deal import deal
from .forms import FEW_ROWS, ONE_CTA, PAIR_OF_CTAS, WARP_PRODUCTS, form_of_few_rows, forms_of
from .geometry import LOAD_WARPS, PAIR, PATTERN_COLUMNS, DecodeGeometry
from .load import load
from .results import Results
from .schedule import CLEAN_WARP, DEAL_WARP, DecodeSchedule
from .storage import Shared, box_layout, box_shape, layouts_of, partition, shared_of, stages_layout
from .stored import partition_stored, stored_maps
from .task import take, take_next
from .transpose import transpose_values

PAIRED_UNITS = 8
"""CTAs work in pairs only if more than one group in this many has a unit: below, single CTAs are 1 to 3 % faster."""


class DecodeKernel:
    """The Hopper decode of one variant. Run-time facts: lengths, heads, q_len, pages and their size, masks, workers,
    scales."""

    def __init__(self, variant: DecodeVariant):
        self.variant = variant
        self.forms = forms_of(variant)
        self.of_few_rows = form_of_few_rows(variant)
        self.geometry = self.forms[ONE_CTA]
        self.schedule = DecodeSchedule.of(self.geometry)
        self.deal = DEALS[variant.arch]
        self.probabilities = Probabilities.of(self.geometry.row.piece("latent").dtype)
        self.out_dtype = numeric(variant.out_dtype)
        self.warp_products = None
        if WARP_PRODUCTS in self.forms:
            self.warp_products = FewRowsKernel(self.forms[WARP_PRODUCTS], self.deal)

    __call__ = host_entry(DECODE)

    @cute.jit
    def launch(self, given):
        """Make tensor maps and the deal, and launch attention and combine. given: what the call's table lists, by name.
        """
        geometry = self.geometry
        ending = ending_of(given, given.query.shape[2])
        mma_qk, mma_rope, mma_pv = self._mmas()
        layouts = layouts_of(geometry)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        batch, q_len, heads, _ = given.query.shape
        query = query_of(query_rows(given, geometry.query_tile), geometry.query_tile, load_op)
        source = key_source(given.kv_cache, given.block_tables)
        scales = None
        scales_box = scales_tile = (None, None)
        if const_expr(geometry.converts):
            (latent_box, rope_box, scales_box), (latent_tile, rope_tile, scales_tile) = (
                stored_maps(geometry, given.kv_cache, layouts, load_op, keys) for keys in (BOX_KEYS, geometry.tile_kv)
            )
        else:
            if const_expr(geometry.scaled):
                latent_chunks = self.variant.row.value_columns // PATTERN_COLUMNS
                latent = boxes_view(given.kv_cache, 0, PATTERN_COLUMNS, latent_chunks, True)
                rope = boxes_view(given.rope_cache, 0, PATTERN_COLUMNS, geometry.strips[-1] // PATTERN_COLUMNS, True)
                scales = RowScales(given.scale_cache, given.query_scales)
            else:
                latent = rope = boxes_view(given.kv_cache, 0, PATTERN_COLUMNS, geometry.d_qk // PATTERN_COLUMNS)
            (latent_box, latent_tile), (rope_box, rope_tile) = (
                [
                    cpasync.make_tiled_tma_atom(
                        load_op,
                        keys,
                        cute.make_composed_layout(layouts.swizzles[strip], 0, box_layout(geometry.strips[strip], rows)),
                        box_shape(geometry.strips[strip], rows),
                    )
                    for rows in (BOX_KEYS, geometry.tile_kv)
                ]
                for keys, strip in ((latent, 0), (rope, -1))
            )
        view = visibility_in(source, given)
        arguments = (
            query, *latent_box, *latent_tile, *rope_box, *rope_tile, *scales_box, *scales_tile, source,
            ending, scales, mma_qk, mma_rope, mma_pv,
        )  # fmt: skip
        if const_expr(self.of_few_rows == ONE_CTA):
            self._launch(given, view, arguments, ONE_CTA)
        else:
            # What takes a call must not depend on the other requests of a batch.
            if (q_len * heads <= FEW_ROWS) & (given.batch_invariant == 0) & (view.vary == 0):
                self._launch(given, view, arguments, self.of_few_rows)
            else:
                self._launch(given, view, arguments, ONE_CTA)

    @cute.jit
    def _launch(self, given, view: Visibility, arguments: tuple, form: cutlass.Constexpr[str]):
        """Launch attention and combine. form: what takes the call; ONE_CTA becomes PAIR_OF_CTAS where the call's CTAs
        come in pairs."""
        query, *maps, source, ending, scales, mma_qk, mma_rope, mma_pv = arguments
        kept = self.forms[form].partial_rows
        partials, terms, view = self._dealt(given, view, kept)
        lse = log_sums_of(given.lse)
        told = (
            source.table, view, terms, given.out, lse, partials, source.pages, source.page_size,
            given.softmax_scale, ending,
        )  # fmt: skip
        arguments = (query, *maps, *told, scales, mma_qk, mma_rope, mma_pv)
        if const_expr(form == WARP_PRODUCTS):
            rope_cache = None
            if const_expr(self.geometry.scaled):
                rope_cache = given.rope_cache
            self.warp_products.launch(
                query.rows, given.kv_cache, rope_cache, scales, told, given.parts, given.pdl, given.stream
            )
        elif varies(view):
            self._attend(True, form, (*arguments, None), given)
        else:
            paired = Boolean(False)
            if const_expr(PAIR_OF_CTAS in self.forms):
                paired = self._comes_in_pairs(given.query.shape[2], terms)
                if paired:
                    self._attend(False, PAIR_OF_CTAS, (*arguments, given.kv_cache), given)
            if not paired:
                self._attend(False, form, (*arguments, None), given)
        launch_combine(partials, given.out, lse, ending, given.stream, kept, in_chunks=True)

    @cute.jit
    def _dealt(self, given, view: Visibility, kept: cutlass.Constexpr[PartialRows]):
        """Where partial results go that are `kept` so, the terms of the deal, and what is visible within its bounds."""
        partials = partials_of(self.variant.row.value_columns, Int32(self.deal.row_tile), given, view, kept)
        terms = terms_of(self.deal, view, given.query.shape[2], given.parts, partials.slots)
        return partials, terms, on_the_line(self.deal, view, terms)

    def _comes_in_pairs(self, heads: Int32, terms: Terms) -> Boolean:
        """Whether CTAs with neighbouring numbers have row tiles of one query token, and so the same keys. With few
        requests for the GPU, single CTAs are done sooner by 1 to 3 %."""
        alike = heads % (PAIR * self.deal.row_tile) == 0
        even = (terms.group.value % PAIR == 0) & (terms.workers.value % PAIR == 0)
        return alike & even & (terms.units * PAIRED_UNITS > terms.groups)

    @cute.jit
    def _attend(
        self, varying: cutlass.Constexpr[bool], form: cutlass.Constexpr[str], arguments: tuple, given
    ):
        """Launch attention in one of its forms: for requests that vary in query tokens, or for all others."""
        geometry = self.forms[form]
        self.kernel(varying, form, *arguments).launch(
            grid=(given.parts, 1, 1),
            block=(DecodeSchedule.of(geometry).threads, 1, 1),
            cluster=(geometry.ctas, 1, 1) if geometry.ctas > 1 else None,
            smem=geometry.shared_bytes,
            stream=given.stream,
            min_blocks_per_mp=1,
            use_pdl=given.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        varying: cutlass.Constexpr[bool],
        form: cutlass.Constexpr[str],
        query: Query,
        latent_box_atom: cute.CopyAtom,
        latent_box: cute.Tensor,
        latent_tile_atom: cute.CopyAtom,
        latent_tile: cute.Tensor,
        rope_box_atom: cute.CopyAtom,
        rope_box: cute.Tensor,
        rope_tile_atom: cute.CopyAtom,
        rope_tile: cute.Tensor,
        scales_box_atom: cute.CopyAtom | None,
        scales_box: cute.Tensor | None,
        scales_tile_atom: cute.CopyAtom | None,
        scales_tile: cute.Tensor | None,
        block_tables: cute.Tensor,
        view: Visibility,
        terms: Terms,
        out: cute.Tensor,
        lse: LogSums | None,
        partials: Partials,
        pages: Int32,
        page_size: Int32,
        softmax_scale: Float32,
        ending: Ending,
        scales: RowScales | None,
        mma_qk: cute.TiledMma,
        mma_rope: cute.TiledMma | None,
        mma_pv: cute.TiledMma,
        cache: cute.Tensor | None,
    ):
        geometry = self.forms[form]
        paired = const_expr(geometry.ctas == PAIR)
        schedule = DecodeSchedule.of(geometry)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARPS[0]:
            tiles = (latent_tile_atom, rope_tile_atom)
            if const_expr(geometry.converts):
                tiles = (*tiles, scales_tile_atom)
            for atom in (query.latent.atom, query.rope.atom, *tiles):
                cpasync.prefetch_descriptor(atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(schedule, base, barriers)
        if warp == 0:
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        if const_expr(paired):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            number, borders = Int32(0), Int32(0)
            if warp == DEAL_WARP:
                deal(self.deal, shared.dealt, view, terms, partials, varying, not paired)
            elif warp == CLEAN_WARP:
                if const_expr(not geometry.converts):
                    task = take(shared.dealt, number)
                    while task.more:
                        if const_expr(geometry.scaled):
                            source = KeySource(block_tables, page_size, pages)
                            borders = bring_scales_and_clean(
                                shared, geometry, source, scales.keys, task, number, view, terms.heads, borders
                            )
                        else:
                            borders = clean(shared, geometry, task, view, terms.heads, borders)
                        number, task = take_next(shared.dealt, number)
            elif const_expr(not paired) or warp == LOAD_WARPS[-1]:
                source = KeySource(block_tables, page_size, pages)
                boxes = self._partition_strips(
                    geometry, (latent_box_atom, latent_box), (rope_box_atom, rope_box), (scales_box_atom, scales_box),
                    BOX_KEYS, shared,
                )  # fmt: skip
                tiles = self._partition_strips(
                    geometry, (latent_tile_atom, latent_tile), (rope_tile_atom, rope_tile),
                    (scales_tile_atom, scales_tile), geometry.tile_kv, shared,
                )  # fmt: skip
                for loader in cutlass.range_constexpr(len(LOAD_WARPS)):
                    if warp == LOAD_WARPS[loader]:
                        task = take(shared.dealt, number)
                        while task.more:
                            borders = load(
                                query, boxes, tiles, source, shared, geometry, loader, task, terms.heads,
                                hides(view), borders, varying,
                            )  # fmt: skip
                            number, task = take_next(shared.dealt, number)
                # The combine's CTAs may come now. Earlier, all would go where CTAs without work leave: to few SMs.
                cute.arch.griddepcontrol_launch_dependents()
        elif warp >= 3 * WARPGROUP // 32:
            if const_expr(geometry.transposes or geometry.converts):
                cute.arch.setmaxregister_decrease(schedule.helper_registers)
                number = Int32(0)
                task = take(shared.dealt, number)
                while task.more:
                    if const_expr(paired):
                        if task.tiles > 0:  # else there may be no rows that could see a key
                            source = KeySource(block_tables, page_size, pages)
                            convert_for_both(shared, geometry, cache, source, task, view, terms.heads)
                    elif const_expr(geometry.converts):
                        convert(shared, geometry, warp // (WARPGROUP // 32) - 3, number, task, view, terms.heads)
                    else:
                        transpose_values(shared, geometry, task)
                    number, task = take_next(shared.dealt, number)
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            results = Results(out, lse, partials, ending)
            mine = warp // (WARPGROUP // 32) - 1
            number = Int32(0)
            task = take(shared.dealt, number)
            while task.more:
                attend(
                    geometry, self.probabilities, mine, (mma_qk, mma_rope, mma_pv), shared, view, number, task,
                    terms.heads, results, softmax_scale, scales,
                )  # fmt: skip
                number, task = take_next(shared.dealt, number)
        if const_expr(paired):  # the other CTA may still tell this one that it has left a stage
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _partition_strips(self, geometry: DecodeGeometry, latent, rope, scales, rows: int, shared: Shared) -> tuple:
        """Partition every strip for copies of `rows` keys; `latent`, `rope` and `scales` are (copy atom, cache)."""
        if geometry.converts:
            rope = self._partition_strip(*rope, geometry.latent_strips, rows, shared.kv_strips[-1])
            return partition_stored(geometry, latent, rope, scales, shared, rows)
        sources = [latent] * geometry.latent_strips + [rope]
        return tuple(
            self._partition_strip(*source, strip, rows, place)
            for strip, (source, place) in enumerate(zip(sources, shared.kv_strips, strict=True))
        )

    def _partition_strip(self, atom, keys: cute.Tensor, strip: int, rows: int, shared: cute.Pointer):
        """(copy atom, boxes of `rows` keys by place in the page and page, shared boxes by place in the tile and stage).
        """
        geometry = self.geometry
        columns = geometry.strips[strip]
        place = geometry.first_columns[strip] // columns
        if strip == geometry.latent_strips and (geometry.scaled or geometry.converts):  # a view of their own
            place = 0
        boxes = cute.local_tile(keys, box_shape(columns, rows), (0, 0, place, None, None))
        return partition(atom, boxes, cute.make_tensor(shared, stages_layout(geometry, columns, rows)))

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma | None, cute.TiledMma]:
        """The products: scores = Q K^T with both in shared memory, one more for rope pieces where they have a dtype of
        their own; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        v_major = k_major if self.geometry.transposes else mn_major
        one = (1, 1, 1)
        qk, rope = (
            hopper.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv))
            for dtype in (numeric(self.geometry.strip_dtypes[strip]) for strip in (0, -1))
        )
        operands = map(numeric, self.probabilities.operands)
        pv = hopper.make_trivial_tiled_mma(
            *operands, k_major, v_major, Float32, one, (64, self.geometry.value_columns), warpgroup.OperandSource.RMEM
        )
        return qk, rope if self.geometry.scaled else None, pv
