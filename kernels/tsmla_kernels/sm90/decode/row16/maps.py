"""How bulk copies bring rows whose pieces lie apart, in the Hopper decode of few rows: 16 keys or a whole tile of a
piece at a time, as lines of 128 bytes that are swizzled."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.dtype import bytes_of

from ....limits import swizzle_bytes
from ....parts.keys.paged import GROUP, box_layout, boxes_view, partition
from ....parts.keys.source import BOX_KEYS
from ....parts.precision import numeric
from ....parts.query import Map
from .geometry import STRIP, TILE_KV, FewRowsGeometry


class Maps(NamedTuple):
    """Tensor maps of both pieces, for boxes of 16 keys and for whole tiles."""

    latent_box: Map
    rope_box: Map
    latent_tile: Map
    rope_tile: Map


@cute.jit
def maps_of(geometry: cutlass.Constexpr[FewRowsGeometry], cache: cute.Tensor, rope_cache: cute.Tensor) -> Maps:
    """Make the tensor maps, on the host."""
    load_op = cpasync.CopyBulkTensorTileG2SOp()
    made = []
    for keys in (BOX_KEYS, TILE_KV):
        for tensor, name in ((cache, "latent"), (rope_cache, "rope")):
            width, chunks = _line(geometry, name)
            groups = keys // GROUP
            made.append(
                Map(
                    *cpasync.make_tiled_tma_atom(
                        load_op, boxes_view(tensor, 0, width, chunks, True), box_layout(STRIP, width, chunks, groups),
                        (width, GROUP, chunks, groups, 1),
                    )
                )
            )  # fmt: skip
    return Maps(*made)


def places_of(geometry: FewRowsGeometry, maps: Maps, base: cute.Pointer) -> tuple:
    """(boxes, tiles): what `partition` gives for either piece, with stages from `base` on, which points to bytes."""
    return tuple(
        tuple(_places(geometry, found, name, keys, base) for found, name in zip(both, ("latent", "rope"), strict=True))
        for keys, both in (
            (BOX_KEYS, (maps.latent_box, maps.rope_box)),
            (TILE_KV, (maps.latent_tile, maps.rope_tile)),
        )
    )


def _places(geometry: FewRowsGeometry, found: Map, name: str, keys: int, base: cute.Pointer) -> tuple:
    dtype = numeric(geometry.stored.piece(name).dtype)
    size = bytes_of(dtype.width)
    width, chunks = _line(geometry, name)
    groups = keys // GROUP
    layout = box_layout(STRIP, width, chunks, groups)
    start = base + (geometry.rope_at if name == "rope" else 0)
    pointer = cute.recast_ptr(start, layout.inner, dtype)
    outer = layout.outer
    places = cute.make_layout(
        (*outer.shape, TILE_KV // keys, geometry.stages),
        stride=(*outer.stride, keys * width * chunks, geometry.stage_bytes // size),
    )
    boxes = cute.local_tile(found.view, (width, GROUP, chunks, groups, 1), (0, 0, 0, None, None))
    return partition(found.atom, boxes, cute.make_tensor(pointer, places))


def _line(geometry: FewRowsGeometry, name: str) -> tuple[int, int]:
    """Elements of a line of a piece, and lines of a key."""
    piece = geometry.stored.piece(name)
    width = STRIP * 8 // piece.dtype.bits
    assert swizzle_bytes(piece.bytes) == STRIP, piece
    return width, piece.columns // width
