"""From a warpgroup's output accumulator to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from ..seqlen import Span


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
