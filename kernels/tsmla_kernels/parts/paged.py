"""The paged latent cache as bulk tensor copies see it.

A row is one key: latent and rope dims. Copies move boxes of a few keys, which lie in one page whatever the page size,
so the page size stays a run-time value of the tensor map. In shared memory a box is (8-key groups, chunks, 8 keys, one
swizzled row): K-major as scores need it and MN-major as values do.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from .alignment import aligned
from .decode_work import Segment
from .division import Divisor
from .visible import Keys, Visibility, hides, seen_by_any

GROUP = 8
"""Rows of a swizzle atom."""
BOX_KEYS = 16
"""Keys of one copy: the smallest page."""
WINDOW = 32 * BOX_KEYS
"""Keys whose pages the lanes of a warp know together. Windows start at multiples, so that box i is with lane i % 32."""


class Pages(NamedTuple):
    """Where a request's keys lie: its row of the page table, the size of a page and its log2, pages of the cache; and
    which count: the range of what some of a segment's rows see, and what these are."""

    table: cute.Tensor
    size: Int32
    shift: Int32
    count: Int32
    keys: Keys
    view: Visibility
    request: Int32
    first_row: Int32
    rows: Int32
    heads: Divisor


class Lookup(NamedTuple):
    """Pages of 32 boxes, one in each lane of a warp, and of the 32 that follow: entries of the page table are read long
    before the copies that need them. A box without a key that counts has a page that does not exist."""

    known: Int32
    ahead: Int32


class Box(NamedTuple):
    """Where a box starts: page, and 8-row group in it."""

    page: Int32
    group: Int32


@cute.jit
def pages_of(
    block_tables: cute.Tensor, cache: cute.Tensor, view: Visibility, segment: Segment, heads: Divisor
) -> Pages:
    """`block_tables` is [batch, max pages] int32, `cache` [pages, page size, dims]; the page size is a power of two."""
    size = cache.shape[1]
    return Pages(
        block_tables[segment.request, None], size, cute.arch.popc(size - 1), cache.shape[0], segment.keys,
        view, segment.request, segment.first_row, segment.rows, heads,
    )  # fmt: skip


@cute.jit
def look_up(pages: Pages, key: Int32) -> Lookup:
    """For the window that `key` is in."""
    start = key // WINDOW * WINDOW
    return Lookup(_page_of_lane(pages, start), _page_of_lane(pages, start + WINDOW))


@cute.jit
def look_further(pages: Pages, lookup: Lookup, key: Int32) -> Lookup:
    """`lookup` as it must be at `key`, where a tile starts and perhaps the next window."""
    if key % WINDOW == 0:
        lookup = Lookup(lookup.ahead, _page_of_lane(pages, key + WINDOW))
    return lookup


@cute.jit
def box_at(pages: Pages, lookup: Lookup, key: Int32) -> Box:
    """The box from `key` on, which is in the lookup's window."""
    page = cute.arch.shuffle_sync(lookup.known, key // BOX_KEYS % 32)
    return Box(page, (key & (pages.size - 1)) // GROUP)


@cute.jit
def box_with(pages: Pages, lookup: Lookup, key: Int32, keys: Int32) -> Box:
    """The same, in the page that does not exist if no key of it counts; `keys` are those that do."""
    box = box_at(pages, lookup, key)
    return Box(cutlass.select_(keys == 0, pages.count, box.page), box.group)


@cute.jit
def _page_of_lane(pages: Pages, first: Int32) -> Int32:
    key = first + cute.arch.lane_idx() * BOX_KEYS
    page = pages.count
    if key < pages.keys.end and key + BOX_KEYS > pages.keys.first:
        page = existing(pages.table[key >> pages.shift], pages.count)
    return page


@cute.jit
def existing(page: Int32, pages: Int32) -> Int32:
    """`page`, an entry of a page table, or where the cache of `pages` pages has no such page, the one beyond its last:
    it reads as zeros."""
    return Int32(cutlass.min(Uint32(page), Uint32(pages)))


@cute.jit
def boxes_view(cache: cute.Tensor, first: cutlass.Constexpr, width: cutlass.Constexpr, chunks: cutlass.Constexpr):
    """[pages, page size, dims] -> (dims of a swizzled row, 8 rows, chunks, 8-row groups, pages) from dim `first`."""
    pages, page_size, row = cache.shape
    page = page_size * Int64(row)
    if pages > 1:
        page = cache.stride[0]
    page = cute.assume(page, divby=128 // cache.element_type.width)
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
def is_whole(pages: Pages, key: Int32, keys: cutlass.Constexpr) -> Boolean:
    """Whether surely all of `keys` keys from `key` on count."""
    return key >= pages.keys.first and key + keys <= pages.keys.end and not hides(pages.view)


@cute.jit
def counting(pages: Pages, key: Int32) -> Int32:
    """Which keys of the box from `key` on count, as bits. All lanes of a warp must ask together."""
    mine = key + cute.arch.lane_idx()
    counts = mine >= pages.keys.first and mine < pages.keys.end
    if hides(pages.view):
        counts = counts and seen_by_any(
            pages.view, pages.request, pages.first_row, pages.rows, pages.heads, mine
        )
    return cute.arch.vote_ballot_sync(counts) & ALL_KEYS


@cute.jit
def is_partial(keys: Int32) -> Boolean:
    """Whether some but not all keys of a box count; `keys` are those that do."""
    return keys != 0 and keys != ALL_KEYS


ALL_KEYS = (1 << BOX_KEYS) - 1
PIECE = 16
"""Bytes that a lane copies at a time."""


@cute.jit
def copy_box_keys(
    cache: cute.Tensor,
    first_dim: Int32,
    dims: cutlass.Constexpr,
    pages: Pages,
    keys: Int32,
    box: Box,
    target: cute.Pointer,
) -> None:
    """Copy the `keys` that count of a box by this warp's lanes and zero its others, and all where its page does not
    exist; a fence for the async proxy is the caller's. `target` is the box's first 32-bit word in shared memory, in
    rows swizzled by 128 bytes."""
    keys = keys if box.page < pages.count else Int32(0)
    element_bytes = cache.element_type.width // 8
    row_pieces = dims * element_bytes // PIECE
    for index in cutlass.range(BOX_KEYS * row_pieces // 32, unroll=4):
        piece = index * 32 + cute.arch.lane_idx()
        row = piece // row_pieces
        byte = piece % row_pieces * PIECE
        words = cute.make_rmem_tensor(PIECE // 4, Int32)
        words.fill(0)
        if keys >> row & 1 != 0:
            dim = first_dim + byte // element_bytes
            source = cute.domain_offset((box.page, box.group * GROUP + row, dim), cache).iterator
            source = cute.recast_ptr(aligned(source, PIECE), dtype=Int32)
            cute.autovec_copy(cute.make_tensor(source, PIECE // 4), words)
        atom = row // GROUP * (row_pieces // 8) + byte // 128
        line = row % GROUP
        word = (atom * 1024 + line * 128 + ((byte % 128) ^ (line * PIECE))) // 4
        cute.autovec_copy(words, cute.make_tensor(aligned(target + word, PIECE), PIECE // 4))
