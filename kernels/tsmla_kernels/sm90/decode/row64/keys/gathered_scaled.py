"""The stream of rows that have a scale each and are gathered one by one: the warp that tells which keys are there brings
their scales, too, by the slots of their rows."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from .....parts.division import Divisor
from .....parts.keys.listed import ListedKeys, entries_of, scale_of, slot_of
from .....parts.keys.scales import RowScales, anchor_of
from .....parts.keys.visible import Viewers, Visibility, viewers_of
from ...work.ring import TASK_RING
from ...work.task import Task, for_each_task
from ..geometry import TILE_KV, DecodeGeometry
from ..storage import Shared
from .gathered import GatheredTransposedStream, hand_over_tile
from .scaled import put_folded
from .stream import Keys


class GatheredScaledStream(GatheredTransposedStream):
    """The stream of 8-bit rows that have a scale each and are gathered."""

    def keys(self, given, source: ListedKeys) -> Keys:
        return super().keys(given, source)._replace(scales=RowScales(given.scale_cache, given.query_scales))

    def clean(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        tell_scaled_rows(shared, self.geometry, keys, view, heads)


@cute.jit
def tell_scaled_rows(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], keys: Keys, view: Visibility, heads: Divisor
) -> None:
    """Bring the scales of every tile's keys, tell which keys are there, and hand its strips over as they land."""
    act = functools.partial(_tell_task, shared, geometry, keys.source, keys.scales.keys, view, heads)
    for_each_task(shared.dealt, act, Int32(0))


@cute.jit
def _tell_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], source: ListedKeys, scales: cute.Tensor,
    view: Visibility, heads: Divisor, number: Int32, task: Task, kept: Int32,
) -> Int32:  # fmt: skip
    """Tell of a task's tiles, by one warp. A lane reads the scales of a tile's keys while it folds those of the tile
    before, and entries of the table a tile ahead of these."""
    if task.tiles > 0:
        viewers, lane = viewers_of(view, task, heads), cute.arch.lane_idx()
        first_key = task.first_tile * TILE_KV + lane
        slots, found = _tile_of(source, scales, entries_of(source, viewers, first_key, TILE_KV), first_key)
        ahead = entries_of(source, viewers, first_key + TILE_KV, TILE_KV)
        anchor = anchor_of(_deciding_scale(source, scales, viewers, task, found))
        if lane == 0:
            shared.exchange.anchors[number & TASK_RING - 1] = anchor
        for index in cutlass.range(task.tiles, unroll=1):
            count, key = task.first_count + index, first_key + (index + 1) * TILE_KV
            next_slots, next_found = _tile_of(source, scales, ahead, key)
            ahead = entries_of(source, viewers, key + TILE_KV, TILE_KV)
            shared.edges.scales.wait_empty(count)
            stage = shared.edges.scales.stage(count)
            for half in cutlass.range_constexpr(2):
                put_folded(shared, stage, half * 32 + lane, found[half], slots[half] >= 0, anchor)
            shared.edges.scales.hand_over(count)
            hand_over_tile(shared, geometry, count, slots)
            slots, found = next_slots, next_found
    return kept


@cute.jit
def _tile_of(source: ListedKeys, scales: cute.Tensor, entries: tuple, key: Int32) -> tuple[tuple, tuple]:
    """The slots of this lane's keys of a tile, `key` and the 32nd behind it, and their scales."""
    slots = tuple(slot_of(source, entry, key + 32 * half) for half, entry in enumerate(entries))
    return slots, tuple(scale_of(source, scales, slot) for slot in slots)


@cute.jit
def _deciding_scale(
    source: ListedKeys, scales: cute.Tensor, viewers: Viewers, task: Task, first: tuple
) -> Float32:
    """The scale that decides a task's anchor: the first, in the order of its keys, that is positive and finite; 0 if
    none is. first: those of this lane's keys of the first tile, where most tasks have one."""
    scale, tile = _first_scale(first), Int32(1)
    while (scale == 0.0) & (tile < task.tiles):
        key = (task.first_tile + tile) * TILE_KV + cute.arch.lane_idx()
        _, found = _tile_of(source, scales, entries_of(source, viewers, key, TILE_KV), key)
        scale, tile = _first_scale(found), tile + 1
    return scale


@cute.jit
def _first_scale(scales: tuple) -> Float32:
    """The first positive and finite of the scales that a warp has of a tile; 0 if none is."""
    first = Float32(0.0)
    for half in (1, 0):
        found = cute.arch.vote_ballot_sync((scales[half] > 0.0) & (scales[half] < Float32.inf))
        lane = cute.arch.popc((found & -found) - 1)
        first = Float32(select_(found != 0, cute.arch.shuffle_sync(scales[half], lane & 31), first))
    return first
