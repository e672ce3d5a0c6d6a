"""Role `widen` of the Hopper decode: values from e4m3 to fp16, in shared memory, by bit operations alone.

An e4m3 byte s eeee mmm, put into fp16 as s 0eeee mmm0000000, is its value times 2^-8: exactly, subnormals included. The
factor is given back with the row sums. NaN becomes 480, which a probability of 0 cancels; a visible NaN is one in its
scores as well. Of four bytes, even and odd ones make a pair each; the pairs of 16 columns are laid out so that a lane
of the value product holds 4 neighbouring columns of the result.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..schedule import WARPGROUP
from .decode_deal import Task
from .decode_geometry import CHUNK, GROUP_ROWS, DecodeGeometry

VALUES_SCALE = 2.0**8
"""What results of widened values must be multiplied by."""
_SIGNS = -0x7FFF8000
_MAGNITUDES = 0x3F803F80


@cute.jit
def widen(shared, geometry: cutlass.Constexpr[DecodeGeometry], task: Task) -> None:
    """One warpgroup: both halves of every tile of a task. A warp takes 16 rows; 8 lanes side by side take the same 16
    columns of 8 rows, and four such lots the 64 columns of a swizzle pattern: no two lanes meet in a bank.

    Tiles are addressed as vectors without their swizzles, which permute the vectors of a row of a pattern: by the row,
    and so the same all along (64-byte swizzle: vector ^ row / 2 % 4; 128-byte swizzle: vector ^ row)."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % (WARPGROUP // 32)
    row, lot = lane % GROUP_ROWS, lane // GROUP_ROWS
    groups = geometry.tile_kv // GROUP_ROWS // (WARPGROUP // 32)
    patterns = geometry.d_half // CHUNK
    for index in cutlass.range(task.tiles, unroll=1):
        count = task.first_count + index
        for half in cutlass.range_constexpr(2):
            source, target = shared.vectors[half], shared.wide_vectors[half]
            narrow, wide = shared.kv_edges[half], shared.v_edges[half]
            narrow.wait_full(count)
            wide.wait_empty(count)
            for chunk in cutlass.range(patterns, unroll=1):
                for group in cutlass.range_constexpr(groups):
                    place = groups * warp + group
                    words = cute.make_rmem_tensor(4, Int32)
                    cute.autovec_copy(source[None, row, lot ^ (row >> 1) & 3, chunk, place, narrow.stage(count)], words)
                    for odd in cutlass.range_constexpr(2):
                        pairs = cute.make_rmem_tensor(4, Int32)
                        for i in cutlass.range_constexpr(4):
                            high = words[i] if const_expr(odd) else words[i] << 8
                            low = words[i] >> 1 if const_expr(odd) else words[i] << 7
                            pairs[i] = (high & _SIGNS) | (low & _MAGNITUDES)
                        cute.autovec_copy(pairs, target[None, row, (2 * lot + odd) ^ row, chunk, place])
            wide.publish(count)
            narrow.release(count)
