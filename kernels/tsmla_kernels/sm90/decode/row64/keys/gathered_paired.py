"""The stream of rows that are gathered one by one, and that pairs of CTAs convert for each other: warps that convert
read the rows of listed keys through registers, as `paired.py` has it. A loading warp tells which keys are there, and
gathers rope pieces for its own CTA."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .....limits import VECTOR_BYTES
from .....parts.division import Divisor
from .....parts.keys.listed import (
    Lines,
    ListedKeys,
    entry_of,
    for_each_tile,
    gather,
    lane_keys,
    place_of,
    slot_of,
    tell_there,
)
from .....parts.keys.source import BOX_KEYS
from .....parts.keys.visible import Viewers, Visibility, viewers_of
from .....parts.query import Query
from ...work.task import Task, for_each_task
from ..geometry import TILE_KV, DecodeGeometry
from ..load import load_query
from ..storage import Shared
from .gathered import Gathers
from .paired import Lane, PairedStream, StoredKey, stored_key
from .stream import Keys


class ListedTask(NamedTuple):
    """What a lane asks of a task: its key of the first tile."""

    source: ListedKeys
    viewers: Viewers
    first_key: Int32

    def entry(self, index: Int32) -> Int32:
        """The table's entry for this lane's key of tile `index`."""
        return entry_of(self.source, self.viewers, self.first_key + index * TILE_KV)


class Entries(NamedTuple):
    """The entries of this lane's keys of a tile and of the next one."""

    known: Int32
    ahead: Int32


class GatheredPairedStream(Gathers, PairedStream):
    """The stream of gathered rows of which each CTA of a pair converts half, for both."""

    def load(self, loader: int, places: None, query: Query, keys: Keys, shared: Shared, called: tuple) -> None:
        view, heads, _ = called
        gather_rope(query, keys.source, shared, self.geometry, view, heads)

    def wanted(self, keys: Keys, lane: Lane, task: Task, viewers: Viewers) -> ListedTask:
        return ListedTask(keys.source, viewers, task.first_tile * TILE_KV + lane.box * BOX_KEYS + lane.key)

    def begin(self, wanted: ListedTask) -> Entries:
        return Entries(wanted.entry(Int32(0)), wanted.entry(Int32(1)))

    def move_on(self, wanted: ListedTask, lookup: Entries, index: Int32) -> Entries:
        return Entries(lookup.ahead, wanted.entry(index + 1))

    def find(
        self, keys: Keys, lane: Lane, wanted: ListedTask, viewers: Viewers, lookup: Entries, index: Int32
    ) -> StoredKey:
        source = wanted.source
        slot = slot_of(source, lookup.known, wanted.first_key + index * TILE_KV)
        row = source.rows.start + Int64(place_of(source, source.rows, slot)) * VECTOR_BYTES
        return stored_key(self.geometry, lane, row, slot >= 0)


@cute.jit
def gather_rope(
    query: Query, source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor,
) -> None:  # fmt: skip
    """Load the query rows of every task, tell of every tile which keys are there, and gather their rope pieces."""
    act = functools.partial(_gather_task, query, source, shared, geometry, view, heads)
    for_each_task(shared.dealt, act)


@cute.jit
def _gather_task(
    query: Query, source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor, number: Int32, task: Task,
) -> None:  # fmt: skip
    viewers = viewers_of(view, task, heads)
    mine = lane_keys(source, viewers, task.first_tile * TILE_KV + cute.arch.lane_idx(), TILE_KV)
    load_query(query, shared, geometry, task, heads)
    act = functools.partial(_gather_tile, source, shared, geometry)
    for_each_tile(mine, task.tiles, TILE_KV, task.first_count, act)


@cute.jit
def _gather_tile(
    source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], count: Int32, slots: tuple,
) -> None:  # fmt: skip
    """Tell which keys of tile number `count` are there, and gather their rope pieces."""
    first_edge, last_edge = shared.edges.kv[0], shared.edges.kv[-1]
    rope, number = geometry.stored.piece("rope"), geometry.latent_strips
    first_edge.wait_empty(count)
    tell_there(shared.exchange.there[None, first_edge.stage(count)], slots)
    first_edge.hand_over(count)
    last_edge.wait_empty(count)
    target = shared.keys.loaded[number] + last_edge.stage(count) * geometry.strip_bytes[number]
    start = source.rows.start + geometry.stored.offset("rope")
    for half, slot in enumerate(slots):
        gather(start, place_of(source, source.rows, slot), Lines(rope.bytes, 1), target, 32 * half, 32)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    last_edge.publish(count)
