"""A stream of keys: how rows come from the cache to shared memory as they are multiplied.

`KeyStream` is that of rows which are multiplied as they are stored. Each other kind of rows has a stream of
its own, which says what differs: the tensor maps, which places they fill, and what helping warps do."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .....parts.division import Divisor
from .....parts.keys.listed import ListedKeys
from .....parts.keys.paged import boxes_view, partition
from .....parts.keys.scales import RowScales
from .....parts.keys.source import BOX_KEYS, KeySource
from .....parts.keys.visible import Visibility, hides
from .....parts.query import Map, Query
from ..clean import clean
from ..geometry import PATTERN_COLUMNS, DecodeGeometry
from ..load import Loading, load
from ..storage import Shared, box_layout, box_shape, layouts_of, stages_layout


class Copies(NamedTuple):
    """Tensor maps of one piece of the rows: for boxes of BOX_KEYS keys, which every page has, and for whole tiles."""

    box: Map
    tile: Map


class Keys(NamedTuple):
    """A call's keys as a kernel is told of them: tensor maps of latent pieces, of rope pieces, if there are any, and of
    scales that lie in rows, if any do (none at all where rows are gathered); where the keys lie; scales that lie apart;
    and the cache itself, where warps read it."""

    latent: Copies | None
    rope: Copies | None
    scales_in_rows: Copies | None
    source: KeySource | ListedKeys
    scales: RowScales | None
    cache: cute.Tensor | None

    @property
    def copies(self) -> tuple[Copies, ...]:
        return tuple(x for x in (self.latent, self.rope, self.scales_in_rows) if x is not None)


class KeyStream:
    """The stream of rows that are multiplied as they are stored: 16-bit ones, and 8-bit ones whose value products are
    turned."""

    def __init__(self, geometry: DecodeGeometry):
        self.geometry = geometry

    def keys(self, given, source: KeySource) -> Keys:
        """Make the tensor maps, on the host. given: what the call's table lists, by name."""
        rows = boxes_view(given.kv_cache, 0, PATTERN_COLUMNS, self.geometry.d_qk // PATTERN_COLUMNS)
        rope = [self._copies(rows, strip) for strip in self.geometry.behind_latent]
        return Keys(self._copies(rows, 0), *(rope or [None]), None, source, None, None)

    def _copies(self, rows: cute.Tensor, strip: int) -> Copies:
        """Tensor maps for a strip's columns of `rows`, a view of the cache."""
        layouts, columns = layouts_of(self.geometry), self.geometry.strips[strip]
        return Copies(
            *(
                Map(
                    *cpasync.make_tiled_tma_atom(
                        cpasync.CopyBulkTensorTileG2SOp(),
                        rows,
                        cute.make_composed_layout(layouts.swizzles[strip], 0, box_layout(columns, keys)),
                        box_shape(columns, keys),
                    )
                )
                for keys in (BOX_KEYS, self.geometry.tile_kv)
            )
        )

    def places(self, keys: Keys, shared: Shared) -> tuple:
        """What loading warps share: strips partitioned for copies of boxes, and of whole tiles."""
        return self.boxes(keys, shared), self.tiles(keys, shared)

    def load(self, loader: int, places: tuple, query: Query, keys: Keys, shared: Shared, called: tuple) -> None:
        """The role of loading warp number `loader`. called: what rows see, heads, and whether requests differ in query
        tokens."""
        view, heads, varying = called
        load(Loading(query, *places, keys.source, heads, hides(view), varying, loader), shared, self.geometry)

    def boxes(self, keys: Keys, shared: Shared) -> tuple:
        """Partition every strip for copies of BOX_KEYS keys: (copy atom, boxes by place in the page and page, shared
        boxes by place in the tile and stage)."""
        return self._partitioned([copies.box for copies in keys.copies], BOX_KEYS, shared)

    def tiles(self, keys: Keys, shared: Shared) -> tuple:
        """Partition every strip for copies of whole tiles, as `boxes` does."""
        return self._partitioned([copies.tile for copies in keys.copies], self.geometry.tile_kv, shared)

    def _partitioned(self, maps: list[Map], rows: int, shared: Shared) -> tuple:
        sources = [maps[0]] * self.geometry.latent_strips + maps[1:]
        return tuple(
            self._partition_strip(source, strip, rows, place)
            for strip, (source, place) in enumerate(zip(sources, shared.keys.copied, strict=True))
        )

    def _partition_strip(self, source: Map, strip: int, rows: int, place: cute.Pointer) -> tuple:
        geometry = self.geometry
        columns = geometry.strips[strip]
        boxes = cute.local_tile(source.view, box_shape(columns, rows), (0, 0, self._first_box(strip), None, None))
        return partition(source.atom, boxes, cute.make_tensor(place, stages_layout(geometry, columns, rows)))

    def _first_box(self, strip: int) -> int:
        """Which of a row's boxes of a strip's size is the strip, in the view that it is copied from. The rope pieces of
        rows with scales have a view of their own."""
        if strip in self.geometry.behind_latent and self.geometry.stored.scales is not None:
            return 0
        return self.geometry.first_columns[strip] // self.geometry.strips[strip]

    def clean(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        """The role of the warp that cleans."""

        clean(shared, self.geometry, view, heads)

    def help(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        """The role of the warpgroups behind those that attend, if there are any."""
