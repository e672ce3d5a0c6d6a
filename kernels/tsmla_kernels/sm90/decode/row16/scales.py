"""Scales of keys whose rows lie apart, in the Hopper decode of few rows: each warp reads those of the keys whose scores
it adds up, a quarter of a tile, into registers. A quarter is a box: it lies in one page. Where keys are gathered, those
who do so have brought scales to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from tsmla.identity.row_format import SCALE_BYTES

from ....parts.alignment import shared_word
from ....parts.keys.source import BOX_KEYS, KeySource, exists
from ....parts.warp import QUAD
from ..work.task import Task
from .geometry import BLOCK, TILE_KV, FewRowsGeometry
from .storage import Shared


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


@cute.jit
def brought_scales(
    geometry: cutlass.Constexpr[FewRowsGeometry], shared: Shared, stage: Int32, warp: Int32
) -> tuple[Float32, Float32, Float32, Float32]:
    """The scales of this lane's keys of quarter `warp` of the tile in a stage, where keys are gathered."""
    first = key_scale_at(shared, stage, warp * BOX_KEYS)
    own = [first + geometry.key_of(i, cute.arch.lane_idx() % QUAD) * SCALE_BYTES for i in range(2)]
    places = (own[0], own[1], own[0] + BLOCK * SCALE_BYTES, own[1] + BLOCK * SCALE_BYTES)
    found = tuple(shared_word(Float32, place) for place in places)
    return found[0], found[1], found[2], found[3]


def key_scale_at(shared: Shared, stage: Int32, key: Int32) -> Int32:
    """The address of the scale of key number `key` of the tile in a stage, where keys are gathered."""
    return shared.key_scales + (stage * TILE_KV + key) * SCALE_BYTES


def _first_key(task: Task, index: Int32, warp: Int32) -> Int32:
    return (task.first_tile + index) * TILE_KV + warp * BOX_KEYS
