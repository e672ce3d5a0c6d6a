"""Keys that are gathered one by one: where the row of each key lies, and the copies that bring rows.

A table lists keys, or runs of a few keys, in any order; what it says may be anything. Rows come by copies of 16 bytes a
lane (`cp.async`), which need neither a tensor map nor an order, and write zeros where there is no row."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_

from ...limits import VECTOR_BYTES
from ..division import Divisor, divisor_of, quotient
from ..ptx import copy_vector
from .visible import MOST, Viewers, seen_by_any

NO_KEY = -1
"""Entry, slot and place of a key that does not exist, or that nobody sees."""


class Rows(NamedTuple):
    """Where a cache's rows lie, or one of their pieces: `start`, the address in the first row; and how far it is from
    one page, or row, to the next, in vectors of 16 bytes."""

    start: Int64
    page_vectors: Int32
    row_vectors: Int32


class ListedKeys(NamedTuple):
    """Where a call's keys lie: key c of request b is number c % entry_keys of entry table[b, c // entry_keys], which
    names the `entry_keys` slots of the cache from slot entry x entry_keys on. Slot s is row s % page_size of page
    s // page_size. The cache has `entries` times as many slots; entries that are negative or not below that name no
    key. rows: the cache's rows. rope: their rope pieces, which may lie in a tensor of their own; None where rows are
    copied whole."""

    table: cute.Tensor
    entry_keys: Int32
    entries: Int32
    page_size: Divisor
    rows: Rows
    rope: Rows | None

    @property
    def capacity(self) -> Int64:
        """Keys of a request that the table has entries for."""
        return Int64(self.table.shape[1]) * self.entry_keys


@cute.jit
def listed_keys(given, rope_at: cutlass.Constexpr[int | None]) -> ListedKeys:
    """The keys of a call, on the host. given: what the call's table lists, by name: `block_tables` [requests, width]
    int32 lists keys of `kv_cache` [pages, page size, columns]. rope_at: the byte of a row that its rope piece begins
    with, unless `rope_cache` [pages, page size, rope columns] has the rope pieces; None where that always has them, or
    rows are copied whole, and there is no such tensor."""
    cache = given.kv_cache
    slots = cutlass.min(Int64(cache.shape[0]) * cache.shape[1], Int64(MOST))
    rows, rope = _rows_of(cache), None
    if const_expr(rope_at is None and given.rope_cache is not None):
        rope = _rows_of(given.rope_cache)
    if const_expr(rope_at is not None):
        rope = rows._replace(start=rows.start + rope_at)
        if given.rope_cache.shape[0] > 0:
            rope = _rows_of(given.rope_cache)
    return ListedKeys(
        given.block_tables, given.entry_keys, Int32(slots // given.entry_keys), divisor_of(cache.shape[1]), rows, rope
    )


def _rows_of(cache: cute.Tensor) -> Rows:
    """Where the rows of a cache lie. A stride of an extent of 1 may be any number, and is not multiplied by any but
    0."""
    vector = VECTOR_BYTES * 8 // cache.element_type.width
    page_vectors, row_vectors = (Int32(stride // vector) for stride in cache.stride[:2])
    return Rows(cache.iterator.toint(), page_vectors, row_vectors)


@cute.jit
def entry_of(keys: ListedKeys, viewers: Viewers, key: Int32) -> Int32:
    """The table's entry for a key, negative where nobody sees the key."""
    entry = Int32(NO_KEY)
    if viewers.keys.holds(key):  # it holds none where there are no rows to ask
        if seen_by_any(viewers, key):
            entry = keys.table[viewers.request, key >> _shift(keys)]
    return entry


def names_key(keys: ListedKeys, entry: Int32) -> Boolean:
    """Whether the cache has the slots that an entry names."""
    return (entry >= 0) & (entry < keys.entries)


