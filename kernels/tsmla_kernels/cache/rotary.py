"""Rotary embedding of a key's rope part, on its way into a row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.math import RoundingMode
from cutlass.cutlass_dsl import select_
from tsmla.support import ROPE_DIM

from .rows import ROPE_VECTOR, rope_column, row_address, row_vector, vector

_HALF = ROPE_DIM // 2


@cute.jit
def rotated(
    values: cute.TensorSSA,
    k_pe: cute.Tensor,
    token: Int32,
    lane: Int32,
    positions: cute.Tensor,
    cos_sin: cute.Tensor,
    interleaved: Int32,
) -> cute.TensorSSA:
    """A lane's columns of the rope part, rotated as `mla_write_cache` states; as they are without positions. cos_sin:
    rows of 32 cosines and 32 sines, as float32; where they are of k_pe's type, two in each float32."""
    dtype = k_pe.element_type
    result = cute.make_rmem_tensor(ROPE_VECTOR, dtype)
    result.store(values)
    if positions.shape[0] > 0:
        column = rope_column(lane)
        others = cute.make_rmem_tensor(ROPE_VECTOR, dtype)
        others.store(row_vector(k_pe, token, column ^ _HALF, ROPE_VECTOR).load())
        first, step, second = column % _HALF, Int32(1), column // _HALF
        if interleaved != 0:
            first, step, second = lane, Int32(0), Int32(0)
            others[0], others[1] = result[1], result[0]
        cos, sin = _factors(cos_sin, positions[token], first, step, dtype)
        for i in cutlass.range_constexpr(ROPE_VECTOR):
            is_second = (second != 0) | ((interleaved != 0) & (i == 1))
            turned = _product(Float32(others[i]), Float32(select_(is_second, sin[i], -sin[i])))
            result[i] = dtype(_product(Float32(result[i]), cos[i]) + turned)
    return result.load()


def _product(a: Float32, b: Float32) -> Float32:
    """Rounded, whatever is done with it then."""
    return cute.math.mul(a, b, rounding=RoundingMode.NEAREST_EVEN)


@cute.jit
def _factors(cos_sin: cute.Tensor, position: Int64, first: Int32, step: Int32, dtype: cutlass.Constexpr) -> tuple:
    """Cosines and sines of a position for a lane's two columns. Of a position that the table does not have, NaN."""
    found = tuple(cute.make_rmem_tensor(ROPE_VECTOR, Float32) for _ in range(2))
    for part in found:
        part.fill(float("nan"))
    if (position >= 0) & (position < Int64(cos_sin.shape[0])):
        start = row_address(cos_sin, position)
        for part, part_first in zip(found, (first, first + _HALF), strict=True):
            for i in cutlass.range_constexpr(ROPE_VECTOR):
                if cos_sin.shape[1] == ROPE_DIM:
                    part[i] = vector(Float32, start, part_first + step * i, 1)[0]
                else:
                    part[i] = Float32(vector(dtype, start, part_first + step * i, 1)[0])
    return found
