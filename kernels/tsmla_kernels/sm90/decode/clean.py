"""Role `clean` of the Hopper decode: one warp that wipes keys that no row may see and, where rows have scales, brings
these."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cutlass_dsl import select_

from ...parts.division import Divisor, quotient, remainder
from ...parts.key_source import BOX_KEYS, LANE_BOXES, KeySource, Lookup, Wanted, look_further, look_up, wanted_of
from ...parts.row_scales import anchor_of, deciding_key, fold, inverse_of, key_scale
from ...parts.visible import Viewers, Visibility, hides, seen_by_any, viewers_of
from .geometry import FOLDED_WORDS, GROUP_ROWS, TASK_RING, TILE_KV, DecodeGeometry
from .storage import Shared
from .task import Task, border_tile

TILES_PER_LOOKUP = LANE_BOXES * BOX_KEYS // TILE_KV
"""Tiles of a window of pages."""


@cute.jit
def clean(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    task: Task,
    view: Visibility,
    heads: Divisor,
    borders: Int32,
) -> Int32:
    """Write zeros over the keys of a task's border tiles that no row may see, so that a probability of 0 times such a
    row is 0; by one warp. Without `visible`, only the first and the last tile of a task can be border tiles. Returns
    the number of border tiles so far, `borders` of which came before."""
    lane = cute.arch.lane_idx()
    hidden = hides(view)
    viewers = viewers_of(view, task, heads)
    visits, step = cutlass.min(task.tiles, 2), task.tiles - 1
    if hidden:
        visits, step = task.tiles, Int32(1)
    for visit in cutlass.range(visits, unroll=1):
        index = visit * step
        if border_tile(task, task.first_tile + index, geometry.tile_kv) | hidden:
            _clean_tile(shared, geometry, task, viewers, index, borders, lane)
            borders += 1
    return borders


@cute.jit
def bring_scales_and_clean(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    source: KeySource,
    scales: cute.Tensor,
    task: Task,
    number: Int32,
    view: Visibility,
    heads: Divisor,
    borders: Int32,
) -> Int32:
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
            shared.anchors[number & TASK_RING - 1] = anchor
        for index in cutlass.range(task.tiles, unroll=1):
            found, following = mine, index + 1
            if following < task.tiles:
                if following % TILES_PER_LOOKUP == 0:
                    lookup = look_further(wanted, lookup, following // TILES_PER_LOOKUP)
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
    shared.scales_edge.wait_empty(count)
    stage = shared.scales_edge.stage(count)
    for half in cutlass.range_constexpr(2):
        key = half * 32 + lane
        seen = Boolean(True)
        if is_border:
            seen = seen_by_any(viewers, tile * geometry.tile_kv + key)
        folded = fold(scales[half], seen, anchor, inverse_of(anchor))
        for word in cutlass.range_constexpr(FOLDED_WORDS):
            shared.folded[word][key % 2, key // 2, stage] = folded[word]
    cute.arch.sync_warp()
    shared.scales_edge.hand_over(count)
    if is_border:
        _clean_tile(shared, geometry, task, viewers, index, borders, lane)
        borders += 1
    return borders


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


@cute.jit
def _clean_tile(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    task: Task,
    viewers: Viewers,
    index: Int32,
    borders: Int32,
    lane: Int32,
) -> None:
    """Wipe what no row may see of tile `index` of the task, once its copies have landed, and hand its strips over."""
    stages = Int32(geometry.stages)
    count = task.first_count + index
    shared.landed.wait_full(remainder(borders, stages), quotient(borders, stages))
    first_key = (task.first_tile + index) * geometry.tile_kv
    stage = shared.kv_edges[0].stage(count)
    for start in cutlass.range(0, geometry.tile_kv, 32, unroll=1):
        key = first_key + start + lane
        seen = seen_by_any(viewers, key)
        # Boxes without a key that counts have been copied from where everything is zero.
        copied = ((key | (BOX_KEYS - 1)) >= task.first_key) & ((key & -BOX_KEYS) < task.end_key)
        rows = cute.arch.vote_ballot_sync(copied & (not seen))
        if const_expr(geometry.scaled):
            _wipe_rows(shared.vectors[: geometry.latent_strips], stage, start, rows, lane)
            _wipe_rows(shared.vectors[geometry.latent_strips :], stage, start, rows, lane)
        else:
            _wipe_rows(shared.vectors, stage, start, rows, lane)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    for strip in cutlass.range_constexpr(geometry.latent_strips):
        shared.kv_edges[strip].hand_over(count)


@cute.jit
def _wipe_rows(strips, stage: Int32, start: Int32, rows: Int32, lane: Int32) -> None:
    """Zero the rows from `start` on whose bit is set in `rows`, in strips whose rows have equally many vectors."""
    at_once = 32 // cute.size(strips[0], mode=[2])
    while rows != 0:
        first = cute.arch.popc((rows & -rows) - 1) // at_once * at_once
        _wipe(strips, stage, start + first, rows >> first, lane)
        rows &= ~(((1 << at_once) - 1) << first)


@cute.jit
def _wipe(strips, stage: Int32, first: Int32, rows: Int32, lane: Int32) -> None:
    """Zero those rows of a stage from row `first` on whose bit is set in `rows`; as many rows as lanes have one 16-byte
    vector of each. `strips` are `Layouts.vectors`."""
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    line = cute.size(strips[0], mode=[2])
    row = first + lane // line
    if rows >> (lane // line) & 1 != 0:
        for strip in cutlass.range_constexpr(len(strips)):
            for pattern in cutlass.range_constexpr(cute.size(strips[strip], mode=[3])):
                place = strips[strip][None, row % GROUP_ROWS, lane % line, pattern, row // GROUP_ROWS, stage]
                cute.autovec_copy(zeros, place)
