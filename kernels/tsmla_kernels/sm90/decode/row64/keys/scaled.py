"""The stream of rows that have a scale each. Their latent pieces, rope pieces and scales lie apart; the warp that
cleans reads the scales, too, and folds them to what scores and sums need."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cutlass_dsl import select_

from .....parts.division import Divisor
from .....parts.keys.paged import boxes_view
from .....parts.keys.scales import RowScales, anchor_of, deciding_key, fold, inverse_of, key_scale
from .....parts.keys.source import BOX_KEYS, KeySource, Lookup, Wanted, follow, look_up, wanted_of
from .....parts.keys.visible import Viewers, Visibility, hides, seen_by_any, viewers_of
from ...work.ring import TASK_RING
from ...work.task import Task, border_tile, count_over_tasks
from ..clean import clean_tile
from ..geometry import FOLDED_WORDS, PATTERN_COLUMNS, TILE_KV, DecodeGeometry
from ..storage import Shared
from .stream import Keys, KeyStream


class ScaledStream(KeyStream):
    """The stream of 8-bit rows that have a scale each."""

    def keys(self, given, source: KeySource) -> Keys:
        geometry = self.geometry
        latent, rope = (
            boxes_view(cache, 0, PATTERN_COLUMNS, columns // PATTERN_COLUMNS, True)
            for cache, columns in (
                (given.kv_cache, geometry.row.value_columns), (given.rope_cache, geometry.strips[-1])
            )
        )  # fmt: skip
        scales = RowScales(given.scale_cache, given.query_scales)
        return Keys(self._copies(latent, 0), self._copies(rope, -1), None, source, scales, None)

    def clean(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        bring_scales_and_clean(shared, self.geometry, keys, view, heads)


@cute.jit
def bring_scales_and_clean(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], keys: Keys, view: Visibility, heads: Divisor
) -> None:
    """Bring the scales of every task's keys, and clean its border tiles."""
    act = functools.partial(_bring_task, shared, geometry, keys.source, keys.scales.keys, view, heads)
    count_over_tasks(shared.dealt, act)


@cute.jit
def _bring_task(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], source: KeySource, scales: cute.Tensor,
    view: Visibility, heads: Divisor, number: Int32, task: Task, borders: Int32,
) -> Int32:  # fmt: skip
    """Bring what scores and sums need of the scales of a task's keys, and then clean each tile as `clean` does; by one
    warp. A lane reads two scales of a tile while it folds those of the tile before."""
    lane = cute.arch.lane_idx()
    if task.tiles > 0:
        wanted = wanted_of(source, task, geometry.tile_kv // BOX_KEYS)
        lookup = look_up(wanted)
        viewers = viewers_of(view, task, heads)  # while pages' numbers are on their way
        mine = _scales_of(source, scales, lookup, Int32(0), wanted, lane)
        first_tile_key = task.first_tile * geometry.tile_kv
        first = deciding_key(viewers, first_tile_key)  # in the first tile
        place = first - first_tile_key
        scale = cute.arch.shuffle_sync(Float32(select_(place < 32, mine[0], mine[1])), place & 31)
        anchor = anchor_of(Float32(select_(seen_by_any(viewers, first), scale, Float32(1.0))))
        if lane == 0:
            shared.exchange.anchors[number & TASK_RING - 1] = anchor
        for index in cutlass.range(task.tiles, unroll=1):
            found, following = mine, index + 1
            if following < task.tiles:
                lookup = follow(wanted, lookup, following * (TILE_KV // BOX_KEYS))
                mine = _scales_of(source, scales, lookup, following, wanted, lane)
            borders = _bring(shared, geometry, task, viewers, index, found, anchor, borders, lane)
    return borders


@cute.jit
def _bring(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    task: Task,
    viewers: Viewers,
    index: Int32,
    scales: tuple[Float32, Float32],
    anchor: Float32,
    borders: Int32,
    lane: Int32,
) -> Int32:
    """Fold the scales of tile `index` of the task, hand them over, and clean the tile if need be."""
    count, tile = task.first_count + index, task.first_tile + index
    is_border = border_tile(task, tile, geometry.tile_kv) | hides(viewers.view)
    shared.edges.scales.wait_empty(count)
    stage = shared.edges.scales.stage(count)
    for half in cutlass.range_constexpr(2):
        key = half * 32 + lane
        seen = Boolean(True)
        if is_border:
            seen = seen_by_any(viewers, tile * geometry.tile_kv + key)
        put_folded(shared, stage, key, scales[half], seen, anchor)
    cute.arch.sync_warp()
    shared.edges.scales.hand_over(count)
    if is_border:
        clean_tile(shared, geometry, task, viewers, index, borders, lane)
        borders += 1
    return borders


@cute.jit
def put_folded(shared: Shared, stage: Int32, key: Int32, scale: Float32, seen: Boolean, anchor: Float32) -> None:
    """Write what scores and sums need of the scale of key number `key` of the tile in a stage."""
    folded = fold(scale, seen, anchor, inverse_of(anchor))
    for word in cutlass.range_constexpr(FOLDED_WORDS):
        shared.exchange.folded[word][key % 2, key // 2, stage] = folded[word]


@cute.jit
def _scales_of(
    source: KeySource, scales: cute.Tensor, lookup: Lookup, index: Int32, wanted: Wanted, lane: Int32
) -> tuple[Float32, Float32]:
    """The scales of keys `lane` and `lane` + 32 of tile `index` of the task, which is in the lookup's window."""
    found = []
    for half in cutlass.range_constexpr(2):
        box = index * (TILE_KV // BOX_KEYS) + half * 2 + lane // BOX_KEYS
        page = lookup.page_of(box)
        found.append(key_scale(source, scales, page, wanted.key_of(box) + lane % BOX_KEYS))
    return found[0], found[1]
