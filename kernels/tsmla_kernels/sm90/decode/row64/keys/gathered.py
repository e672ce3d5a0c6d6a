"""The streams of rows that are gathered one by one: warps copy 16 bytes a lane, and one warp hands strips over.

Copies by lanes write as plain stores do, which products do not see by themselves: the warp that hands over waits for
them, makes them visible (a proxy fence; any warp may run it), and tells the other warps which keys are there. Warps
that gather never wait for what they have asked for."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from tsmla.identity.dtype import bytes_of

from .....limits import WARPGROUP
from .....parts.division import Divisor
from .....parts.keys.listed import Lines, ListedKeys, for_each_tile, gather, lane_keys, place_of, tell_there
from .....parts.keys.visible import Visibility, viewers_of
from .....parts.query import Query
from ...work.task import Task, for_each_task
from ..geometry import PATTERN_COLUMNS, TILE_KV, DecodeGeometry
from ..load import Q_LOADER, load_query
from ..storage import Shared
from .stream import Keys, KeyStream

WARPS = WARPGROUP // 32


class Gathers:
    """What streams have in common whose rows are gathered."""

    def keys(self, given, source: ListedKeys) -> Keys:
        return Keys(None, None, None, source, None, None)

    def places(self, keys: Keys, shared: Shared) -> None:
        """Nothing: copies by lanes need no partitioned tensors."""


class GatheredStream(Gathers, KeyStream):
    """The stream of 16-bit rows that are gathered. A warpgroup of its own does that, each warp a quarter of the keys:
    two warps would take as long for a strip as its copies are under way."""

    def load(self, loader: int, places: None, query: Query, keys: Keys, shared: Shared, called: tuple) -> None:
        if loader == Q_LOADER:
            load_queries(query, shared, self.geometry, called[1])

    def clean(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        tell_rows(keys.source, shared, self.geometry, view, heads)

    def help(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        gather_rows(
            None, keys, shared, self.geometry, view, heads, range(self.geometry.latent_strips), TILE_KV // WARPS
        )


class GatheredByLoadersStream(GatheredStream):
    """The stream of 8-bit rows without scales that are gathered, by the loading warps: a warpgroup of its own scores
    tiles."""

    def load(self, loader: int, places: None, query: Query, keys: Keys, shared: Shared, called: tuple) -> None:
        view, heads, _ = called
        given = query if loader == Q_LOADER else None
        strips = self.geometry.loaded_strips(loader)
        gather_rows(given, keys, shared, self.geometry, view, heads, strips, TILE_KV)


def lines_of(geometry: DecodeGeometry, strip: int) -> tuple[Lines, int]:
    """What a strip is, as a piece of rows, and the byte that it begins with of a row, or of the rope piece."""
    element_bytes = bytes_of(geometry.strip_dtypes[strip].bits)
    lines, rest = divmod(geometry.strips[strip], PATTERN_COLUMNS)
    assert rest == 0, geometry
    first = geometry.first_columns[strip] if strip < geometry.latent_strips else 0
    return Lines(PATTERN_COLUMNS * element_bytes, lines), first * element_bytes


@cute.jit
def load_queries(query: Query, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], heads: Divisor) -> None:
    """Load the query rows of every task."""
    for_each_task(shared.dealt, functools.partial(_load_task_query, query, shared, geometry, heads))


@cute.jit
def _load_task_query(
    query: Query, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], heads: Divisor, number: Int32,
    task: Task,
) -> None:  # fmt: skip
    load_query(query, shared, geometry, task, heads)


@cute.jit
def gather_rows(
    query: Query | None, keys: Keys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor, strips: cutlass.Constexpr, share: cutlass.Constexpr[int],
) -> None:  # fmt: skip
    """Gather some strips of every tile, and load the query, if it is given. A warp has `share` keys of a tile: all, or
    those that its number in the warpgroup says."""
    act = functools.partial(_gather_task, query, keys, shared, geometry, view, heads, strips, share)
    for_each_task(shared.dealt, act)


@cute.jit
def _gather_task(
    query: Query | None, keys: Keys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility,
    heads: Divisor, strips: cutlass.Constexpr, share: cutlass.Constexpr[int], number: Int32, task: Task,
) -> None:  # fmt: skip
    """Gather a task's keys."""
    viewers, own = viewers_of(view, task, heads), Int32(0)
    if const_expr(share < TILE_KV):
        own = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % WARPS * share
    mine = lane_keys(keys.source, viewers, task.first_tile * TILE_KV + own + cute.arch.lane_idx(), share)
    if const_expr(query is not None):
        load_query(query, shared, geometry, task, heads)
    act = functools.partial(_gather_tile, keys.source, shared, geometry, strips, own, min(share, 32))
    for_each_tile(mine, task.tiles, TILE_KV, task.first_count, act)


@cute.jit
def _gather_tile(
    source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], strips: cutlass.Constexpr,
    own: Int32, keys: cutlass.Constexpr[int], count: Int32, slots: tuple,
) -> None:  # fmt: skip
    """Gather some strips of tile number `count`: rows of `keys` keys from number `own` on, and of as many from
    every 32nd behind it."""
    for strip in strips:
        edge = shared.edges.kv[strip]
        edge.wait_empty(count)
        for piece in geometry.copied_with(strip):
            lines, first_byte = lines_of(geometry, piece)
            rows = source.rows if const_expr(piece < geometry.latent_strips) else source.rope
            target = shared.keys.loaded[piece] + edge.stage(count) * geometry.strip_bytes[piece]
            for half, slot in enumerate(slots):
                gather(rows.start + first_byte, place_of(source, rows, slot), lines, target, own + 32 * half, keys)
        shared.edges.landed[strip].arrive_behind_copies(count)


@cute.jit
def tell_rows(
    source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility, heads: Divisor
) -> None:
    """Tell of every tile which keys are there, and hand its strips over as they land."""
    for_each_task(shared.dealt, functools.partial(_tell_task, source, shared, geometry, view, heads))


@cute.jit
def _tell_task(
    source: ListedKeys, shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], view: Visibility, heads: Divisor,
    number: Int32, task: Task,
) -> None:  # fmt: skip
    viewers = viewers_of(view, task, heads)
    mine = lane_keys(source, viewers, task.first_tile * TILE_KV + cute.arch.lane_idx(), TILE_KV)
    for_each_tile(mine, task.tiles, TILE_KV, task.first_count, functools.partial(hand_over_tile, shared, geometry))


@cute.jit
def hand_over_tile(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], count: Int32, slots: tuple) -> None:
    """Tell which keys of tile number `count` are there, from the slots of this lane's, and hand its strips over as
    they land."""
    for strip in cutlass.range_constexpr(geometry.latent_strips):
        shared.edges.landed[strip].wait_full(count)
        if const_expr(strip == 0):  # whoever read what is told of the tile before has left its first strip
            tell_there(shared.exchange.there[None, shared.edges.kv[0].stage(count)], slots)
        shared.edges.kv[strip].publish(count)
