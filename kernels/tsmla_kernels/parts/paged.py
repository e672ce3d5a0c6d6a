"""The paged latent cache as bulk tensor copies see it.

A row is one key: latent and rope dims. Copies move boxes of a few keys, which lie in one page whatever the page size,
so the page size stays a run-time value of the tensor map. In shared memory a box is (8-key groups, chunks, 8 keys, one
swizzled row): K-major as scores need it and MN-major as values do.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from tsmla.support import LATENT_DIM, ROPE_DIM

from .alignment import aligned

DIMS = LATENT_DIM + ROPE_DIM
GROUP = 8
"""Rows of a swizzle atom."""


class Pages(NamedTuple):
    """Where a request's keys lie: its row of the page table, log2 of the page size, pages of the whole cache."""

    table: cute.Tensor
    shift: Int32
    count: Int32


@cute.jit
def pages_of(block_tables: cute.Tensor, cache: cute.Tensor, request: Int32) -> Pages:
    """`block_tables` is [batch, max pages] int32, `cache` [pages, page size, dims]; the page size is a power of two."""
    return Pages(block_tables[request, None], cute.arch.popc(cache.shape[1] - 1), cache.shape[0])


class Box(NamedTuple):
    """Where a box starts: page, and 8-row group in it. A box outside of the range has a page that does not exist."""

    page: Int32
    group: Int32


@cute.jit
def box_at(pages: Pages, key: Int32, keys: cutlass.Constexpr, lo: Int32, hi: Int32) -> Box:
    """The box of `keys` keys from `key`; reads its page's entry only when it holds a key of lo .. hi - 1."""
    page = pages.count
    if key < hi and key + keys > lo:
        page = pages.table[key >> pages.shift]
    return Box(page, (key & ((Int32(1) << pages.shift) - 1)) // GROUP)


@cute.jit
def boxes_view(cache: cute.Tensor, first: cutlass.Constexpr, width: cutlass.Constexpr, chunks: cutlass.Constexpr):
    """[pages, page size, dims] -> (dims of a swizzled row, 8 rows, chunks, 8-row groups, pages) from dim `first`."""
    pages, page_size, row = cache.shape[0], cache.shape[1], DIMS
    page = page_size * Int64(row)
    if pages > 1:
        page = cache.stride[0]
    page = cute.assume(page, divby=16)
    return cute.make_tensor(
        cache.iterator + first,
        cute.make_layout((width, GROUP, chunks, page_size // GROUP, pages), stride=(1, row, width, GROUP * row, page)),
    )


def box_layout(swizzle: int, width: int, chunks: int, groups: int) -> cute.ComposedLayout:
    """A box in shared memory; `swizzle` is the bytes of a swizzled row of `width` elements."""
    outer = cute.make_layout(
        (width, GROUP, chunks, groups, 1),
        stride=(1, width, width * GROUP, width * GROUP * chunks, width * GROUP * chunks * groups),
    )
    return cute.make_composed_layout(cute.make_swizzle(swizzle.bit_length() - 5, 4, 3), 0, outer)


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
def is_partial(key: Int32, keys: cutlass.Constexpr, lo: Int32, hi: Int32) -> Boolean:
    """Whether some but not all of the box's keys are of lo .. hi - 1."""
    inside = cutlass.min(hi - key, keys) - cutlass.max(lo - key, 0)
    return inside > 0 and inside < keys


PIECE = 16
"""Bytes that a lane copies at a time."""


@cute.jit
def copy_box_keys(
    cache: cute.Tensor,
    first_dim: Int32,
    dims: cutlass.Constexpr,
    box: Box,
    keys: cutlass.Constexpr,
    lo: Int32,
    hi: Int32,
    target: cute.Pointer,
) -> None:
    """Copy keys lo .. hi - 1 of a box by this warp's lanes and zero its others; a fence for the async proxy is the
    caller's. `target` is the box's first 32-bit word in shared memory, in rows swizzled by 128 bytes."""
    element_bytes = cache.element_type.width // 8
    row_pieces = dims * element_bytes // PIECE
    for index in cutlass.range(keys * row_pieces // 32, unroll=4):
        piece = index * 32 + cute.arch.lane_idx()
        key = piece // row_pieces
        byte = piece % row_pieces * PIECE
        words = cute.make_rmem_tensor(PIECE // 4, Int32)
        words.fill(0)
        if key >= lo and key < hi:
            dim = first_dim + byte // element_bytes
            source = cute.domain_offset((box.page, box.group * GROUP + key, dim), cache).iterator
            source = cute.recast_ptr(aligned(source, PIECE), dtype=Int32)
            cute.autovec_copy(cute.make_tensor(source, PIECE // 4), words)
        row = key % GROUP
        atom = key // GROUP * (row_pieces // 8) + byte // 128
        word = (atom * 1024 + row * 128 + ((byte % 128) ^ (row * PIECE))) // 4
        cute.autovec_copy(words, cute.make_tensor(aligned(target + word, PIECE), PIECE // 4))
