"""Bulk tensor copies of ragged packs: tiles that stop at the end of their own sequence.

A tensor map clips at the end of a dimension, but a sequence ends in the middle of one. So the map gets one more
dimension with the rows' stride: row r of a span (start, length) of a pack of n rows is reached as n - length + r in the
first and start + length in the second, with the base pointer moved back by n rows. The first index leaves its dimension
exactly where the span ends: loads read zeros there, stores write nothing. (Technique: Triton's ragged TMA descriptors,
python/triton/tools/ragged_tma.py. They move by 2^30 rows and rely on addresses that wrap around; moved by no more than
the pack is long, the base stays an address.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.dtype import bytes_of
from tsmla.identity.support import NOPE_DIMS

from ..parts.seqlen import Span

ENDS = (1 << 31) - 1


@cute.jit
def rows_first(pack: cute.Tensor) -> cute.Tensor:
    """View [rows, heads, dim] as (rows, dim, heads). The stride of a single row or head means nothing, and may be one
    that a tensor map cannot have: another takes its place."""
    rows, heads, dim = pack.shape
    least = 128 // pack.element_type.width
    row_stride, head_stride = Int64(least), Int64(least)
    if rows > 1:
        row_stride = pack.stride[0]
    if heads > 1:
        head_stride = pack.stride[1]
    strides = (cute.assume(row_stride, divby=least), 1, cute.assume(head_stride, divby=least))
    return cute.make_tensor(pack.iterator, cute.make_layout((rows, dim, heads), stride=strides))


@cute.jit
def pieces_of(pack: cute.Tensor, rope: cute.Tensor, columns: cutlass.Constexpr[int]) -> tuple:
    """The pieces of a query or key with `columns` columns, (rows, dim, heads) each: what does not depend on positions,
    and, where there is room for it, the rope. `pack` is the first piece, and `rope` [rows, heads, dim] the second, or
    `pack` is both, side by side. A rope that is declared with one head is shared by all: the stride of heads is 0."""
    rows, heads, _ = pack.shape
    plain, rope_columns = NOPE_DIMS[columns], rope.shape[2]
    shared = isinstance(rope.shape[1], int)
    first = cute.make_tensor(pack.iterator, cute.make_layout((rows, heads, plain), stride=pack.stride))
    if const_expr(plain == columns):
        return (rows_first(first),)
    address = pack.iterator.toint() + bytes_of(pack.element_type.width, plain)
    row_stride, head_stride = Int64(pack.stride[0]), Int64(pack.stride[1])
    if pack.shape[2] == plain:
        address = rope.iterator.toint()
        row_stride, head_stride = Int64(rope.stride[0]), Int64(rope.stride[1])
        if const_expr(shared):
            head_stride = Int64(0)
    pointer = cute.make_ptr(pack.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((rows, heads, rope_columns), stride=(row_stride, head_stride, 1))
    return rows_first(first), rows_first(cute.make_tensor(pointer, layout))


def boxes(pieces: tuple, columns: int) -> list[tuple]:
    """(copy atom, one head's rows, which tile of them) for each box of `columns` columns, in their order. `pieces` are
    (copy atom, one head's rows)."""
    return [(atom, rows, box) for atom, rows in pieces for box in range(cute.size(rows, mode=[1]) // columns)]


@cute.jit
def clippable(pack: cute.Tensor) -> cute.Tensor:
    """View (rows, dim, heads) as (rows, dim, heads, ends): what a clipping tensor map describes."""
    row_stride, dim_stride, head_stride = pack.stride
    rows = cutlass.max(pack.shape[0], 1)  # a tensor map has no empty dimension
    shifted = cute.domain_offset((-rows, 0, 0), pack)
    shape = (rows, pack.shape[1], pack.shape[2], ENDS)
    strides = (row_stride, dim_stride, head_stride, row_stride)
    return cute.make_tensor(shifted.iterator, cute.make_layout(shape, stride=strides))


@cute.jit
def head_rows(pack: cute.Tensor, head: Int32, span: Span) -> cute.Tensor:
    """One head's (rows, dim), row 0 at the span's start; rows past the span are its neighbours'."""
    return cute.domain_offset((span.start, 0), pack[None, None, head])


@cute.jit
def clipped_head_rows(clippable_pack: cute.Tensor, head: Int32, span: Span) -> cute.Tensor:
    """One head's (rows, dim), row 0 at the span's start; rows past the span do not exist."""
    rows = clippable_pack.shape[0]
    return cute.domain_offset((rows - span.length, 0), clippable_pack[None, None, head, span.start + span.length])


@cute.jit
def tiles_of(
    atom: cute.CopyAtom,
    rows: cute.Tensor,
    tile_shape: cutlass.Constexpr,
    shared: cute.Tensor,
    column: cutlass.Constexpr = 0,
):
    """Partition for one copy atom: (shared stages, global tiles), both indexed by their last mode. `column` counts
    tiles along the dimension that is contiguous."""
    tiles = cute.local_tile(rows, tile_shape, (None, column))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
