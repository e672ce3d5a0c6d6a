"""Rotary embedding of a key's rope piece, on its way into a row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.math import RoundingMode
from cutlass.cutlass_dsl import select_
from tsmla.identity.support import ROPE_DIM

from .rows import ROPE_VECTOR, rope_column, row_address, vector

_HALF = ROPE_DIM // 2
_PARTNER = _HALF // ROPE_VECTOR
"""How far apart lanes are whose columns make pairs, where pairs lie in the two halves."""


@cute.jit
def position_of(positions: cute.Tensor, token: Int32) -> Int64:
    """The token's position; 0 where none are given."""
    position = Int64(0)
    if positions.shape[0] > 0:
        position = positions[token]
    return position


@cute.jit
def factors(
    cos_sin: cute.Tensor, position: Int64, lane: Int32, interleaved: Int32, dtype: cutlass.Constexpr
) -> tuple[cute.TensorSSA, cute.TensorSSA]:
    """Cosines and sines of a position for the lane's two columns; NaN for a position that the table does not have.
    cos_sin: rows of 32 cosines and 32 sines, as float32; where they are of `dtype`, two in each float32."""
    found = tuple(cute.make_rmem_tensor(ROPE_VECTOR, Float32) for _ in range(2))
    for numbers in found:
        numbers.fill(float("nan"))
    if (position >= 0) & (position < Int64(cos_sin.shape[0])):
        first, step = rope_column(lane) % _HALF, Int32(1)
        if interleaved != 0:
            first, step = lane, Int32(0)
        start = row_address(cos_sin, position)
        for numbers, column in zip(found, (first, first + _HALF), strict=True):
            for i in cutlass.range_constexpr(ROPE_VECTOR):
                if cos_sin.shape[1] == ROPE_DIM:
                    numbers[i] = vector(Float32, start, column + step * i, 1)[0]
                else:
                    numbers[i] = Float32(vector(dtype, start, column + step * i, 1)[0])
    return found[0].load(), found[1].load()


@cute.jit
def rotated(
    values: cute.TensorSSA, cos: cute.TensorSSA, sin: cute.TensorSSA, lane: Int32, interleaved: Int32
) -> cute.TensorSSA:
    """Rotate a lane's columns of the rope piece as `mla_write_cache` states. All lanes of the warp come by: where pairs
    lie in the two halves, a pair's columns are those of two lanes."""
    own = cute.make_rmem_tensor(ROPE_VECTOR, values.dtype)
    own.store(values)
    word = cute.recast_tensor(own, Int32)
    others = cute.make_rmem_tensor(ROPE_VECTOR, values.dtype)
    cute.recast_tensor(others, Int32)[0] = cute.arch.shuffle_sync_bfly(word[0], _PARTNER)
    second = lane // _PARTNER
    if interleaved != 0:
        second = Int32(0)
        others[0], others[1] = own[1], own[0]
    result = cute.make_rmem_tensor(ROPE_VECTOR, values.dtype)
    for i in cutlass.range_constexpr(ROPE_VECTOR):
        is_second = (second != 0) | ((interleaved != 0) & (i == 1))
        turned = _product(Float32(others[i]), Float32(select_(is_second, sin[i], -sin[i])))
        result[i] = values.dtype(_product(Float32(own[i]), cos[i]) + turned)
    return result.load()


def _product(a: Float32, b: Float32) -> Float32:
    """Multiply, rounding the product whatever is done with it then."""
    return cute.math.mul(a, b, rounding=RoundingMode.NEAREST_EVEN)
