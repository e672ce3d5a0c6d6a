"""The stream of rows that have a scale each and are gathered one by one: the warp that tells which keys are there also
brings their scales, by the slots of their rows."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .....parts.division import Divisor
from .....parts.keys.listed import ListedKeys, entries_of, slot_of
from .....parts.keys.scales import RowScales, listed_anchor, slot_scale
from .....parts.keys.visible import Visibility, viewers_of
from ...work.ring import TASK_RING
from ...work.task import Task, for_each_task
from ..geometry import TILE_KV, DecodeGeometry
from ..storage import Shared
from .gathered import GatheredByLoadersStream, hand_over_tile
from .scaled import put_folded
from .stream import Keys


class GatheredScaledStream(GatheredByLoadersStream):
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
    for_each_task(shared.dealt, act)


@cute.jit
def _tell_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], source: ListedKeys, scales: cute.Tensor,
    view: Visibility, heads: Divisor, number: Int32, task: Task,
) -> None:  # fmt: skip
    """Tell of a task's tiles, by one warp. A lane reads the scales of a tile's keys while it folds those of the tile
    before, and entries of the table a tile ahead of these."""
    if task.tiles > 0:
        viewers, lane = viewers_of(view, task, heads), cute.arch.lane_idx()
        first_key = task.first_tile * TILE_KV + lane
        slots, found = _tile_of(source, scales, entries_of(source, viewers, first_key, TILE_KV), first_key)
        ahead = entries_of(source, viewers, first_key + TILE_KV, TILE_KV)
        anchor = listed_anchor(source, scales, viewers, task.first_tile * TILE_KV, task.tiles * TILE_KV)
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


@cute.jit
def _tile_of(source: ListedKeys, scales: cute.Tensor, entries: tuple, key: Int32) -> tuple[tuple, tuple]:
    """The slots of this lane's keys of a tile, `key` and the 32nd behind it, and their scales."""
    slots = tuple(slot_of(source, entry, key + 32 * half) for half, entry in enumerate(entries))
    return slots, tuple(slot_scale(source, scales, slot) for slot in slots)
