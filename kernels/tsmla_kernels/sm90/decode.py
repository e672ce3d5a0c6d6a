"""Absorbed MLA decode over a paged cache for Hopper: host entry, kernel entry, and what its roles share.

One CTA per part of the plan walks its segments (`parts/decode_work.py`): 64 query rows against a range of KV tiles. Two
warpgroups attend, two warps load by TMA, one wipes what lies beyond the visible keys.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from tsmla.plan import DEALS
from tsmla.support import LATENT_DIM, ROPE_DIM
from tsmla.variant import DecodeVariant

from ..decode.arguments import decode_arguments
from ..decode.combine import launch_combine
from ..geometry import BARRIER_BYTES, TILE_ALIGNMENT
from ..parts.decode_work import Terms, on_the_line, terms_of
from ..parts.paged import boxes_view
from ..parts.partials import Partials, partials_of
from ..parts.pipeline import Signals, TmaEdge, WarpEdge
from ..parts.precision import Probabilities, numeric
from ..parts.visible import Visibility, hides, visibility
from ..schedule import WARPGROUP
from .decode_attend import attend
from .decode_deal import RING, WORDS, Dealt, deal, leave, take
from .decode_geometry import (
    BOX_ROWS,
    CHUNK,
    CLEAN_WARP,
    DEAL_WARP,
    DEALT_AT,
    GROUP_ROWS,
    LOAD_WARPS,
    OUTPUTS,
    REFERENCES_AT,
    DecodeGeometry,
    DecodeSchedule,
)
from .decode_load import clean, load
from .decode_transpose import transpose_values


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
        keys = boxes_view(kv_cache, 0, CHUNK, geometry.d_qk // CHUNK)
        (latent_box, latent_tile), (rope_box, rope_tile) = (
            [
                cpasync.make_tiled_tma_atom(
                    load_op,
                    keys,
                    cute.make_composed_layout(layouts.swizzle, 0, _box_layout(columns, rows)),
                    _box_shape(columns, rows),
                )
                for rows in (BOX_ROWS, geometry.tile_kv)
            ]
            for columns in (geometry.d_piece, ROPE_DIM)
        )
        scalars = (causal, window_left, cp_world, cp_rank, cp_interleave)
        capacity = Int64(block_tables.shape[1]) * kv_cache.shape[1]
        view = visibility(seq_lens, causal_seqs, visible, q_len, scalars, capacity)
        partials = partials_of(Int32(self.deal.row_tile), workspace, query.shape[0], q_len * heads, parts)
        terms = terms_of(self.deal, query.shape[0], q_len, heads, parts, partials.slots)
        view = on_the_line(self.deal, view, terms)
        self.kernel(
            *q_map, *latent_box, *latent_tile, *rope_box, *rope_tile,
            block_tables, view, terms, out, lse, partials, kv_cache.shape[0], kv_cache.shape[1],
            softmax_scale, output_scale, mma_qk, mma_pv,
        ).launch(
            grid=(parts, 1, 1),
            block=(self.schedule.threads, 1, 1),
            smem=geometry.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.variant.pdl,
        )  # fmt: skip
        launch_combine(self.variant.pdl, partials, out, lse, output_scale, stream)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q: cute.Tensor,
        latent_box_atom: cute.CopyAtom,
        latent_box: cute.Tensor,
        latent_tile_atom: cute.CopyAtom,
        latent_tile: cute.Tensor,
        rope_box_atom: cute.CopyAtom,
        rope_box: cute.Tensor,
        rope_tile_atom: cute.CopyAtom,
        rope_tile: cute.Tensor,
        block_tables: cute.Tensor,
        view: Visibility,
        terms: Terms,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: Partials,
        pages: Int32,
        page_size: Int32,
        softmax_scale: Float32,
        output_scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        geometry, schedule = self.geometry, self.schedule
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARPS[0]:
            for atom in (q_atom, latent_tile_atom, rope_tile_atom):
                cpasync.prefetch_descriptor(atom)
        shared = self._shared(self._layouts())
        if warp == 0:
            with cute.arch.elect_one():
                for edge in (shared.q_edge, shared.dealt.edge, *shared.kv_edges):
                    edge.init()
                if const_expr(geometry.transposes):
                    for edge in shared.v_edges:
                        edge.init()
                shared.landed.init()
                for i in range(schedule.warps_per_group):
                    cute.arch.mbarrier_init(shared.referenced + i, 1)
                    cute.arch.mbarrier_init(shared.exchanged + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.variant.pdl):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            number, edges = Int32(0), Int32(0)
            if warp == DEAL_WARP:
                deal(self.deal, shared.dealt, view, terms, partials)
            elif warp == CLEAN_WARP:
                task = take(shared.dealt, number)
                while task.more:
                    edges = clean(shared, geometry, task, view, terms.heads, edges)
                    leave(shared.dealt, number)
                    number += 1
                    task = take(shared.dealt, number)
            else:
                q_tiles = self._partition_q(q_atom, q, shared.q)
                boxes = self._partition_pieces(
                    (latent_box_atom, latent_box), (rope_box_atom, rope_box), BOX_ROWS, shared
                )
                tiles = self._partition_pieces(
                    (latent_tile_atom, latent_tile), (rope_tile_atom, rope_tile), geometry.tile_kv, shared
                )
                for loader in cutlass.range_constexpr(len(LOAD_WARPS)):
                    if warp == LOAD_WARPS[loader]:
                        task = take(shared.dealt, number)
                        while task.more:
                            edges = load(
                                q_tiles, boxes, tiles, block_tables, shared, geometry, loader, task, hides(view),
                                page_size, pages, edges,
                            )  # fmt: skip
                            leave(shared.dealt, number)
                            number += 1
                            task = take(shared.dealt, number)
        elif warp >= 3 * WARPGROUP // 32:
            if const_expr(geometry.transposes):
                cute.arch.setmaxregister_decrease(schedule.transpose_registers)
                number = Int32(0)
                task = take(shared.dealt, number)
                while task.more:
                    transpose_values(shared, geometry, task)
                    leave(shared.dealt, number)
                    number += 1
                    task = take(shared.dealt, number)
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            probabilities, scales = Probabilities.of(self.variant.dtype), (softmax_scale, output_scale)
            results = Results(out, lse, partials, terms.rows)
            mine = warp // (WARPGROUP // 32) - 1
            number = Int32(0)
            task = take(shared.dealt, number)
            while task.more:
                attend(
                    geometry, probabilities, mine, (mma_qk, mma_pv), shared, view, number, task, terms.heads, results,
                    scales,
                )  # fmt: skip
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

    def _partition_pieces(self, latent, rope, rows: int, shared: Shared) -> tuple:
        """`_partition_piece` of every piece; `latent` and `rope` are (copy atom, cache)."""
        sources = [latent] * self.geometry.latent_pieces + [rope]
        return tuple(
            self._partition_piece(*source, piece, rows, place)
            for piece, (source, place) in enumerate(zip(sources, shared.kv_pieces, strict=True))
        )

    def _partition_piece(self, atom, keys: cute.Tensor, piece: int, rows: int, shared: cute.Pointer):
        """(copy atom, boxes of `rows` keys by place in the page and page, shared boxes by place in the tile and stage).
        """
        geometry = self.geometry
        columns = geometry.pieces[piece]
        place = (LATENT_DIM if piece == geometry.latent_pieces else piece * columns) // columns
        boxes = cute.local_tile(keys, _box_shape(columns, rows), (0, 0, place, None, None))
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(shared, _stages_layout(geometry, columns, rows)), 0, 5),
            cute.group_modes(boxes, 0, 5),
        )
        return atom, source, target

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Scores = Q K^T with both in shared memory; output += P V with P in registers."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        v_major = k_major if self.geometry.transposes else mn_major
        one = (1, 1, 1)
        qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (64, self.geometry.tile_kv)
        )
        pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, v_major, Float32, one, (64, self.geometry.value_columns),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return qk, pv

    def _layouts(self) -> Layouts:
        """Swizzled patterns of 8 rows and 64 columns. A piece of the cache tile lies in groups of 8 rows, each all of
        its patterns, so that 16 rows of a page are one box whatever the page size, and descriptor strides are constant
        over the tile. Transposed values are rows of keys, stage by stage."""
        geometry = self.geometry
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW64 if geometry.transposes else kinds.K_SW128, self.dtype)
        pattern = GROUP_ROWS * CHUNK
        groups = geometry.tile_kv // GROUP_ROWS
        line = CHUNK * geometry.element_bytes // 16
        keys, vectors, q_pieces = [], [], []
        for columns in geometry.pieces:
            chunks, stage = columns // CHUNK, geometry.tile_kv * columns
            rows, row_strides = (GROUP_ROWS, groups), (CHUNK, chunks * pattern)
            keys.append(
                cute.make_layout(
                    (rows, (CHUNK, chunks), geometry.stages), stride=(row_strides, (1, pattern), stage)
                )
            )
            vectors.append(
                cute.make_layout(
                    (4, GROUP_ROWS, line, chunks, groups, geometry.stages),
                    stride=(1, 4 * line, 4, 32 * line, 32 * line * chunks, 4 * line * chunks * geometry.tile_kv),
                )
            )
            q_pieces.append(
                cute.make_layout(
                    ((GROUP_ROWS, geometry.tile_q // GROUP_ROWS), (CHUNK, chunks)),
                    stride=((CHUNK, pattern), (1, geometry.tile_q * CHUNK)),
                )
            )
        d_value = geometry.value_columns
        if geometry.transposes:
            values = cute.make_layout(
                (d_value, geometry.tile_kv, geometry.value_stages), stride=(geometry.tile_kv, 1, geometry.values_bytes)
            )
        else:
            values = cute.make_layout(
                ((CHUNK, d_value // CHUNK), (GROUP_ROWS, groups), geometry.stages),
                stride=((1, pattern), (CHUNK, d_value // CHUNK * pattern), geometry.tile_kv * d_value),
            )
        return Layouts(
            swizzle=atom.inner,
            q=cute.tile_to_shape(atom, (geometry.tile_q, geometry.d_qk), order=(0, 1)),
            q_pieces=tuple(q_pieces),
            keys=tuple(keys),
            values=values,
            vectors=tuple(vectors),
        )

    def _shared(self, layouts: Layouts) -> Shared:
        """Carve up shared memory: barriers and row sums, Q, both rings, the exchange of probabilities."""
        geometry, schedule = self.geometry, self.schedule
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)

        def swizzled(offset, layout):
            return cute.make_tensor(cute.recast_ptr(base + offset, layouts.swizzle, self.dtype), layout)

        def plain(offset, layout, dtype):
            return cute.make_tensor(cute.recast_ptr(base + offset, dtype=dtype), layout)

        def each(places, shapes):
            return tuple(swizzled(at, layout) for at, layout in zip(places, shapes, strict=True))

        q_line = geometry.tile_q * geometry.element_bytes
        q_pieces = [BARRIER_BYTES + sum(geometry.pieces[:i]) * q_line for i in range(len(geometry.pieces))]
        *pieces, transposed = itertools.accumulate(
            (geometry.stages * size for size in geometry.piece_bytes), initial=BARRIER_BYTES + geometry.q_bytes
        )
        halves = [transposed + half * geometry.value_stages * geometry.values_bytes for half in range(3)]
        exchange = halves.pop()
        values = pieces[: geometry.latent_pieces]
        if geometry.transposes:
            output_bytes = geometry.value_columns * geometry.tile_kv
            values = [half + i * output_bytes for half in halves for i in range(OUTPUTS)]
        row_sums = exchange + geometry.exchanged_bytes
        row_keys = row_sums + geometry.tile_q * 4 * 4
        barriers = _Words(cute.recast_ptr(base, dtype=cutlass.Int64))
        warps = schedule.warps_per_group
        vectors = geometry.probabilities_bytes // WARPGROUP // 16
        ring = TmaEdge.barrier_count(geometry.stages)
        q_edge = TmaEdge(barriers.take(TmaEdge.barrier_count(1)), 1, geometry.q_bytes, 2 * warps)
        kv_edges = tuple(
            TmaEdge(barriers.take(ring), geometry.stages, size, schedule.kv_warps) for size in geometry.edge_bytes
        )
        landed = Signals(barriers.take(geometry.stages), geometry.stages, geometry.latent_pieces)
        referenced, exchanged = barriers.take(warps), barriers.take(warps)
        dealt_edge = WarpEdge(barriers.take(WarpEdge.barrier_count(RING)), RING, 1, schedule.told_warps)
        v_edges = kv_edges
        if geometry.transposes:
            words = WarpEdge.barrier_count(geometry.value_stages)
            v_edges = tuple(WarpEdge(barriers.take(words), geometry.value_stages, warps, warps) for _ in range(2))
        assert barriers.taken * 8 <= DEALT_AT, barriers.taken
        assert DEALT_AT + WORDS * RING * 4 <= REFERENCES_AT <= BARRIER_BYTES - geometry.tile_q * 4
        return Shared(
            q=swizzled(BARRIER_BYTES, layouts.q.outer),
            q_pieces=each(q_pieces, layouts.q_pieces),
            k_pieces=each(pieces, layouts.keys),
            values=each(values, [layouts.values] * len(values)),
            kv_pieces=tuple(cute.recast_ptr(base + at, layouts.swizzle, self.dtype) for at in pieces),
            loaded=tuple((base + at).toint() for at in pieces),
            transposed=tuple((base + at).toint() for at in halves),
            vectors=tuple(plain(at, layout, Int32) for at, layout in zip(pieces, layouts.vectors, strict=True)),
            exchange=plain(
                exchange, cute.make_layout((4, vectors, WARPGROUP), stride=(1, 4 * WARPGROUP, 4)), Int32
            ),
            staging=(base + exchange).toint(),
            references=plain(REFERENCES_AT, cute.make_layout(geometry.tile_q), Float32),
            row_sums=plain(row_sums, cute.make_layout((geometry.tile_q, 2, 2)), Float32),
            row_keys=plain(row_keys, cute.make_layout((2, geometry.tile_q, 2)), Int32),
            q_edge=q_edge,
            kv_edges=kv_edges,
            v_edges=v_edges,
            landed=landed,
            landed_after=tuple((geometry.latent_pieces - i) * ring for i in range(geometry.latent_pieces)),
            referenced=referenced,
            exchanged=exchanged,
            dealt=Dealt(plain(DEALT_AT, cute.make_layout((WORDS, RING)), Int32), dealt_edge),
        )


def _box_shape(columns: int, rows: int) -> tuple[int, ...]:
    """Of a bulk copy of `rows` keys and `columns` columns, in `boxes_view`."""
    return CHUNK, GROUP_ROWS, columns // CHUNK, rows // GROUP_ROWS, 1


def _box_layout(columns: int, rows: int) -> cute.Layout:
    pattern = GROUP_ROWS * CHUNK
    return cute.make_layout(_box_shape(columns, rows), stride=(1, CHUNK, pattern, columns * GROUP_ROWS, 0))


def _stages_layout(geometry: DecodeGeometry, columns: int, rows: int) -> cute.Layout:
    """Boxes of a piece of the cache tile: (box, boxes in a tile, stages)."""
    box = _box_layout(columns, rows)
    return cute.make_layout(
        (*box.shape, geometry.tile_kv // rows, geometry.stages),
        stride=(*box.stride, rows * columns, geometry.tile_kv * columns),
    )


class _Words:
    """Hands out 64-bit words of shared memory, one after the other."""

    def __init__(self, start: cute.Pointer):
        self.start = start
        self.taken = 0

    def take(self, count: int) -> cute.Pointer:
        self.taken += count
        return self.start + (self.taken - count)


class Results(NamedTuple):
    """Where rows go; `rows` is q_len x heads."""

    out: cute.Tensor
    lse: cute.Tensor | None
    partials: Partials
    rows: Int32


class Layouts(NamedTuple):
    """Of shared memory; tuples are those of the pieces of a cache row. `values` are those of one value MMA. `vectors`
    are (4 words, 8 rows, vectors in a row of a pattern, patterns, groups of rows, stages)."""

    swizzle: cute.Swizzle
    q: cute.ComposedLayout
    q_pieces: tuple
    keys: tuple
    values: cute.Layout
    vectors: tuple


class Shared(NamedTuple):
    """Tiles in shared memory, seen by the products (q_pieces, k_pieces, values), by TMA (q, kv_pieces), as vectors,
    and as addresses (loaded, transposed); what the attending warpgroups exchange, where they stage results, and which
    keys their rows see; the edges; where edge tiles land, in turns, of which there are as many as a loading warp may be
    ahead of the other (also as 64-bit words after the first barrier of each ring); the warp pairs' barriers, of
    references and of probabilities; the tasks."""

    q: cute.Tensor
    q_pieces: tuple
    k_pieces: tuple
    values: tuple
    kv_pieces: tuple
    loaded: tuple
    transposed: tuple
    vectors: tuple
    exchange: cute.Tensor
    staging: Int32
    references: cute.Tensor
    row_sums: cute.Tensor
    row_keys: cute.Tensor
    q_edge: TmaEdge
    kv_edges: tuple
    v_edges: tuple
    landed: Signals
    landed_after: tuple
    referenced: cute.Pointer
    exchanged: cute.Pointer
    dealt: Dealt
