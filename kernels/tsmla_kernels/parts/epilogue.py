"""From a warpgroup's output accumulator to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from .precision import packed_words
from .seqlen import Span


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
def store_row(values: list, target: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Round `values` to the type of `target`, one row, and store them from column `first`, 16 bytes at a time."""
    dtype = target.element_type
    vector = 128 // dtype.width
    for part in cutlass.range_constexpr(len(values) // vector):
        words = cute.make_rmem_tensor(128 // 32, Int32)
        packed = packed_words(values[part * vector : part * vector + vector], dtype)
        for word in cutlass.range_constexpr(128 // 32):
            words[word] = packed[word]
        place = cute.local_tile(target, (vector,), (first // vector + part,))
        cute.autovec_copy(cute.recast_tensor(words, dtype), place)
