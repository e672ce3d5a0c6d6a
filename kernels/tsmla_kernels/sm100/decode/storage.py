"""What lies where in a CTA's shared memory of the Blackwell decode, and who waits for whom there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...limits import SWIZZLE_BYTES
from ...parts.keys import paged
from ...parts.keys.source import BOX_KEYS
from ...parts.pipeline import Barriers, ClusterEdge, Edge, LaneCopiesEdge
from ...parts.precision import numeric
from .geometry import EXCHANGE_OFFSET, LARGE_KEYS, THERE_OFFSET, DecodeGeometry


class Layouts(NamedTuple):
    """Layouts of bulk copies' targets in shared memory: boxes of BOX_KEYS keys, and of LARGE_KEYS."""

    k_box: cute.ComposedLayout
    k_tail_box: cute.ComposedLayout | None
    v_box: cute.ComposedLayout
    k_large: cute.ComposedLayout
    k_tail_large: cute.ComposedLayout | None
    v_large: cute.ComposedLayout


class Operands(NamedTuple):
    """Addresses of the products' operands in shared memory, for descriptors."""

    q: Int32
    k: Int32
    k_tail: Int32
    v: Int32
    p: Int32


class Tiles(NamedTuple):
    """Targets of bulk copies: each piece of the query, the first boxes of the wide and tail parts of K, and of V."""

    q: tuple
    k: cute.Tensor
    k_tail: cute.Tensor | None
    v: cute.Tensor | None


class Words(NamedTuple):
    """Pointers to the tiles as 32-bit words, which lanes write."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    p: cute.Pointer


class Edges(NamedTuple):
    """The edges of `DecodeSchedule.edges`, by name."""

    q: ClusterEdge
    k: ClusterEdge
    rope: ClusterEdge | None
    v: ClusterEdge | None
    s: ClusterEdge
    p: ClusterEdge
    half: ClusterEdge
    scales: Edge | None
    landed_keys: LaneCopiesEdge | None
    landed_rope: LaneCopiesEdge | None
    landed_values: LaneCopiesEdge | None
    there: Edge | None


class Shared(NamedTuple):
    """What the roles see of a CTA: its tiles in shared memory in three views, where the threads of a row exchange
    numbers, folded scales of keys, which keys are there, tensor memory, and the edges. Solo there is no V; without
    scales of keys, or keys that are gathered, nothing that concerns them."""

    operands: Operands
    tiles: Tiles
    words: Words
    exchange: cute.Pointer
    scales: cute.Pointer | None
    there: cute.Pointer | None
    tmem_base: Int32
    edges: Edges


def layouts_of(geometry: DecodeGeometry) -> Layouts:
    tail = geometry.tail > 0

    def layouts(keys):
        groups = keys // paged.GROUP
        return (
            paged.box_layout(SWIZZLE_BYTES, geometry.chunk, geometry.k_chunks, groups),
            paged.box_layout(geometry.tail_bytes, geometry.tail, 1, groups) if tail else None,
            paged.box_layout(SWIZZLE_BYTES, geometry.chunk, geometry.v_chunks, groups),
        )

    return Layouts(*layouts(BOX_KEYS), *layouts(LARGE_KEYS))


def shared_of(geometry: DecodeGeometry, base: cute.Pointer, barriers: Barriers, tmem_base: Int32) -> Shared:
    """Carve up shared memory from `base` on; addresses for descriptors, swizzled pointers for bulk copies, words for
    lanes."""
    layouts = layouts_of(geometry)
    latent, last = (numeric(geometry.row.pieces[i].dtype) for i in (0, -1))

    def tile(offset, layout, dtype=latent, swizzle=SWIZZLE_BYTES):
        place = cute.recast_ptr(base + offset, cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), dtype)
        return cute.make_tensor(place, layout.outer)

    def words(offset, element=Int32):
        return cute.recast_ptr(base + offset, dtype=element)

    def address(offset):
        return base.toint() + offset

    tail, query, scaled = geometry.tail_bytes, geometry.query_tile, geometry.scale_slots > 0
    q, k, k_tail = geometry.q_offset, geometry.k_offset, geometry.k_tail_offset
    v, p = geometry.v_offset, geometry.p_offset
    landed = geometry.gathers and not geometry.converts
    return Shared(
        Operands(*(address(offset) for offset in (q, k, k_tail, v, p))),
        Tiles(
            q=tuple(
                cute.make_tensor(
                    cute.recast_ptr(base + (q + query.offset(name)), query.swizzle(name), query.dtype(name)),
                    query.layout(name),
                )
                for name in query.names
            ),
            k=tile(k, layouts.k_box),
            k_tail=tile(k_tail, layouts.k_tail_box, last, tail) if tail else None,
            v=tile(v, layouts.v_box) if geometry.is_pair else None,
        ),
        Words(*(words(offset) for offset in (q, k, v, p))),
        exchange=words(EXCHANGE_OFFSET, Float32),
        scales=words(geometry.scale_offset, Float32) if scaled else None,
        there=words(THERE_OFFSET) if geometry.gathers else None,
        tmem_base=tmem_base,
        edges=Edges(
            *(barriers.edge(name, ClusterEdge) for name in ("q", "k")),
            barriers.edge("rope", ClusterEdge) if geometry.rope_apart else None,
            barriers.edge("v", ClusterEdge) if geometry.is_pair else None,
            *(barriers.edge(name, ClusterEdge) for name in ("s", "p", "half")),
            barriers.edge("scales", Edge) if scaled else None,
            barriers.edge("landed_keys", LaneCopiesEdge) if landed else None,
            barriers.edge("landed_rope", LaneCopiesEdge) if geometry.rope_apart else None,
            barriers.edge("landed_values", LaneCopiesEdge) if landed and geometry.is_pair else None,
            barriers.edge("there", Edge) if geometry.gathers else None,
        ),
    )
