"""Where the Hopper decode writes: rows of the output, or partial rows of a split unit in the workspace."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from tsmla.support import LATENT_DIM

from ..parts.decode_work import Segment


class Results(NamedTuple):
    """out [B, q_len, H, 512], lse [B, q_len, H] or None, workspace (float32): `slots` partial results of `stored` rows
    each, all rows first, then the base-2 LSE of all."""

    out: cute.Tensor
    lse: cute.Tensor | None
    workspace: cute.Tensor
    heads: Int32
    slots: Int32
    stored: Int32


@cute.jit
def store_row(
    results: Results,
    segment: Segment,
    position: Int32,
    column: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    """This lane's part of an output row: pairs of columns, 8 apart, from `column` on."""
    token, head = _token_head(results, segment, position)
    target = results.out[segment.request, token, head, None]
    _store_pairs(target.iterator, target.element_type, column, accumulator, row, factor)


@cute.jit
def store_partial_row(
    results: Results,
    segment: Segment,
    position: Int32,
    column: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    """As `store_row`, to the segment's slot in float32."""
    offset = Int64(segment.slot * results.stored + position) * LATENT_DIM
    _store_pairs(results.workspace.iterator + offset, Float32, column, accumulator, row, factor)


@cute.jit
def store_lse(results: Results, segment: Segment, position: Int32, value: Float32) -> None:
    if const_expr(results.lse is not None):
        token, head = _token_head(results, segment, position)
        lse = results.lse
        lse[segment.request, token, head] = value


@cute.jit
def store_partial_lse(results: Results, segment: Segment, position: Int32, value: Float32) -> None:
    rows = Int64(results.slots * results.stored) * LATENT_DIM
    workspace = results.workspace
    workspace[rows + segment.slot * results.stored + position] = value


@cute.jit
def _token_head(results: Results, segment: Segment, position: Int32):
    row = segment.first_row + position
    token = row // results.heads
    return token, row - token * results.heads


@cute.jit
def _store_pairs(
    start: cute.Pointer,
    dtype: cutlass.Constexpr,
    column: Int32,
    accumulator: cute.Tensor,
    row: cutlass.Constexpr,
    factor: Float32,
) -> None:
    size = dtype.width // 8
    address = start.toint() + Int64(column) * size
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=2 * size)
    columns = cute.size(accumulator, mode=[1])
    target = cute.make_tensor(pointer, cute.make_layout((2, columns // 2), stride=(1, 8)))
    rounded = cute.make_rmem_tensor((2, columns // 2), dtype)
    for i in cutlass.range_constexpr(columns // 2):
        for j in cutlass.range_constexpr(2):
            rounded[j, i] = (accumulator[row, 2 * i + j] * factor).to(dtype)
        cute.autovec_copy(rounded[None, i], target[None, i])
