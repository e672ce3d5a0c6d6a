"""Role `load` of the Hopper decode: warps that fill the rings of the query and of the cache's strips."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ....parts.division import Divisor, remainder
from ....parts.keys.source import (
    BOX_KEYS,
    EVICT_FIRST,
    EVICT_NORMAL,
    KeySource,
    Lookup,
    follow,
    look_up,
    place_in_page,
    wanted_of,
)
from ....parts.query import NO_LINES, Query, copy_rows, copy_tile
from ..work.task import Task, border_tile, count_over_tasks
from .geometry import TILE_KV, DecodeGeometry
from .storage import Shared

BOXES = TILE_KV // BOX_KEYS
"""Boxes of a tile."""
Q_LOADER = 1
"""Number of the loading warp that loads the query, before its strips: scores need others first."""


class Loading(NamedTuple):
    """What loading warp number `loader` brings, and where to. `boxes` and `tiles` are (copy atom, tiles) of strips of
    the cache, 16 keys or a whole tile at a time, which is quicker where a page holds it. hidden: whether keys in the
    middle of what rows see may be hidden. varying: whether requests differ in query tokens."""

    query: Query
    boxes: tuple
    tiles: tuple
    source: KeySource
    heads: Divisor
    hidden: Boolean
    varying: bool
    loader: int


@cute.jit
def load(loading: Loading, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry]) -> None:
    """Load the strips that a loading warp has of every tile; one loads the query, too."""
    count_over_tasks(shared.dealt, functools.partial(_load_task, loading, shared, geometry))


@cute.jit
def _load_task(
    loading: Loading, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], number: Int32, task: Task,
    borders: Int32,
) -> Int32:  # fmt: skip
    """Load a task. `clean`, if there is one, waits for the copies of border tiles, and for those of all tiles if keys
    in their middle may be hidden. Returns how many such tiles there were, `borders` of which came before.

    A lane keeps the page of one box, for 8 tiles, and has the next ones under way. Boxes that hold no visible key are
    read beyond the last page, where everything is zero; so are those whose page does not exist."""
    query, boxes, tiles, key_source, heads, hidden, varying, loader = loading
    policy = Int64(EVICT_FIRST)
    if const_expr(varying):
        if task.kept:
            policy = Int64(EVICT_NORMAL)
    wanted = wanted_of(key_source, task, BOXES)
    lookup = look_up(wanted)
    if const_expr(loader == Q_LOADER):
        load_query(query, shared, geometry, task, heads)
    for index in cutlass.range(task.tiles, unroll=1):
        lookup = follow(wanted, lookup, index * BOXES)
        count = task.first_count + index
        tile = task.first_tile + index
        is_border = border_tile(task, tile, geometry.tile_kv) | hidden
        landing = remainder(borders, Int32(geometry.stages))
        whole = (key_source.page_size >= geometry.tile_kv) & (not is_border)
        tile_page = lookup.page_of(index * BOXES)
        tile_place = place_in_page(key_source, tile, geometry.tile_kv)
        for number in geometry.loaded_strips(loader):
            edge = shared.edges.kv[number]
            edge.wait_empty(count)
            stage = edge.stage(count)
            strips = geometry.copied_with(number)
            if const_expr(geometry.ctas > 1):
                barrier = edge.announce_copies(count, geometry.strip_bytes[-1])
            elif const_expr(shared.edges.landed is None):
                barrier = edge.announce(count)
            else:
                barrier = edge.announce_or_divert(count, is_border, shared.edges.landed, landing)
            if whole:
                for strip in strips:
                    atom, source, target = tiles[strip]
                    cute.copy(
                        atom, source[None, tile_place, tile_page], target[None, 0, stage],
                        tma_bar_ptr=barrier, cache_policy=policy,
                    )  # fmt: skip
            else:
                _copy_boxes(key_source, lookup, index, tile, boxes, strips, stage, barrier, policy)
        if is_border:
            borders += 1
    return borders


@cute.jit
def _copy_boxes(
    key_source: KeySource, lookup: Lookup, index: Int32, tile: Int32, boxes, strips: cutlass.Constexpr, stage: Int32,
    barrier: cute.Pointer, policy: Int64,
):  # fmt: skip
    """Copy the boxes of `strips` of a tile, which is number `index` of its task."""
    for box in cutlass.range(BOXES, unroll=1):
        page = lookup.page_of(index * BOXES + box)
        place = place_in_page(key_source, tile * BOXES + box, BOX_KEYS)
        for strip in strips:
            atom, source, target = boxes[strip]
            cute.copy(
                atom, source[None, place, page], target[None, box, stage], tma_bar_ptr=barrier, cache_policy=policy,
            )  # fmt: skip


@cute.jit
def load_query(query: Query, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], task: Task, heads: Divisor):
    """Load the rows of a task that has tiles, and up to a whole tile rows that are zeros or copies of others."""
    tile = geometry.query_tile
    if task.tiles > 0:
        shared.edges.q.wait_empty(task.loads)
        if query.rows.lines == NO_LINES:
            last_row = task.first_row + task.rows - 1
            copy_rows(query.rows, tile, shared.query.words, task.request, task.first_row, last_row, heads)
            shared.edges.q.hand_over(task.loads)
        else:
            barrier = shared.edges.q.announce(task.loads)
            copy_tile(query, tile, shared.query.tile, task.request, task.first_row, heads, barrier)
