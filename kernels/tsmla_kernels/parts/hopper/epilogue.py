"""From a warpgroup's output accumulator to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ..alignment import aligned
from ..row_end import with_earlier
from ..seqlen import Span
from .fragment import QUAD, rows_columns


@cute.jit
def stage_output(tiled_mma: cute.TiledMma, thread: Int32, accumulator: cute.Tensor, shared: cute.Tensor) -> None:
    """Round the accumulator to the type of `shared` (64 rows, dim) and store it there, this thread's part."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), shared.element_type)
    copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)
    rounded = cute.make_rmem_tensor_like(accumulator, shared.element_type)
    rounded.store(accumulator.load().to(shared.element_type))
    cute.copy(copy, copy.retile(rounded), copy.partition_D(shared))


@cute.jit
def store_lse(
    lse: cute.Tensor, values: cute.Tensor, coordinates: cute.Tensor, head: Int32, span: Span, first_row: Int32
) -> None:
    """Write the rows' LSE to `lse` [tokens, heads]; one lane of each quad writes, rows past the span are skipped."""
    if coordinates[0, 0][1] == 0:
        for row in cutlass.range_constexpr(cute.size(values)):
            position = first_row + coordinates[row, 0][0]
            if position < span.length:
                lse[span.start + position, head] = values[row]


@cute.jit
def load_lse(
    lse: cute.Tensor, values: cute.Tensor, coordinates: cute.Tensor, head: Int32, span: Span, first_row: Int32
) -> None:
    """Read the rows' LSE from `lse` [tokens, heads]: the lane of each quad that will write it, for all. Those of rows
    past the span stay as they are."""
    lane = cute.arch.lane_idx()
    for row in cutlass.range_constexpr(cute.size(values)):
        position = first_row + coordinates[row, 0][0]
        value = values[row]
        if coordinates[row, 0][1] == 0 and position < span.length:
            value = lse[span.start + position, head]
        values[row] = cute.arch.shuffle_sync(value, lane - lane % QUAD)


@cute.jit
def add_earlier(
    tiled_mma: cute.TiledMma,
    thread: Int32,
    accumulator: cute.Tensor,
    factor: cute.Tensor,
    kept: cute.Tensor,
    out: cute.Tensor,
    head: Int32,
    span: Span,
    first_row: Int32,
) -> None:
    """Add the rows of an earlier result `out` [tokens, heads, dim], times `kept`, to the accumulator's, which have been
    multiplied by `factor`. Rows past the span have none."""
    view = rows_columns(accumulator)
    dim = cute.size(view, mode=[1]) * QUAD
    places = rows_columns(tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((64, dim))))
    for row in cutlass.range_constexpr(cute.size(view, mode=[0])):
        position, column = first_row + places[row, 0][0], places[row, 0][1]
        if position < span.length and kept[row] != 0.0:
            line = out[span.start + position, head, None]
            pairs = cute.make_layout((2, dim // 8), stride=(1, 8))
            source = cute.make_tensor(aligned(line.iterator + column, 4), pairs)
            earlier = cute.make_rmem_tensor((2, dim // 8), out.element_type)
            cute.autovec_copy(source, earlier)
            widened = earlier.load().to(Float32)
            for index in cutlass.range_constexpr(dim // QUAD):
                view[row, index] = with_earlier(view[row, index], widened[index], factor[row], kept[row])
