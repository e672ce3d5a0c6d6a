"""The stream of rows that are gathered one by one and converted in place: loading warps copy stored rows 16 bytes a
lane, to where bulk copies would put them.

Those that convert read what lanes have copied, and make it visible to products with what they write. A key that is not
there is zeros, scales too, and so are the values that become of it."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .....parts.division import Divisor
from .....parts.keys.listed import Lines, ListedKeys, for_each_tile, gather, lane_keys, tell_there
from .....parts.keys.visible import Visibility, viewers_of
from .....parts.query import Query
from ...work.task import Task, for_each_task
from ..geometry import CONVERTERS, PATTERN_COLUMNS, TILE_KV, DecodeGeometry
from ..load import Q_LOADER, load_query
from ..storage import Shared
from .converted import ConvertedStream
from .gathered import Gathers
from .stream import Keys

AT_ONCE = 4
"""Steps of a piece's copies that stand in the code one behind the other: registers for more there are not."""


class GatheredConvertedStream(Gathers, ConvertedStream):
    """The stream of rows that are gathered, and converted where lanes have copied them."""

    def load(self, loader: int, places: None, query: Query, keys: Keys, shared: Shared, called: tuple) -> None:
        view, heads, _ = called
        gather_stored(query, keys, shared, self.geometry, view, heads, loader)


@cute.jit
def gather_stored(
    query: Query, keys: Keys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor, loader: cutlass.Constexpr[int],
) -> None:  # fmt: skip
    """Gather the strips that a loading warp has of every tile; one loads the query, too."""
    act = functools.partial(_gather_task, query, keys, shared, geometry, view, heads, loader)
    for_each_task(shared.dealt, act)


@cute.jit
def _gather_task(
    query: Query, keys: Keys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor, loader: cutlass.Constexpr[int], number: Int32, task: Task,
) -> None:  # fmt: skip
    """Gather a task's stored rows. The warp that has the first strip tells which keys are there."""
    viewers, source = viewers_of(view, task, heads), keys.source
    mine = lane_keys(source, viewers, task.first_tile * TILE_KV + cute.arch.lane_idx(), TILE_KV)
    if const_expr(loader == Q_LOADER):
        load_query(query, shared, geometry, task, heads)
    act = functools.partial(_gather_tile, source, shared, geometry, loader)
    for_each_tile(mine, task.tiles, TILE_KV, task.first_count, act, places=True)


@cute.jit
def _gather_tile(
    source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry],
    loader: cutlass.Constexpr[int], count: Int32, slots: tuple, places: tuple,
) -> None:  # fmt: skip
    """Gather the strips that a loading warp has of tile number `count`."""
    for strip in geometry.loaded_strips(loader):
        edge = shared.edges.kv[strip]
        edge.wait_empty(count)
        if const_expr(strip == 0):
            tell_there(shared.exchange.there[None, edge.stage(count)], slots)
            edge.hand_over(count)
        for piece, at, first_byte, number in _pieces(geometry, strip):
            target = shared.keys.loaded[number] + edge.stage(count) * geometry.strip_bytes[number] + at
            for half, place in enumerate(places):
                gather(source.rows.start + first_byte, place, piece, target, 32 * half, 32, AT_ONCE)
        edge.arrive_behind_copies(count)


def _pieces(geometry: DecodeGeometry, strip: int) -> list[tuple[Lines, int, int, int]]:
    """What comes with a strip: the piece's lines; where they go, in bytes from the beginning of a strip; the byte of a
    row that the piece begins with; and the number of that strip."""
    row = geometry.stored
    pieces = [(Lines(geometry.d_strip, 1), geometry.stored_at, row.offset("latent") + strip * geometry.d_strip, strip)]
    if strip < CONVERTERS:
        pieces.append((Lines(geometry.scales_bytes, 1), 0, row.scales_offset, strip))
    if strip + 1 == geometry.latent_strips:
        rope = row.piece("rope")
        assert rope.columns == PATTERN_COLUMNS, geometry
        pieces.append((Lines(rope.bytes, 1), 0, row.offset("rope"), geometry.latent_strips))
    return pieces
