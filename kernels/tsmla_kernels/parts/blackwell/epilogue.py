"""A finished row of the output, from a thread's registers to shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..precision import packed_words


@cute.jit
def store_row(values: list, target: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Round `values` to the type of `target`, one row, and store them from column `first`, 16 bytes at a time."""
    dtype = target.element_type
    vector = 128 // dtype.width
    for number in cutlass.range_constexpr(len(values) // vector):
        words = cute.make_rmem_tensor(128 // 32, Int32)
        packed = packed_words(values[number * vector : number * vector + vector], dtype)
        for word in cutlass.range_constexpr(128 // 32):
            words[word] = packed[word]
        place = cute.local_tile(target, (vector,), (first // vector + number,))
        cute.autovec_copy(cute.recast_tensor(words, dtype), place)
