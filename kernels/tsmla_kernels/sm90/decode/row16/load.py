"""Role `load_few` of the Hopper decode of few rows: one warp that fills the ring with rows as they are stored.

Rows of a page follow each other, so that a tile is one run of bytes where a page holds it, and four otherwise. Where
pieces lie apart, with any strides, tensor maps bring them (`maps.py`)."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ....limits import VECTOR_BYTES
from ....parts.alignment import shared_vector, wipe_vector
from ....parts.keys.source import (
    BOX_KEYS,
    EVICT_FIRST,
    KeySource,
    Lookup,
    Wanted,
    exists,
    follow,
    look_up,
    place_in_page,
    wanted_of,
)
from ....parts.ptx import bulk_copy
from ..work.task import Task, border_tile, for_each_task
from .geometry import TILE_KV, FewRowsGeometry
from .storage import Shared

BOXES = TILE_KV // BOX_KEYS
"""Boxes of a tile."""


@cute.jit
def load_apart(places: tuple, key_source: KeySource, shared: Shared) -> None:
    """Load every task from a cache whose pieces lie apart, by one warp; `places` as `places_of` gives them."""
    for_each_task(shared.dealt, functools.partial(_load_apart, places, key_source, shared))


@cute.jit
def _load_apart(places: tuple, key_source: KeySource, shared: Shared, number: Int32, task: Task) -> None:
    """Load every tile of a task.
    Boxes of 16 keys that nobody sees, or whose page does not exist, are read beyond the last page, where everything is
    zero."""
    wanted = wanted_of(key_source, task, BOXES)
    lookup = look_up(wanted)
    edge = shared.kv_edge
    policy = Int64(EVICT_FIRST)
    boxes, tiles = places
    for index in cutlass.range(task.tiles, unroll=1):
        lookup = follow(wanted, lookup, index * BOXES)
        count = task.first_count + index
        tile = task.first_tile + index
        page = lookup.page_of(index * BOXES)
        stage = edge.stage(count)
        barrier = edge.acquire(count)
        if (key_source.page_size >= TILE_KV) & (not border_tile(task, tile, TILE_KV)):
            place = place_in_page(key_source, tile, TILE_KV)
            for atom, source, target in tiles:
                cute.copy(
                    atom, source[None, place, page], target[None, 0, stage], tma_bar_ptr=barrier, cache_policy=policy
                )
        else:
            for box in cutlass.range(BOXES, unroll=1):
                box_page = lookup.page_of(index * BOXES + box)
                box_place = place_in_page(key_source, tile * BOXES + box, BOX_KEYS)
                for atom, source, target in boxes:
                    cute.copy(
                        atom, source[None, box_place, box_page], target[None, box, stage], tma_bar_ptr=barrier,
                        cache_policy=policy,
                    )  # fmt: skip


@cute.jit
def load_few(
    cache: cute.Tensor, key_source: KeySource, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry]
) -> None:
    """Load every task from `cache` [pages, page size, bytes of a row], by one warp."""
    for_each_task(shared.dealt, functools.partial(_load_rows, cache, key_source, shared, geometry))


@cute.jit
def _load_rows(
    cache: cute.Tensor, key_source: KeySource, shared: Shared, geometry: cutlass.Constexpr[FewRowsGeometry],
    number: Int32, task: Task,
) -> None:  # fmt: skip
    """Load every tile of a task. Boxes of 16 keys that nobody sees, or whose page does not exist, become zeros."""
    wanted = wanted_of(key_source, task, BOXES)
    lookup = look_up(wanted)
    edge = shared.kv_edge
    for index in cutlass.range(task.tiles, unroll=1):
        lookup = follow(wanted, lookup, index * BOXES)
        count = task.first_count + index
        tile = task.first_tile + index
        page = lookup.page_of(index * BOXES)
        whole = (key_source.page_size >= TILE_KV) & (not border_tile(task, tile, TILE_KV)) & exists(key_source, page)
        stage = shared.stages + edge.stage(count) * geometry.stage_bytes
        edge.wait_empty(count)
        full = edge.full(edge.stage(count))
        if whole:
            edge.expect(full)
            row = place_in_page(key_source, tile, TILE_KV) * TILE_KV
            with cute.arch.elect_one():
                _copy(stage, cute.domain_offset((page, row, 0), cache).iterator, geometry.stage_bytes, full)
        else:
            _load_boxes(cache, key_source, geometry, wanted, lookup, index, stage, full)


@cute.jit
def _load_boxes(
    cache: cute.Tensor, key_source: KeySource, geometry: cutlass.Constexpr[FewRowsGeometry], wanted: Wanted,
    lookup: Lookup, index: Int32, stage: Int32, full: cute.Pointer,
) -> None:  # fmt: skip
    """Load tile `index` of the task box by box."""
    box_bytes = BOX_KEYS * geometry.row_bytes
    size = Int32(0)
    for box in cutlass.range(BOXES, unroll=1):
        number = index * BOXES + box
        if exists(key_source, lookup.page_of(number)):
            size += box_bytes
        else:
            for vector in cutlass.range(cute.arch.lane_idx(), box_bytes // VECTOR_BYTES, 32, unroll=1):
                wipe_vector(shared_vector(Int32, stage + box * box_bytes + vector * VECTOR_BYTES))
            cute.arch.fence_view_async_shared()  # copies will write there
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    for box in cutlass.range(BOXES, unroll=1):
        number = index * BOXES + box
        page = lookup.page_of(number)
        if exists(key_source, page):
            row = place_in_page(key_source, wanted.first_box + number, BOX_KEYS) * BOX_KEYS
            with cute.arch.elect_one():
                _copy(stage + box * box_bytes, cute.domain_offset((page, row, 0), cache).iterator, box_bytes, full)


def _copy(target: Int32, source: cute.Pointer, size: int, barrier: cute.Pointer) -> None:
    """Start copying `size` bytes of the cache, which complete on the barrier; called by one lane."""
    bulk_copy(target, source.toint(), size, barrier.toint(), EVICT_FIRST)