@cute.jit
def slot_of(keys: ListedKeys, entry: Int32, key: Int32) -> Int32:
    """The slot of a key, whose entry this is; NO_KEY where there is none."""
    slot = (entry << _shift(keys)) + (key & (keys.entry_keys - 1))
    return Int32(select_(names_key(keys, entry), slot, Int32(NO_KEY)))


@cute.jit
def place_of(keys: ListedKeys, rows: Rows, slot: Int32) -> Int32:
    """The vectors of 16 bytes from the start of `rows` to that of a slot; NO_KEY where there is none."""
    known = cutlass.max(slot, 0)
    page = quotient(known, keys.page_size)
    place = page * rows.page_vectors + (known - page * keys.page_size.value) * rows.row_vectors
    return Int32(select_(slot < 0, Int32(NO_KEY), place))


def page_and_row(keys: ListedKeys, slot: Int32) -> tuple[Int32, Int32]:
    """Where in its cache a slot is."""
    page = quotient(slot, keys.page_size)
    return page, slot - page * keys.page_size.value


@cute.jit
def entries_of(listed: ListedKeys, viewers: Viewers, key: Int32, keys: cutlass.Constexpr[int]) -> tuple[Int32, ...]:
    """The entries of this lane's keys among `keys` of a tile: `key`, and every 32nd behind it."""
    return tuple(entry_of(listed, viewers, key + 32 * number) for number in range(max(1, keys // 32)))


class LaneKeys(NamedTuple):
    """Keys of tiles that a lane looks up: every 32nd of each tile; its first one in the first tile, and the table's
    entries for those of the first tile."""

    listed: ListedKeys
    viewers: Viewers
    first_key: Int32
    entries: tuple[Int32, ...]


@cute.jit
def lane_keys(listed: ListedKeys, viewers: Viewers, first_key: Int32, keys: cutlass.Constexpr[int]) -> LaneKeys:
    """Begin to look up this lane's keys among `keys` of each tile; `first_key` is its first in the first tile."""
    return LaneKeys(listed, viewers, first_key, entries_of(listed, viewers, first_key, keys))


@cute.jit
def for_each_tile(
    mine: LaneKeys, tiles: Int32, tile_kv: cutlass.Constexpr[int], first_count: Int32 | int, act: cutlass.Constexpr,
    places: cutlass.Constexpr[bool] = False,
) -> None:  # fmt: skip
    """Call `act(count, slots)` for each of `tiles` tiles of `tile_kv` keys, counted from `first_count` on, with the
    slots of this lane's keys; with `places`, `act(count, slots, places)`, the places of their rows, too. Entries of the
    table are read a tile ahead."""
    listed, viewers, first_key, ahead = mine
    keys = 32 * len(ahead)
    for index in cutlass.range(tiles, unroll=1):
        count, key = first_count + index, first_key + index * tile_kv
        found = (tuple(slot_of(listed, entry, key + 32 * number) for number, entry in enumerate(ahead)),)
        if const_expr(places):
            found += (tuple(place_of(listed, listed.rows, slot) for slot in found[0]),)
        ahead = entries_of(listed, viewers, key + tile_kv, keys)
        act(count, *found)


@cute.jit
def tell_there(words: cute.Tensor, slots: tuple) -> None:
    """Write, by a warp, which keys of a tile are there, a bit for each; `slots` are those of each lane's keys."""
    found = tuple(cute.arch.vote_ballot_sync(slot >= 0) for slot in slots)
    if cute.arch.lane_idx() == 0:
        for word in cutlass.range_constexpr(len(slots)):
            words[word] = found[word]
    cute.arch.sync_warp()


def _shift(keys: ListedKeys) -> Int32:
    return cute.arch.popc(keys.entry_keys - 1)


@dataclasses.dataclass(frozen=True)
class Lines:
    """A piece of rows that is gathered together, as lines of 16 to 128 bytes, and where these lie in shared memory.

    A row has `lines` lines of `line_bytes` bytes. In shared memory eight keys are a group: it begins with the first
    line of each of them, one behind the other, then comes the second line of each, and so on. Vectors of 16 bytes are
    swizzled within a line. room: lines of a key that a group has room for; 0 for as many as are gathered."""

    line_bytes: int
    lines: int
    room: int = 0

    def __post_init__(self) -> None:
        assert self.line_bytes in (VECTOR_BYTES, 64, 128), self
        assert self.lines == 1 or self.line_bytes > VECTOR_BYTES, self

    @property
    def lanes(self) -> int:
        """Lanes that copy a line together."""
        return self.line_bytes // VECTOR_BYTES

    @property
    def keys(self) -> int:
        """Keys whose lines a warp copies together."""
        return 32 // self.lanes

    @property
    def group_bytes(self) -> int:
        return self.offset(self.room or self.lines)

    def offset(self, line: int) -> int:
        """Bytes from a group's first line to its first key's line number `line`."""
        return 8 * self.line_bytes * line

    def place(self, first_key: int, lane: Int32) -> Int32:
        """Where this lane's vector of line 0 goes, of the `keys` keys from `first_key` on."""
        key, vector = first_key + lane // self.lanes, lane % self.lanes
        turned = vector ^ (key * self.line_bytes >> 7) % self.lanes if self.lanes > 1 else vector
        return key // 8 * self.group_bytes + key % 8 * self.line_bytes + turned * VECTOR_BYTES


@cute.jit
def gather(
    start: Int64,
    place: Int32,
    lines: cutlass.Constexpr[Lines],
    target: Int32,
    first_key: Int32,
    keys: cutlass.Constexpr[int],
    at_once: cutlass.Constexpr[int] = 8,
) -> None:
    """Start copying a piece of up to 32 rows, by a warp, to shared memory, where those of the tile begin at `target`.
    start: address of the piece in the cache's first row. place: that of the row of key `first_key` + the lane's number,
    in the first `keys` lanes; where there is none, zeros are written. at_once: steps that stand in the code one behind
    the other; more take more registers."""
    lane = cute.arch.lane_idx()
    own = start + (lane % lines.lanes) * VECTOR_BYTES
    steps = keys // lines.keys
    if const_expr(steps <= at_once):
        for step in cutlass.range_constexpr(steps):
            _gather_step(own, place, lines, target, first_key, step * lines.keys)
    else:
        for step in cutlass.range(steps, unroll=at_once):
            _gather_step(own, place, lines, target, first_key, step * lines.keys)


@cute.jit
def _gather_step(
    own: Int64, place: Int32, lines: cutlass.Constexpr[Lines], target: Int32, first_key: Int32, step_key: Int32
) -> None:
    """Start copying the rows of `lines.keys` keys, from number `step_key` of those that the lanes' places are of."""
    lane = cute.arch.lane_idx()
    found = cute.arch.shuffle_sync(place, step_key + lane // lines.lanes)
    size = Int32(select_(found < 0, Int32(0), Int32(VECTOR_BYTES)))
    source = own + Int64(cutlass.max(found, 0)) * VECTOR_BYTES
    vector = target + lines.place(first_key + step_key, lane)
    for line in cutlass.range_constexpr(lines.lines):
        copy_vector(vector, lines.offset(line), source, line * lines.line_bytes, size)


@cute.jit
def gather_whole(
    start: Int64, place: Int32, row_vectors: cutlass.Constexpr[int], target: Int32, at_once: cutlass.Constexpr[int]
) -> None:
    """Start copying 32 whole rows, by a warp, to shared memory from `target` on, one behind the other. start: address
    of the cache. place: that of the row of the lane's key; where there is none, zeros are written."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range(row_vectors, unroll=at_once):
        vector = step * 32 + lane
        key = vector // row_vectors
        found = cute.arch.shuffle_sync(place, key)
        size = Int32(select_(found < 0, Int32(0), Int32(VECTOR_BYTES)))
        source = start + Int64(cutlass.max(found, 0) + vector - key * row_vectors) * VECTOR_BYTES
        copy_vector(target + vector * VECTOR_BYTES, 0, source, 0, size)
