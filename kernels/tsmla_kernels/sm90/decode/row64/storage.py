"""What lies where in a CTA's shared memory of the Hopper decode, and who waits for whom there."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from tsmla.identity.dtype import bytes_of

from ....limits import WARPGROUP
from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.pipeline import Barriers, LaneCopiesEdge, Signals, TmaEdge, WarpEdge
from ....parts.precision import numeric
from ..work.ring import DEALT_AT, TASK_RING, TASK_WORDS
from ..work.task import Dealt
from .geometry import (
    ANCHORS_AT,
    CONVERTERS,
    GROUP_ROWS,
    PATTERN_COLUMNS,
    REFERENCES_AT,
    THERE_AT,
    WEIGHT_STAGES,
    DecodeGeometry,
)
from .pair_edge import PairEdge
from .schedule import DecodeSchedule


class Layouts(NamedTuple):
    """Layouts in shared memory, one for each strip of a cache row where they are tuples. `values`: of a latent strip as
    one value product reads it. `vectors`: (4 words, 8 rows, vectors in a row of a pattern, patterns, groups of rows,
    stages)."""

    dtypes: tuple
    swizzles: tuple
    q_strips: tuple
    keys: tuple
    values: cute.Layout
    vectors: tuple


class QueryPlaces(NamedTuple):
    """The query's tile: for TMA, a view for each piece; as words; and its strips for products."""

    tile: tuple
    words: cute.Pointer
    strips: tuple


class KeyPlaces(NamedTuple):
    """Where keys lie.

    strips, values: for products. copied: strips for TMA. stored, stored_scales: of rows that are converted, latent
    strips and scales as they are stored, for TMA. loaded: addresses of strips. vectors: strips as 16-byte vectors."""

    strips: tuple
    values: tuple
    copied: tuple
    stored: tuple
    stored_scales: tuple
    loaded: tuple
    vectors: tuple


class TurnedExchange(NamedTuple):
    """What attending warpgroups tell each other where value products are turned.

    weights: probabilities of tiles, [rows, keys, stages], for products; weights_at: their address. rescales, moved: by
    how much outputs are rescaled before a tile, [rows, stages], and whether any of a warp's rows is, [warps, stages].
    ends: what rows are multiplied by at the end of a task, [rows, 2]."""

    weights: cute.Tensor
    weights_at: Int32
    rescales: cute.Tensor
    moved: cute.Tensor
    ends: cute.Tensor


class Exchange(NamedTuple):
    """What warps tell each other.

    probabilities: that the attending warpgroups hand each other. staging: address where they stage results. references,
    row_sums: of rows, exchanged by these warpgroups. row_keys: which keys their rows see. folded: what is told of keys'
    scales, or None: for each word [2 keys, half of the tile's keys, stages]; the two words that scores need lie
    together in 16 bytes. anchors: of tasks. there: where keys are gathered, which of a tile's are there, a bit for each
    [2 words, stages]."""

    probabilities: cute.Tensor
    staging: Int32
    references: cute.Tensor
    row_sums: cute.Tensor
    row_keys: cute.Tensor
    folded: tuple | None
    anchors: cute.Tensor
    there: cute.Tensor
    turned: TurnedExchange | None


class Edges(NamedTuple):
    """The edges (`DecodeSchedule.edges`). `ready` are `kv` where nothing is converted in place."""

    q: TmaEdge
    kv: tuple
    ready: tuple
    landed: Signals | tuple | None
    referenced: Signals | None
    ends: WarpEdge | None
    exchanged: Signals | WarpEdge
    scales: WarpEdge | None


class Shared(NamedTuple):
    """What the roles see of a CTA's shared memory; `dealt` is the ring of tasks."""

    query: QueryPlaces
    keys: KeyPlaces
    exchange: Exchange
    edges: Edges
    dealt: Dealt


