"""The paged latent cache as bulk tensor copies see it; the key source says where boxes lie.

A row is one key: all of its pieces. Copies move boxes of a few keys, which lie in one page whatever the page size, so
the page size stays a run-time value of the tensor map. In shared memory a box is (8-key groups, chunks, 8 keys, one
swizzled row): K-major as scores need it and MN-major as values do."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.dtype import bytes_of

from ...limits import VECTOR_BYTES, VECTOR_WORDS
from ..alignment import aligned
from .source import BOX_KEYS, KeySource, Lookup, Wanted, exists

GROUP = 8
"""Rows of a swizzle atom."""


class Box(NamedTuple):
    """Where a box starts: page, and 8-row group in it."""

    page: Int32
    group: Int32


@cute.jit
def box_at(wanted: Wanted, lookup: Lookup, box: Int32) -> Box:
    """Where box number `box` of the segment starts; it must be in the lookup's window."""
    key = wanted.key_of(box)
    return Box(lookup.page_of(box), (key & (wanted.source.page_size - 1)) // GROUP)


@cute.jit
def box_with(wanted: Wanted, lookup: Lookup, box: Int32, keys: Int32) -> Box:
    """Where a box starts, as `box_at` says; in a page that does not exist if `keys`, a bit for each key that counts, is
    0."""
    place = box_at(wanted, lookup, box)
    return Box(cutlass.select_(keys == 0, wanted.source.pages, place.page), place.group)


@cute.jit
def boxes_view(
    cache: cute.Tensor,
    first: cutlass.Constexpr,
    width: cutlass.Constexpr,
    chunks: cutlass.Constexpr,
    gaps: cutlass.Constexpr = False,
    dtype: cutlass.Constexpr = None,
):
    """View [pages, page size, dims] as (dims of a swizzled row, 8 rows, chunks, 8-row groups, pages), from dim `first`
    on. Rows follow each other, unless there may be `gaps` between them. dtype: of the dims there, if the cache holds
    bytes of several types."""
    pages, page_size, row = cache.shape
    if const_expr(gaps):
        row = cute.assume(cache.stride[1], divby=128 // cache.element_type.width)
    page = page_size * Int64(row)
    if pages > 1:
        page = cache.stride[0]
    page = cute.assume(page, divby=128 // cache.element_type.width)
    start = cache.iterator + first
    if const_expr(dtype is not None):
        times = dtype.width // cache.element_type.width
        start, row = cute.recast_ptr(start, dtype=dtype), row // times
        page = cute.assume(page // times, divby=128 // dtype.width)
    return cute.make_tensor(
        start,
        cute.make_layout((width, GROUP, chunks, page_size // GROUP, pages), stride=(1, row, width, GROUP * row, page)),
    )


def box_layout(swizzle: int, width: int, chunks: int, groups: int) -> cute.ComposedLayout:
    """Layout of a box in shared memory; `swizzle` is the bytes of a swizzled row of `width` elements."""
    outer = cute.make_layout(
        (width, GROUP, chunks, groups, 1),
        stride=(1, width, width * GROUP, width * GROUP * chunks, width * GROUP * chunks * groups),
    )
    return cute.make_composed_layout(cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), 0, outer)


def partition(atom, boxes: cute.Tensor, places: cute.Tensor) -> tuple:
    """(copy atom, boxes by place in the page and page, shared boxes by place in the tile and stage)."""
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(places, 0, 5), cute.group_modes(boxes, 0, 5)
    )
    return atom, source, target


@cute.jit
def copy_box(
    atom: cute.CopyAtom,
    view: cute.Tensor,
    tiler: cutlass.Constexpr,
    chunk: cutlass.Constexpr,
    box: Box,
    shared: cute.Tensor,
    barrier: cute.Pointer,
) -> None:
    """Start copying one box, from chunk `chunk` of its rows on, to `shared`."""
    source = cute.local_tile(cute.domain_offset((0, 0, chunk, box.group, box.page), view), tiler, (0,) * 5)
    to, of = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 5), cute.group_modes(source, 0, 5)
    )
    cute.copy(atom, of, to, tma_bar_ptr=barrier)


@cute.jit
def copy_box_keys(
    cache: cute.Tensor,
    first_dim: Int32,
    dims: cutlass.Constexpr,
    source: KeySource,
    keys: Int32,
    box: Box,
    target: cute.Pointer,
) -> None:
    """Copy the keys of a box that count (bits of `keys`) by this warp's lanes, and zero its others; zero all where its
    page does not exist. The fence for the async proxy is left to the caller. `target` is the box's first 32-bit word in
    shared memory, in rows swizzled by 128 bytes."""
    keys = keys if exists(source, box.page) else Int32(0)
    element_bytes = bytes_of(cache.element_type.width)
    row_vectors = dims * element_bytes // VECTOR_BYTES
    for index in cutlass.range(BOX_KEYS * row_vectors // 32, unroll=4):
        vector = index * 32 + cute.arch.lane_idx()
        row = vector // row_vectors
        byte = vector % row_vectors * VECTOR_BYTES
        words = cute.make_rmem_tensor(VECTOR_WORDS, Int32)
        words.fill(0)
        if keys >> row & 1 != 0:
            dim = first_dim + byte // element_bytes
            found = cute.domain_offset((box.page, box.group * GROUP + row, dim), cache).iterator
            found = cute.recast_ptr(aligned(found, VECTOR_BYTES), dtype=Int32)
            cute.autovec_copy(cute.make_tensor(found, VECTOR_WORDS), words)
        atom = row // GROUP * (row_vectors // 8) + byte // 128
        line = row % GROUP
        word = (atom * 1024 + line * 128 + ((byte % 128) ^ (line * VECTOR_BYTES))) // 4
        cute.autovec_copy(words, cute.make_tensor(aligned(target + word, VECTOR_BYTES), VECTOR_WORDS))
