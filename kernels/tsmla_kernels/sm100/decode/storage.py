"""What lies where in a CTA's shared memory of the Blackwell decode, and who waits for whom there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from tsmla.identity.row_format import NAMES

from ...parts.keys import paged
from ...parts.keys.source import BOX_KEYS
from ...parts.pipeline import Barriers, ClusterEdge, Edge
from ...parts.precision import numeric
from .geometry import EXCHANGE_OFFSET, LARGE_KEYS, SWIZZLE, DecodeGeometry


class Layouts(NamedTuple):
    """Layouts of bulk copies' targets in shared memory: boxes of BOX_KEYS keys, and of LARGE_KEYS."""

    k_box: cute.ComposedLayout
    k_tail_box: cute.ComposedLayout | None
    v_box: cute.ComposedLayout
    k_large: cute.ComposedLayout
    k_tail_large: cute.ComposedLayout | None
    v_large: cute.ComposedLayout


class Shared(NamedTuple):
    """What the roles see of a CTA: addresses in shared memory (for descriptors), views of the same places (q_tiles: of
    each piece of the query), tensor memory, and the edges. Solo there is no V; without scales of keys nothing that
    concerns them."""

    q: Int32
    k: Int32
    k_tail_at: Int32
    v: Int32
    p: Int32
    q_tiles: tuple
    q_words: cute.Pointer
    k_wide: cute.Tensor
    k_tail: cute.Tensor | None
    k_words: cute.Pointer
    v_wide: cute.Tensor | None
    v_words: cute.Pointer
    p_words: cute.Pointer
    exchange: cute.Pointer
    scales: cute.Pointer | None
    tmem_base: Int32
    q_edge: ClusterEdge
    k_edge: ClusterEdge
    v_edge: ClusterEdge | None
    s_edge: ClusterEdge
    p_edge: ClusterEdge
    half_edge: ClusterEdge
    scales_edge: Edge | None


def layouts_of(geometry: DecodeGeometry) -> Layouts:
    tail = geometry.tail > 0

    def layouts(keys):
        groups = keys // paged.GROUP
        return (
            paged.box_layout(SWIZZLE, geometry.chunk, geometry.k_chunks, groups),
            paged.box_layout(geometry.tail_bytes, geometry.tail, 1, groups) if tail else None,
            paged.box_layout(SWIZZLE, geometry.chunk, geometry.v_chunks, groups),
        )

    return Layouts(*layouts(BOX_KEYS), *layouts(LARGE_KEYS))


def shared_of(geometry: DecodeGeometry, base: cute.Pointer, barriers: Barriers, tmem_base: Int32) -> Shared:
    """Carve up shared memory from `base` on; addresses for descriptors, swizzled pointers for bulk copies, words for
    lanes."""
    layouts = layouts_of(geometry)
    latent, rope = (numeric(geometry.row.piece(name).dtype) for name in NAMES)

    def tile(offset, layout, dtype=latent, swizzle=SWIZZLE):
        place = cute.recast_ptr(base + offset, cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), dtype)
        return cute.make_tensor(place, layout.outer)

    def words(offset, element=Int32):
        return cute.recast_ptr(base + offset, dtype=element)

    def address(offset):
        return base.toint() + offset

    tail, query, scaled = geometry.tail_bytes, geometry.query_tile, geometry.scale_slots > 0
    return Shared(
        q=address(geometry.q_offset),
        k=address(geometry.k_offset),
        k_tail_at=address(geometry.k_tail_offset),
        v=address(geometry.v_offset),
        p=address(geometry.p_offset),
        q_tiles=tuple(
            cute.make_tensor(cute.recast_ptr(base + at, query.swizzle(name), dtype), query.layout(name))
            for name, at, dtype in (
                ("latent", geometry.q_offset, latent),
                ("rope", geometry.q_offset + query.rope_offset, rope),
            )
        ),
        q_words=words(geometry.q_offset),
        k_wide=tile(geometry.k_offset, layouts.k_box),
        k_tail=tile(geometry.k_tail_offset, layouts.k_tail_box, rope, tail) if tail else None,
        k_words=words(geometry.k_offset),
        v_wide=tile(geometry.v_offset, layouts.v_box) if geometry.is_pair else None,
        v_words=words(geometry.v_offset),
        p_words=words(geometry.p_offset),
        exchange=words(EXCHANGE_OFFSET, Float32),
        scales=words(geometry.scale_offset, Float32) if scaled else None,
        tmem_base=tmem_base,
        q_edge=barriers.edge("q", ClusterEdge),
        k_edge=barriers.edge("k", ClusterEdge),
        v_edge=barriers.edge("v", ClusterEdge) if geometry.is_pair else None,
        s_edge=barriers.edge("s", ClusterEdge),
        p_edge=barriers.edge("p", ClusterEdge),
        half_edge=barriers.edge("half", ClusterEdge),
        scales_edge=barriers.edge("scales", Edge) if scaled else None,
    )
