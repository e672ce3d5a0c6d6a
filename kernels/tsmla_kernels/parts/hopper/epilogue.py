"""From a warpgroup's output accumulator to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_

from ..alignment import aligned
from ..precision import larger_magnitudes, packed_words
from ..ptx import store_if
from ..row_end import with_earlier
from ..seqlen import Span
from ..warp import QUAD
from .fragment import rows_columns


@cute.jit
def store_output(
    accumulator: cute.Tensor, out: cute.Tensor, coordinates: cute.Tensor, head: Int32, span: Span, first_row: Int32
) -> None:
    """Round the accumulator to the 16-bit type of `out` [tokens, heads, dim] and store it there; rows past the span are
    skipped. A quad's lanes exchange columns first, so that each stores 8 that lie together of every 32 columns of a
    row."""
    lane = cute.arch.lane_idx() % QUAD
    rounded = cute.make_rmem_tensor_like(accumulator, out.element_type)
    rounded.store(accumulator.load().to(out.element_type))
    words = cute.recast_tensor(rounded, Int32)
    rows = cute.size(coordinates, mode=[0])
    for row in cutlass.range_constexpr(rows):
        position = first_row + coordinates[row, 0][0]
        lines = []
        for start in cutlass.range_constexpr(row, cute.size(words), rows * QUAD):
            line = cute.make_rmem_tensor(QUAD, Int32)
            for block in cutlass.range_constexpr(QUAD):
                line[block] = words[start + rows * block]
            _transpose_in_quad(line, lane)
            lines.append(line)
        if position < span.length:
            target = out[span.start + position, head, None]
            for number, line in enumerate(lines):
                place = aligned(target.iterator + (QUAD * number + lane) * 8, 16)
                cute.autovec_copy(line, cute.recast_tensor(cute.make_tensor(place, cute.make_layout(8)), Int32))


@cute.jit
def store_vector(
    stored: Boolean, address: Int64, offset: cutlass.Constexpr[int], values: list, dtype: cutlass.Constexpr,
    largest: Int32 | None = None,
) -> Int32 | None:  # fmt: skip
    """Round the values, which fill 16 bytes, to a 16-bit type and store them `offset` bytes behind `address`, if
    `stored` (`store_if`). largest: a word of two float16 magnitudes; returned with the larger of them and of what has
    been rounded, stored or not."""
    words = cute.make_rmem_tensor(4, Int32)
    for i, word in enumerate(packed_words(values, dtype)):
        words[i] = word
        if const_expr(largest is not None):
            largest = larger_magnitudes(largest, word)
    store_if(stored, address, offset, words)
    return largest


@cute.jit
def _transpose_in_quad(words: cute.Tensor, lane: Int32) -> None:
    """Transpose a quad's words: word i of lane j changes places with word j of lane i."""
    for bit in cutlass.range_constexpr(QUAD.bit_length() - 1):
        step = 1 << bit
        upper = (lane & step) != 0
        for index in cutlass.range_constexpr(QUAD):
            if const_expr(index & step == 0):
                low, high = words[index], words[index + step]
                received = cute.arch.shuffle_sync_bfly(select_(upper, low, high), step)
                words[index] = select_(upper, received, low)
                words[index + step] = select_(upper, high, received)


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
    """Read the rows' LSE from `lse` [tokens, heads]: the lane of each quad that will write it reads it for all. Rows
    past the span keep their values."""
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
            columns = cute.make_layout((2, dim // 8), stride=(1, 8))
            source = cute.make_tensor(aligned(line.iterator + column, 4), columns)
            earlier = cute.make_rmem_tensor((2, dim // 8), out.element_type)
            cute.autovec_copy(source, earlier)
            widened = earlier.load().to(Float32)
            for index in cutlass.range_constexpr(dim // QUAD):
                view[row, index] = with_earlier(view[row, index], widened[index], factor[row], kept[row])
