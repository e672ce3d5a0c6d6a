"""Transposing an 8-bit tile in shared memory, for products that want its columns contiguous.

8-bit wgmma reads B only with K contiguous, and values arrive with their own dimension contiguous. ldmatrix.trans moves
16-bit pairs (two dims of a key); a byte permutation makes pairs of keys of them; stmatrix writes those as rows of keys.
(Method: FlashAttention-3, arXiv 2407.08608, section 3.3.) The order of keys within 16 is the one in which threads hold
a product's columns, so that probabilities need not move between threads (`as_operand_a`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from ...limits import swizzle_bytes
from ..alignment import shared_vector


@cute.jit
def transpose_pattern(
    dtype: cutlass.Constexpr, source: Int32, group_bytes: cutlass.Constexpr, target: Int32, keys: cutlass.Constexpr
) -> None:
    """Set target[dim, key] = source[key, dim] of 64 dims, by one warp; keys within 16 in the order of `as_operand_a`.

    Both are K-major tiles: source rows are 64 bytes, swizzled over as many, groups of 8 keys `group_bytes` apart; rows
    of the target, of all `keys`, are swizzled over their length. `source` and `target` are addresses in shared memory;
    tensors would swizzle each of them anew, and keep them all in registers. Every lane of the warp calls it. Lanes 16
    to 31 swap the two rows that they store: the eight rows of one matrix are then dims 0 2 4 6 9 11 13 15 or 1 3 5 7 8
    10 12 14 of 16, which lie in different banks."""
    span = swizzle_bytes(keys)
    assert keys == span, keys
    lane = cute.arch.lane_idx()
    group, row = lane >> 3, lane & 7
    read = source + group * group_bytes + row * 64 + ((row >> 1) << 4)
    write = target + _stored_at(lane, span)
    places = [
        ((read ^ (chunk << 4)) + block * 4 * group_bytes, (write ^ block * 32) + chunk * 16 * span)
        for chunk in range(4)
        for block in range(keys // 32)
    ]
    _move(dtype, places, lane, ahead=2)


@cute.jit
def _stored_at(lane: Int32, span: cutlass.Constexpr) -> Int32:
    """Offset of a lane's row of the first 16 dims of a target with rows of `span` bytes."""
    matrix, row = lane >> 3, lane & 7
    dim = 2 * row + ((matrix ^ (row >> 2)) & 1)
    rotation = (dim >> {128: 0, 64: 1, 32: 2}[span]) & (span // 16 - 1)
    return dim * span + (((matrix >> 1) ^ rotation) << 4)


def _move(dtype: type[cutlass.Numeric], places: list[tuple[Int32, Int32]], lane: Int32, ahead: int) -> None:
    """Transpose blocks of 32 keys x 16 dims. `places`: for each block, where this lane reads a row of 16 dims of a key,
    and where it stores a row of 16 keys of a dim. `ahead` blocks are loaded before one is stored: the compiler keeps
    loads and stores in order, so this is what hides their latency, and what takes shared memory from others at once
    (kernels/log/hopper-prefill.md, 18)."""
    load, store = warp.LdMatrix8x8x16bOp(True, 4), warp.StMatrix8x8x16bOp(False, 4)
    load, store = (cute.make_copy_atom(op, dtype) for op in (load, store))
    even = cutlass.select_(lane < 16, Int32(0x6420), Int32(0x7531))
    odd = even ^ (0x6420 ^ 0x7531)
    loaded = []
    for index in range(len(places) + ahead):
        if index < len(places):
            words = cute.make_rmem_tensor(4, Int32)
            cute.copy(load, shared_vector(dtype, places[index][0]), cute.recast_tensor(words, dtype))
            loaded.append(words)
        if index >= ahead:
            words = loaded[index - ahead]
            moved = cute.make_rmem_tensor(4, Int32)
            for half in range(2):
                first, second = words[2 * half], words[2 * half + 1]
                moved[2 * half] = Int32(cute.arch.prmt(first, second, even))
                moved[2 * half + 1] = Int32(cute.arch.prmt(first, second, odd))
            cute.copy(store, cute.recast_tensor(moved, dtype), shared_vector(dtype, places[index - ahead][1]))
