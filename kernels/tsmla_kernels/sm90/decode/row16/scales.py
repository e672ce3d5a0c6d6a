"""Scales of keys whose rows lie apart, in the Hopper decode of few rows: each warp reads those of the keys whose scores
it adds up, a quarter of a tile, into registers. A quarter is a box: it lies in one page."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....parts.hopper.fragment import QUAD
from ....parts.keys.source import BOX_KEYS, KeySource, exists
from ..work.task import Task
from .geometry import BLOCK, TILE_KV, FewRowsGeometry


@cute.jit
def page_of_quarter(source: KeySource, task: Task, index: Int32, warp: Int32) -> Int32:
    """The page of quarter `warp` of tile `index` of a task; the page beyond the last where none of its keys count."""
    page = source.pages
    key = _first_key(task, index, warp)
    if (index < task.tiles) & task.keys.meets(key, BOX_KEYS):
        page = source.table[task.request, key >> cute.arch.popc(source.page_size - 1)]
    return page


@cute.jit
def scales_of_quarter(
    geometry: cutlass.Constexpr[FewRowsGeometry], source: KeySource, keys: cute.Tensor, page: Int32, task: Task,
    index: Int32, warp: Int32,
) -> tuple[Float32, Float32, Float32, Float32]:  # fmt: skip
    """The scales of this lane's keys of that quarter: two of either block. Pages that do not exist are zeros, whatever
    their scale."""
    found = (Float32(1.0),) * 4
    if exists(source, page):
        row = _first_key(task, index, warp) & (source.page_size - 1)
        own = [row + geometry.key_of(i, cute.arch.lane_idx() % QUAD) for i in range(2)]
        found = (keys[page, own[0]], keys[page, own[1]], keys[page, own[0] + BLOCK], keys[page, own[1] + BLOCK])
    return found


def _first_key(task: Task, index: Int32, warp: Int32) -> Int32:
    return (task.first_tile + index) * TILE_KV + warp * BOX_KEYS
