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

from ..division import Divisor, divisor_of, quotient
from ..ptx import copy_vector
from .visible import MOST, Viewers, seen_by_any

VECTOR = 16
"""Bytes that a lane copies at a time."""
NO_ROW = -1
"""Place of the row of a key that does not exist, or that nobody sees."""


class ListedKeys(NamedTuple):
    """Where a call's keys lie: key c of request b is number c % entry_keys of entry table[b, c // entry_keys], which
    names the `entry_keys` slots of the cache from slot entry x entry_keys on. Slot s is row s % page_size of page
    s // page_size. The cache has `entries` times as many slots; entries that are negative or not below that name no
    key. page_vectors, row_vectors: from one page, or row, to the next, in vectors of 16 bytes."""

    table: cute.Tensor
    entry_keys: Int32
    entries: Int32
    page_size: Divisor
    page_vectors: Int32
    row_vectors: Int32

    @property
    def capacity(self) -> Int64:
        """Keys of a request that the table has entries for."""
        return Int64(self.table.shape[1]) * self.entry_keys


@cute.jit
def listed_keys(cache: cute.Tensor, table: cute.Tensor, entry_keys: Int32) -> ListedKeys:
    """The keys, on the host, that a table [requests, width] int32 lists of a cache [pages, page size, columns], whose
    rows follow each other within a page."""
    pages, page_size, columns = cache.shape
    vector = VECTOR * 8 // cache.element_type.width
    row_vectors = columns // vector
    page_vectors = Int64(page_size) * row_vectors
    if pages > 1:
        page_vectors = cache.stride[0] // vector
    slots = cutlass.min(Int64(pages) * page_size, Int64(MOST))
    return ListedKeys(
        table, entry_keys, Int32(slots // entry_keys), divisor_of(page_size), Int32(page_vectors), Int32(row_vectors)
    )  # fmt: skip


@cute.jit
def entry_of(keys: ListedKeys, viewers: Viewers, key: Int32) -> Int32:
    """The table's entry for a key, negative where nobody sees the key."""
    entry = Int32(NO_ROW)
    if seen_by_any(viewers, key):
        entry = keys.table[viewers.request, key >> _shift(keys)]
    return entry


def names_key(keys: ListedKeys, entry: Int32) -> Boolean:
    """Whether the cache has the slots that an entry names."""
    return (entry >= 0) & (entry < keys.entries)


@cute.jit
def row_of(keys: ListedKeys, entry: Int32, key: Int32) -> Int32:
    """The vectors of 16 bytes from the start of the cache to the row of a key, whose entry this is; NO_ROW where there
    is none."""
    known = Int32(select_(names_key(keys, entry), entry, Int32(0)))
    slot = (known << _shift(keys)) + (key & (keys.entry_keys - 1))
    page = quotient(slot, keys.page_size)
    place = page * keys.page_vectors + (slot - page * keys.page_size.value) * keys.row_vectors
    return Int32(select_(names_key(keys, entry), place, Int32(NO_ROW)))


@cute.jit
def entries_of(listed: ListedKeys, viewers: Viewers, key: Int32, keys: cutlass.Constexpr[int]) -> tuple[Int32, ...]:
    """The entries of this lane's keys among `keys` of a tile: `key`, and every 32nd behind it."""
    return tuple(entry_of(listed, viewers, key + 32 * part) for part in range(max(1, keys // 32)))


@cute.jit
def tell_there(words: cute.Tensor, rows: tuple) -> None:
    """Write, by a warp, which keys of a tile are there, a bit for each; `rows` are those of each lane's keys."""
    found = tuple(cute.arch.vote_ballot_sync(row >= 0) for row in rows)
    if cute.arch.lane_idx() == 0:
        for word in cutlass.range_constexpr(len(rows)):
            words[word] = found[word]
    cute.arch.sync_warp()


def _shift(keys: ListedKeys) -> Int32:
    return cute.arch.popc(keys.entry_keys - 1)


@dataclasses.dataclass(frozen=True)
class Lines:
    """A piece of rows that is gathered together, as lines of 16 to 128 bytes, and where these lie in shared memory.

    A row has `lines` lines of `line_bytes` bytes. In shared memory eight keys are a group: lines
    of one number of its keys lie one behind the other, swizzled over the bytes of a line; behind them, those of the
    next number."""

    line_bytes: int
    lines: int

    def __post_init__(self) -> None:
        assert self.line_bytes in (VECTOR, 64, 128), self
        assert self.lines == 1 or self.line_bytes > VECTOR, self

    @property
    def lanes(self) -> int:
        """Lanes that copy a line together."""
        return self.line_bytes // VECTOR

    @property
    def keys(self) -> int:
        """Keys whose lines a warp copies together."""
        return 32 // self.lanes

    @property
    def group_bytes(self) -> int:
        return 8 * self.line_bytes * self.lines

    def place(self, first_key: int, lane: Int32) -> Int32:
        """Where this lane's vector of line 0 goes, of the `keys` keys from `first_key` on."""
        key, vector = first_key + lane // self.lanes, lane % self.lanes
        turned = vector ^ (key * self.line_bytes >> 7) % self.lanes if self.lanes > 1 else vector
        return key // 8 * self.group_bytes + key % 8 * self.line_bytes + turned * VECTOR


@cute.jit
def gather(
    base: Int64,
    row: Int32,
    lines: cutlass.Constexpr[Lines],
    target: Int32,
    first_key: Int32,
    keys: cutlass.Constexpr[int],
    at_once: cutlass.Constexpr[int] = 8,
) -> None:
    """Start copying a piece of up to 32 rows, by a warp, to shared memory, where those of the tile begin at `target`.
    base: address of the piece in the cache's first row. row: where the row of key `first_key` + the lane's number lies,
    in the first `keys` lanes; where there is none, zeros are written. at_once: steps that stand in the code one behind
    the other; more take more registers."""
    lane = cute.arch.lane_idx()
    own = base + (lane % lines.lanes) * VECTOR
    steps = const_expr(keys // lines.keys)
    if const_expr(steps <= at_once):
        for step in cutlass.range_constexpr(steps):
            _gather_step(own, row, lines, target, first_key, step * lines.keys)
    else:
        for step in cutlass.range(steps, unroll=at_once):
            _gather_step(own, row, lines, target, first_key, step * lines.keys)


@cute.jit
def _gather_step(
    own: Int64, row: Int32, lines: cutlass.Constexpr[Lines], target: Int32, first_key: Int32, step_key: Int32
) -> None:
    """Start copying the rows of `lines.keys` keys, from number `step_key` of those that the lanes' rows are of."""
    lane = cute.arch.lane_idx()
    found = cute.arch.shuffle_sync(row, step_key + lane // lines.lanes)
    size = Int32(select_(found < 0, Int32(0), Int32(VECTOR)))
    source = own + Int64(cutlass.max(found, 0)) * VECTOR
    place = target + lines.place(first_key + step_key, lane)
    for line in cutlass.range_constexpr(lines.lines):
        copy_vector(place, 8 * line * lines.line_bytes, source, line * lines.line_bytes, size)


@cute.jit
def gather_whole(
    base: Int64, row: Int32, row_vectors: cutlass.Constexpr[int], target: Int32, at_once: cutlass.Constexpr[int]
) -> None:
    """Start copying 32 whole rows, by a warp, to shared memory from `target` on, one behind the other. base: address of
    the cache. row: where the row of the lane's key lies; where there is none, zeros are written."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range(row_vectors, unroll=at_once):
        vector = step * 32 + lane
        key = vector // row_vectors
        found = cute.arch.shuffle_sync(row, key)
        size = Int32(select_(found < 0, Int32(0), Int32(VECTOR)))
        source = base + Int64(cutlass.max(found, 0) + vector - key * row_vectors) * VECTOR
        copy_vector(target + vector * VECTOR, 0, source, 0, size)