def layouts_of(geometry: DecodeGeometry) -> Layouts:
    """Swizzled patterns of 8 rows and 64 columns, of each strip's dtype. A strip of the cache tile lies in groups of 8
    rows, each all of its patterns, so that 16 rows of a page are one box whatever the page size, and descriptor strides
    are constant over the tile."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind_of = {8: kinds.K_SW64, 16: kinds.K_SW128}
    dtypes = tuple(numeric(dtype) for dtype in geometry.strip_dtypes)
    atoms = [warpgroup.make_smem_layout_atom(kind_of[dtype.width], dtype) for dtype in dtypes]
    pattern = GROUP_ROWS * PATTERN_COLUMNS
    groups = geometry.tile_kv // GROUP_ROWS
    keys, vectors, q_strips = [], [], []
    for columns, dtype in zip(geometry.strips, dtypes, strict=True):
        line = bytes_of(dtype.width, PATTERN_COLUMNS) // 16
        chunks, stage = columns // PATTERN_COLUMNS, geometry.tile_kv * columns
        rows, row_strides = (GROUP_ROWS, groups), (PATTERN_COLUMNS, chunks * pattern)
        keys.append(
            cute.make_layout(
                (rows, (PATTERN_COLUMNS, chunks), geometry.stages), stride=(row_strides, (1, pattern), stage)
            )
        )
        vectors.append(
            cute.make_layout(
                (4, GROUP_ROWS, line, chunks, groups, geometry.stages),
                stride=(1, 4 * line, 4, 32 * line, 32 * line * chunks, 4 * line * chunks * geometry.tile_kv),
            )
        )
        q_strips.append(
            cute.make_layout(
                ((GROUP_ROWS, geometry.tile_q // GROUP_ROWS), (PATTERN_COLUMNS, chunks)),
                stride=((PATTERN_COLUMNS, pattern), (1, geometry.tile_q * PATTERN_COLUMNS)),
            )
        )
    d_value = geometry.value_columns
    values = cute.make_layout(
        ((PATTERN_COLUMNS, d_value // PATTERN_COLUMNS), (GROUP_ROWS, groups), geometry.stages),
        stride=((1, pattern), (PATTERN_COLUMNS, d_value // PATTERN_COLUMNS * pattern), geometry.tile_kv * d_value),
    )
    return Layouts(
        dtypes=dtypes,
        swizzles=tuple(atom.inner for atom in atoms),
        q_strips=tuple(q_strips),
        keys=tuple(keys),
        values=values,
        vectors=tuple(vectors),
    )


def shared_of(schedule: DecodeSchedule, base: cute.Pointer, barriers: Barriers) -> Shared:
    """Carve up shared memory from `base` on: barriers, tasks and what is told of rows, Q, the ring of keys, what
    warpgroups exchange."""
    geometry = schedule.geometry
    layouts = layouts_of(geometry)
    strip_numbers = range(len(geometry.strips))

    def swizzled(offset, layout, strip):
        pointer = cute.recast_ptr(base + offset, layouts.swizzles[strip], layouts.dtypes[strip])
        return cute.make_tensor(pointer, layout)

    def plain(offset, layout, element):
        return cute.make_tensor(cute.recast_ptr(base + offset, dtype=element), layout)

    def each(places, shapes, strips):
        return tuple(swizzled(*place) for place in zip(places, shapes, strips, strict=True))

    tile = geometry.query_tile
    q_strips = [BARRIER_BYTES + sum(geometry.strip_bytes[:i]) * tile.rows // geometry.tile_kv for i in strip_numbers]
    *strips, exchange = itertools.accumulate(
        (geometry.stages * size for size in geometry.strip_bytes), initial=BARRIER_BYTES + geometry.q_bytes
    )
    row_sums = exchange + geometry.exchanged_bytes
    row_keys = row_sums + geometry.tile_q * 4 * 4
    folded, stages, words = exchange + geometry.exchange_bytes, geometry.scale_stages, geometry.folded_bytes // 4
    vectors = geometry.probabilities_bytes // WARPGROUP // 16
    staging, turned = exchange, None
    if geometry.turns:
        staging = exchange + WEIGHT_STAGES * geometry.probabilities_bytes
        turned = _turned(geometry, base, exchange, row_keys + geometry.tile_q * 4 * 4)
    tasks = plain(DEALT_AT, cute.make_layout((TASK_WORDS, TASK_RING)), Int32)
    stored_dtype = numeric(geometry.stored.piece("latent").dtype)
    assert DEALT_AT + TASK_WORDS * TASK_RING * 4 <= REFERENCES_AT <= ANCHORS_AT - geometry.tile_q * 4
    assert ANCHORS_AT + TASK_RING * 4 <= THERE_AT <= BARRIER_BYTES - geometry.stages * geometry.tile_kv // 8
    query = QueryPlaces(
        tile=tuple(
            swizzled(BARRIER_BYTES + tile.offset(name), tile.layout(name), strip)
            for name, strip in zip(tile.names, (0, *geometry.behind_latent), strict=True)
        ),
        words=cute.recast_ptr(base + BARRIER_BYTES, dtype=Int32),
        strips=each(q_strips, layouts.q_strips, strip_numbers),
    )
    keys = KeyPlaces(
        strips=each(strips, layouts.keys, strip_numbers),
        values=()
        if geometry.turns
        else tuple(swizzled(at, layouts.values, 0) for at in strips[: geometry.latent_strips]),
        copied=tuple(
            cute.recast_ptr(base + at, swizzle, dtype)
            for at, swizzle, dtype in zip(strips, layouts.swizzles, layouts.dtypes, strict=True)
        ),
        stored=tuple(
            cute.recast_ptr(base + at + geometry.stored_at, layouts.swizzles[0], stored_dtype)
            for at in strips[: geometry.latent_strips]
        )
        if geometry.converts
        else (),
        stored_scales=tuple(cute.recast_ptr(base + at, dtype=stored_dtype) for at in strips[:CONVERTERS])
        if geometry.converts
        else (),
        loaded=tuple((base + at).toint() for at in strips),
        vectors=tuple(plain(at, layout, Int32) for at, layout in zip(strips, layouts.vectors, strict=True)),
    )
    told = Exchange(
        probabilities=plain(exchange, cute.make_layout((4, vectors, WARPGROUP), stride=(1, 4 * WARPGROUP, 4)), Int32),
        staging=(base + staging).toint(),
        references=plain(REFERENCES_AT, cute.make_layout(geometry.tile_q), Float32),
        row_sums=plain(row_sums, cute.make_layout((geometry.tile_q, 2, 2)), Float32),
        row_keys=plain(row_keys, cute.make_layout((2, geometry.tile_q, 2)), Int32),
        folded=tuple(
            plain(
                folded + at * 4, cute.make_layout((2, geometry.tile_kv // 2, stages), stride=(1, apart, words)), Float32
            )
            for at, apart in ((0, 4), (2, 4), (2 * geometry.tile_kv, 2))
        )
        if geometry.scaled
        else None,
        anchors=plain(ANCHORS_AT, cute.make_layout(TASK_RING), Float32),
        there=plain(THERE_AT, cute.make_layout((geometry.tile_kv // 32, geometry.stages)), Int32),
        turned=turned,
    )
    edges = _edges(geometry, schedule, barriers)
    return Shared(query, keys, told, edges, Dealt(tasks, barriers.edge("dealt", WarpEdge)))


def _turned(geometry: DecodeGeometry, base: cute.Pointer, weights: int, told: int) -> TurnedExchange:
    """Places where probabilities lie from `weights` on, and what is told of rows from `told` on."""
    dtype = numeric(geometry.probabilities.dtype)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    rows, stages = geometry.tile_q, WEIGHT_STAGES
    line = geometry.tile_kv
    assert bytes_of(dtype.width, line) == 128, geometry
    layout = cute.make_layout(
        ((GROUP_ROWS, rows // GROUP_ROWS), line, stages), stride=((line, GROUP_ROWS * line), 1, rows * line)
    )
    warps = WARPGROUP // 32
    moved = told + rows * stages * 4
    ends = moved + warps * stages * 4

    def plain(offset, layout, element):
        return cute.make_tensor(cute.recast_ptr(base + offset, dtype=element), layout)

    return TurnedExchange(
        weights=cute.make_tensor(cute.recast_ptr(base + weights, atom.inner, dtype), layout),
        weights_at=(base + weights).toint(),
        rescales=plain(told, cute.make_layout((rows, stages)), Float32),
        moved=plain(moved, cute.make_layout((warps, stages)), Int32),
        ends=plain(ends, cute.make_layout((rows, 2)), Float32),
    )


def _edges(geometry: DecodeGeometry, schedule: DecodeSchedule, barriers: Barriers) -> Edges:
    """Edges, each of the class that its parties need."""
    kv_edge = TmaEdge
    if geometry.ctas > 1:
        kv_edge = PairEdge
    elif geometry.gathers:
        kv_edge = LaneCopiesEdge if geometry.converts else WarpEdge
    kv_edges = tuple(barriers.edge(name, kv_edge) for name in schedule.kv_names)
    return Edges(
        q=barriers.edge("q", TmaEdge),
        kv=kv_edges,
        ready=tuple(barriers.edge(name, WarpEdge) for name in schedule.ready_names) or kv_edges,
        landed=_landed(geometry, schedule, barriers),
        referenced=None if geometry.turns else barriers.edge("referenced", Signals),
        ends=barriers.edge("ends", WarpEdge) if geometry.turns else None,
        exchanged=barriers.edge("exchanged", WarpEdge if geometry.turns else Signals),
        scales=barriers.edge("scales", WarpEdge) if geometry.scaled else None,
    )


def _landed(geometry: DecodeGeometry, schedule: DecodeSchedule, barriers: Barriers):
    if geometry.gathers and not geometry.converts:
        return tuple(barriers.edge(name, LaneCopiesEdge) for name in schedule.landed_names)
    return None if geometry.converts else barriers.edge("landed", Signals)


def box_shape(columns: int, rows: int) -> tuple[int, ...]:
    """Shape of a bulk copy of `rows` keys and `columns` columns, in `boxes_view`."""
    return PATTERN_COLUMNS, GROUP_ROWS, columns // PATTERN_COLUMNS, rows // GROUP_ROWS, 1


def box_layout(columns: int, rows: int) -> cute.Layout:
    pattern = GROUP_ROWS * PATTERN_COLUMNS
    return cute.make_layout(box_shape(columns, rows), stride=(1, PATTERN_COLUMNS, pattern, columns * GROUP_ROWS, 0))


def stages_layout(geometry: DecodeGeometry, columns: int, rows: int) -> cute.Layout:
    """Boxes of a strip of the cache tile: (box, boxes in a tile, stages)."""
    box = box_layout(columns, rows)
    return cute.make_layout(
        (*box.shape, geometry.tile_kv // rows, geometry.stages),
        stride=(*box.stride, rows * columns, geometry.tile_kv * columns),
    )
