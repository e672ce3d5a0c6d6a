"""Widening an 8-bit tile in shared memory to float16, in the layout that products of 16 bits read.

wgmma adds products of 8-bit numbers in sums of 13 bits (`tsmla.problems.sums`), which over the keys of a long context
lose what a value adds; products of float16 are added in 25 bits. Every e4m3 and e5m2 number is a float16.

Addresses are computed here because tensors would swizzle each of them anew. Eight lanes read, and write, eight rows, at
places that lie in different banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...limits import VECTOR_BYTES
from ..alignment import shared_vector
from ..precision import widened

ROW_BYTES = 128
"""Bytes of a row of a target, 64 dims, swizzled over as many bytes. Those of a source may be as long, 128 dims."""
BLOCK_KEYS = 16
"""Keys of ROW_BYTES dims each that a warp widens at once: two lanes have each."""
AHEAD = 2
"""Vectors that a lane loads before it stores one: the compiler keeps loads and stores in order."""


@cute.jit
def widen(source: cute.Tensor, target: cute.Tensor, share: Int32, shares: cutlass.Constexpr[int]) -> None:
    """Set target[key, dim] = source[key, dim] of all dims and each block of keys in share `share` of `shares`; all
    lanes of a warp call it. Both tiles have their dims contiguous, ROW_BYTES of a key in a row; the next dims lie
    behind all keys. Two halves of a warp have every other vector of the same rows."""
    keys, dims = cute.size(source, mode=[0]), cute.size(source, mode=[1])
    assert dims % ROW_BYTES == 0 and keys % BLOCK_KEYS == 0, (keys, dims)
    key, half = cute.arch.lane_idx() % BLOCK_KEYS, cute.arch.lane_idx() // BLOCK_KEYS
    row = key * ROW_BYTES + key % 8 * VECTOR_BYTES
    read = source.iterator.toint() + (row ^ half * VECTOR_BYTES)
    write = target.iterator.toint() + (row ^ half * (2 * VECTOR_BYTES))
    blocks = keys // BLOCK_KEYS
    for block in cutlass.range(share, blocks * (dims // ROW_BYTES), shares, unroll=1):
        start = block * (BLOCK_KEYS * ROW_BYTES)
        skipped = block // blocks * (keys * ROW_BYTES)  # a row of the source makes two of the target
        _widen_row(source.element_type, read + start, write + start + skipped, keys)


def _widen_row(dtype: type[cutlass.Numeric], read: Int32, write: Int32, keys: int) -> None:
    """Widen every other vector of a row of the source, from address `read`."""
    vectors, loaded = ROW_BYTES // VECTOR_BYTES // 2, []
    for index in range(vectors + AHEAD):
        if index < vectors:
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(shared_vector(Int32, read ^ 2 * index * VECTOR_BYTES), words)
            loaded.append(words)
        if index >= AHEAD:
            words = loaded[index - AHEAD]
            for half in range(2):
                second, vector = divmod(4 * (index - AHEAD) + half, ROW_BYTES // VECTOR_BYTES)
                wide = cute.make_rmem_tensor(4, Int32)
                for word in range(2):
                    wide[2 * word], wide[2 * word + 1] = widened(words[2 * half + word], dtype)
                place = (write ^ vector * VECTOR_BYTES) + second * (keys * ROW_BYTES)
                cute.autovec_copy(wide, shared_vector(Int32, place))
