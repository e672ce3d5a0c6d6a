"""Where the pieces of rows lie, and how a warp shares one row.

Rows are addressed by 64-bit bytes. A warp has one row. A lane has 8 columns of the first half of the latent piece, 8 of
the second, and 2 of the rope piece, if there is one, so that every load and store of a warp is contiguous."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of
from tsmla.identity.row_format import SCALE_BYTES, RowFormat

from ..parts.dependent_launch import follow_predecessor

VECTOR = 8
"""Columns that a lane loads or stores at a time: 16 bytes of 16-bit elements."""
LANES = 32
HALVES = 2
"""Halves of the latent piece, one behind the other, each as wide as a warp's lanes reach at a time."""
ROPE_VECTOR = 2
"""Columns of the rope piece that a lane has."""
WARPS = 4
"""Warps of a CTA, and its rows."""


def launch(kernel, rows: Int32, pdl: Int32, stream) -> None:
    """Launch a kernel, which has been given its arguments, with a warp for each row."""
    ctas = cute.ceil_div(rows, WARPS)
    kernel.launch(grid=(ctas, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=pdl)


def launch_keys(kernel, given) -> None:
    """Launch a kernel that writes or reads the keys `kv_c`, on the host. given: what the call's table lists, by name;
    the kernel's arguments are those and the divisor by the cache's page size."""
    *arguments, pdl, stream = given
    page_size = cute.FastDivmodDivisorV2(cutlass.max(given.cache.shape[1], 1))
    launch(kernel(*arguments, page_size), given.kv_c.shape[0], pdl, stream)


def begin_row() -> tuple[Int32, Int32]:
    """This thread's lane and its warp's row, once the kernel in front of this one has finished."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    lane, row = thread % LANES, cta * WARPS + thread // LANES
    follow_predecessor()
    return lane, row


def vector(dtype: type[Numeric], start: Int64, column: Int32, count: int = VECTOR) -> cute.Tensor:
    """The elements in global memory that begin at a column of the row or piece that starts at this byte. Their address
    is a multiple of their bytes."""
    address = start + Int64(column) * bytes_of(dtype.width)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=bytes_of(dtype.width, count))
    return cute.make_tensor(pointer, cute.make_layout(count))


def row_address(tensor: cute.Tensor, *place: Int32) -> Int64:
    """The byte that a row begins with, at a place in a tensor's outer dimensions."""
    size = bytes_of(tensor.element_type.width)
    address = tensor.iterator.toint()
    for index, stride in zip(place, tensor.stride, strict=False):
        address += Int64(index) * Int64(stride) * size
    return address


def row_vector(rows: cute.Tensor, row: Int32, column: Int32, count: int = VECTOR) -> cute.Tensor:
    """Elements of [rows, columns] that begin at a column."""
    return vector(rows.element_type, row_address(rows, row), column, count)


def latent_column(half: int, lane: Int32) -> Int32:
    """The first of a lane's columns in a half of the latent piece."""
    return half * LANES * VECTOR + lane * VECTOR


def rope_column(lane: Int32) -> Int32:
    """The first of a lane's rope columns."""
    return lane * ROPE_VECTOR


def exists(slot: Int64, pages: Int32, page_size: Int32) -> Boolean:
    """Whether a cache has this slot."""
    return (slot >= 0) & (slot < Int64(pages) * Int64(page_size))


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a cache as addresses of its latent piece, and of its rope piece and its scales, as far as it has
    any."""

    format: RowFormat
    latent: Int64
    rope: Int64 | None
    scales: Int64 | None

    @classmethod
    def of(cls, format: RowFormat, tensors: tuple[cute.Tensor, ...], *place: Int32) -> Row:
        """The row at a place: in a cache, a page and a row of it. tensors: those of pieces and scales, if these lie
        apart; else the first has it all."""
        start = row_address(tensors[0], *place)
        if format.apart:
            return cls(format, start, *(row_address(tensor, *place) for tensor in tensors[1:]))
        scales = None if format.scales_offset is None else start + format.scales_offset
        rope = start + format.offset("rope") if format.has("rope") else None
        return cls(format, start, rope, scales)

    def latent_vector(self, dtype: type[Numeric], half: int, lane: Int32) -> cute.Tensor:
        """A lane's columns of a half of the latent piece, which is of this type."""
        return vector(dtype, self.latent, latent_column(half, lane))

    def rope_vector(self, dtype: type[Numeric], lane: Int32) -> cute.Tensor:
        """A lane's columns of the rope piece, which is of this type."""
        return vector(dtype, self.rope, rope_column(lane), ROPE_VECTOR)

    def scale(self, half: int, lane: Int32) -> cute.Tensor:
        """The scale of a lane's columns in a half of the latent piece."""
        address = self.scales
        if self.format.scales_per_row > 1:
            address += Int64(latent_column(half, lane) // self.format.scales.columns) * SCALE_BYTES
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=SCALE_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(1))

    def store_scale(self, half: int, lane: Int32, value: Float32) -> None:
        self.scale(half, lane)[0] = value
