"""The streams of rows that are converted, as far as they are alike: bulk copies bring stored keys, 16 or a whole tile
at a time, to the second half of the places that they take once converted.

A cache of such rows is three views of the same bytes: latent pieces, rope pieces, and the scales of rows."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .....parts.division import Divisor
from .....parts.keys.paged import boxes_view, partition
from .....parts.keys.source import BOX_KEYS, KeySource
from .....parts.keys.visible import Visibility
from .....parts.precision import numeric
from .....parts.query import Map
from ..geometry import GROUP_ROWS, PATTERN_COLUMNS
from ..storage import Shared, box_layout, box_shape, layouts_of
from .stream import Copies, Keys, KeyStream


class StoredStream(KeyStream):
    """A stream of rows that are stored in 8 bits with scales, and multiplied in 16."""

    def keys(self, given, source: KeySource) -> Keys:
        boxes, tiles = (self._maps(given.kv_cache, rows) for rows in (BOX_KEYS, self.geometry.tile_kv))
        return Keys(*(Copies(*both) for both in zip(boxes, tiles, strict=True)), source, None, None)

    def _maps(self, cache: cute.Tensor, rows: int) -> list[Map]:
        """Tensor maps for `rows` keys of the latent piece, of the rope piece, and of the scales. Latent boxes are rows
        of 128 bytes, swizzled as 16-bit ones are."""
        geometry = self.geometry
        layouts, row, strip, scales = layouts_of(geometry), geometry.stored, geometry.d_strip, geometry.scales_bytes
        rope = row.piece("rope")
        views = (
            (
                boxes_view(cache, 0, strip, geometry.latent_strips),
                cute.make_composed_layout(layouts.swizzles[0], 0, _box_layout(strip, rows)),
                _box_shape(strip, rows),
            ),
            (
                boxes_view(
                    cache, row.offset("rope"), PATTERN_COLUMNS, rope.columns // PATTERN_COLUMNS,
                    dtype=numeric(rope.dtype),
                ),
                cute.make_composed_layout(layouts.swizzles[-1], 0, box_layout(rope.columns, rows)),
                box_shape(rope.columns, rows),
            ),
            (boxes_view(cache, row.scales_offset, scales, 1), _box_layout(scales, rows), _box_shape(scales, rows)),
        )  # fmt: skip
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        return [Map(*cpasync.make_tiled_tma_atom(load_op, *view)) for view in views]

    def _partitioned(self, maps: list[Map], rows: int, shared: Shared) -> tuple:
        """Partition the boxes that `copied_with` numbers."""
        geometry = self.geometry
        latent, rope, scales = maps
        strips = (
            self._partition(latent, geometry.d_strip, strip, place, rows)
            for strip, place in enumerate(shared.keys.stored)
        )
        rope = self._partition_strip(rope, geometry.latent_strips, rows, shared.keys.copied[-1])
        copies = (self._partition(scales, geometry.scales_bytes, 0, place, rows) for place in shared.keys.stored_scales)
        return *strips, rope, *copies

    def _partition(self, source: Map, row_bytes: int, chunk: int, place: cute.Pointer, rows: int) -> tuple:
        """Partition boxes of `rows` keys that begin with a chunk of `row_bytes` of their rows, and lie where they are
        converted."""
        box = _box_layout(row_bytes, rows)
        places = cute.make_layout(
            (*box.shape, self.geometry.tile_kv // rows, self.geometry.stages),
            stride=(*box.stride, rows * row_bytes, self.geometry.strip_bytes[0]),
        )
        boxes = cute.local_tile(source.view, _box_shape(row_bytes, rows), (0, 0, chunk, None, None))
        return partition(source.atom, boxes, cute.make_tensor(place, places))

    def clean(self, keys: Keys, shared: Shared, view: Visibility, heads: Divisor) -> None:
        """Nothing: those that convert make zeros of what no row may see."""


def _box_shape(row_bytes: int, keys: int) -> tuple[int, ...]:
    """Shape of a bulk copy of this many bytes of each key, in `boxes_view`."""
    return row_bytes, GROUP_ROWS, 1, keys // GROUP_ROWS, 1


def _box_layout(row_bytes: int, keys: int) -> cute.Layout:
    return cute.make_layout(_box_shape(row_bytes, keys), stride=(1, row_bytes, 0, row_bytes * GROUP_ROWS, 0))
