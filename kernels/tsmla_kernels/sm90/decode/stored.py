"""How bulk copies bring rows that are converted: stored keys, 16 or a whole tile at a time, to the second half of the
places that they take once converted.

A cache of such rows is three views of the same bytes: latent pieces, rope pieces, and the scales of rows."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ...parts.paged import boxes_view
from ...parts.precision import numeric
from .geometry import GROUP_ROWS, PATTERN_COLUMNS, DecodeGeometry
from .storage import Layouts, Shared, box_layout, box_shape, partition


def stored_maps(geometry: DecodeGeometry, cache: cute.Tensor, layouts: Layouts, load_op, keys: int) -> tuple:
    """Make, on the host, (copy atom, cache as it sees it) for `keys` keys of the latent piece, of the rope piece, and
    of the scales. Latent boxes are rows of 128 bytes, swizzled as 16-bit ones are."""
    row, strip, scales = geometry.stored, geometry.d_strip, geometry.scales_bytes
    rope = row.piece("rope")
    chunks = rope.columns // PATTERN_COLUMNS
    views = (
        (
            boxes_view(cache, 0, strip, geometry.latent_strips),
            cute.make_composed_layout(layouts.swizzles[0], 0, _box_layout(strip, keys)),
            _box_shape(strip, keys),
        ),
        (
            boxes_view(cache, row.offset("rope"), PATTERN_COLUMNS, chunks, dtype=numeric(rope.dtype)),
            cute.make_composed_layout(layouts.swizzles[-1], 0, box_layout(rope.columns, keys)),
            box_shape(rope.columns, keys),
        ),
        (boxes_view(cache, row.scales_offset, scales, 1), _box_layout(scales, keys), _box_shape(scales, keys)),
    )
    return tuple(cpasync.make_tiled_tma_atom(load_op, *view) for view in views)


def partition_stored(
    geometry: DecodeGeometry, latent: tuple, rope: tuple, scales: tuple, shared: Shared, keys: int
) -> tuple:
    """Partition the boxes that `copied_with` numbers, each as `partition` does; rope is partitioned already, the others
    are (copy atom, cache)."""
    boxes = tuple(
        _partition(geometry, *latent, geometry.d_strip, strip, place, keys)
        for strip, place in enumerate(shared.stored_strips)
    )
    copies = (_partition(geometry, *scales, geometry.scales_bytes, 0, place, keys) for place in shared.stored_scales)
    return *boxes, rope, *copies


def _partition(
    geometry: DecodeGeometry, atom, cache: cute.Tensor, row_bytes: int, chunk: int, place: cute.Pointer, keys: int
) -> tuple:
    """Partition boxes of `keys` keys that begin with a chunk of `row_bytes` of their rows, and lie where they are
    converted."""
    box = _box_layout(row_bytes, keys)
    places = cute.make_layout(
        (*box.shape, geometry.tile_kv // keys, geometry.stages),
        stride=(*box.stride, keys * row_bytes, geometry.strip_bytes[0]),
    )
    boxes = cute.local_tile(cache, _box_shape(row_bytes, keys), (0, 0, chunk, None, None))
    return partition(atom, boxes, cute.make_tensor(place, places))


def _box_shape(row_bytes: int, keys: int) -> tuple[int, ...]:
    """Shape of a bulk copy of this many bytes of each key, in `boxes_view`."""
    return row_bytes, GROUP_ROWS, 1, keys // GROUP_ROWS, 1


def _box_layout(row_bytes: int, keys: int) -> cute.Layout:
    return cute.make_layout(_box_shape(row_bytes, keys), stride=(1, row_bytes, 0, row_bytes * GROUP_ROWS, 0))
