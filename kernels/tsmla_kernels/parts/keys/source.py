"""Where the keys of a request lie, and which of them exist: what the loaders of all architectures ask.

Keys lie in pages. Pages and tiles are whole *boxes* of BOX_KEYS keys. A lane keeps the page of one box, so that a warp
knows the pages of a *window* of LANE_BOXES boxes.

Keys that a table lists one by one, in any order: `listed.py`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .visible import Visibility, VisibleKeys, visibility

BOX_KEYS = 16
"""Keys of one copy: the smallest page; every page size is a multiple."""
LANE_BOXES = 32
"""Boxes of a window: each lane of a warp keeps the page of one."""
EVICT_FIRST = 0x12F0000000000000
"""Cache policy for keys that no other CTA reads later: they leave L2 first, so that partial results stay there until
they are combined. (Encoding: CUTLASS, include/cute/arch/copy_sm90_desc.hpp.)"""
EVICT_NORMAL = 0x1000000000000000
"""Cache policy for keys that other CTAs read later, too."""


class KeySource(NamedTuple):
    """The pages of a call's keys: key c of request b is row c % page_size of page table[b, c // page_size]. The cache
    has `pages` pages, whose size is a power of two; entries of the table that are negative or not below `pages` are
    pages that do not exist."""

    table: cute.Tensor
    page_size: Int32
    pages: Int32

    @property
    def capacity(self) -> Int64:
        """Keys of a request that the table has entries for."""
        return Int64(self.table.shape[1]) * self.page_size


class Wanted(NamedTuple):
    """The keys of one request that a loader brings: `keys`, in `tiles` tiles of `tile_boxes` boxes, from the request's
    box number `first_box` on."""

    source: KeySource
    request: Int32
    keys: VisibleKeys
    first_box: Int32
    tiles: Int32
    tile_boxes: int
    lane: Int32
    page_shift: Int32

    def key_of(self, box: Int32) -> Int32:
        """The first key of box number `box`, counted from the first box wanted."""
        return (self.first_box + box) * BOX_KEYS


class Lookup(NamedTuple):
    """Pages of the boxes of a window, one in each lane, and of the next window: the page table is read long before the
    copies that need it. A box without a wanted key has the page beyond the last."""

    known: Int32
    ahead: Int32

    def page_of(self, box: Int32) -> Int32:
        """The page of a box of the window; all lanes must ask together."""
        return cute.arch.shuffle_sync(self.known, box % LANE_BOXES)


def key_source(cache: cute.Tensor, table: cute.Tensor) -> KeySource:
    """The pages of a cache [pages, page size, columns], by a table [batch, most pages of a request] int32."""
    return KeySource(table, cache.shape[1], cache.shape[0])


def visibility_in(source: KeySource, given) -> Visibility:
    """Collect, on the host, what rows see of these keys, as far as the table has entries. given: what the call's table
    lists, by name."""
    return visibility(given, given.query.shape[0] * given.query.shape[1], source.capacity)


def wanted_of(source: KeySource, segment, tile_boxes: int) -> Wanted:
    """The keys that a loader brings for a segment, or for a task."""
    first_box = segment.first_tile * tile_boxes
    lane = cute.arch.lane_idx()
    shift = cute.arch.popc(source.page_size - 1)
    return Wanted(source, segment.request, segment.keys, first_box, segment.tiles, tile_boxes, lane, shift)


@cute.jit
def look_up(wanted: Wanted) -> Lookup:
    """Look up the pages of the first two windows."""
    return Lookup(_page_of(wanted, wanted.lane), _page_of(wanted, LANE_BOXES + wanted.lane))


@cute.jit
def follow(wanted: Wanted, lookup: Lookup, box: Int32) -> Lookup:
    """Return the lookup whose window has box number `box`, the first of a tile; `lookup` had the tile before. With a
    window, the pages of the one behind it are looked up."""
    if box > 0 and box % LANE_BOXES == 0:
        window = box // LANE_BOXES
        lookup = Lookup(lookup.ahead, _page_of(wanted, (window + 1) * LANE_BOXES + wanted.lane))
    return lookup


@cute.jit
def _page_of(wanted: Wanted, box: Int32) -> Int32:
    page = wanted.source.pages
    key = wanted.key_of(box)
    if wanted.keys.meets(key, BOX_KEYS) & (box < wanted.tiles * wanted.tile_boxes):
        page = wanted.source.table[wanted.request, key >> wanted.page_shift]
    return page


def place_in_page(source: KeySource, number: Int32, keys: int) -> Int32:
    """Where in its page span number `number` of a request lies, pages and requests being cut into spans of `keys`
    keys."""
    return number & (source.page_size // keys - 1)


def exists(source: KeySource, page: Int32) -> Boolean:
    """Whether the cache has this page. Copies from pages that it does not have read zeros."""
    return (page >= 0) & (page < source.pages)
