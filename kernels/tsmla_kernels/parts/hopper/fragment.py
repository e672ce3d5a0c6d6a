"""Views of a wgmma accumulator: rows and columns, and the A operand of the next MMA.

A thread of a warpgroup holds, of each 64 x N tile, rows l/4 and l/4 + 8 and of every 8 columns the two that start at
2 (l % 4) (PTX ISA, wgmma accumulator fragment). As a layout: ((2 columns, 2 rows, N/8), m tiles, n tiles).
"""

from __future__ import annotations

import cutlass.cute as cute


def rows_columns(accumulator: cute.Tensor) -> cute.Tensor:
    """View an accumulator's registers as (rows, columns)."""
    layout = accumulator.layout
    column, row, block = layout.shape[0]
    s_column, s_row, s_block = layout.stride[0]
    return cute.make_tensor(
        accumulator.iterator,
        cute.make_layout(
            ((row, layout.shape[1]), (column, block, layout.shape[2])),
            stride=((s_row, layout.stride[1]), (s_column, s_block, layout.stride[2])),
        ),
    )


def as_operand_a(accumulator: cute.Tensor, bits: int) -> cute.Tensor:
    """View an accumulator's registers in the order of an A fragment of elements half or a quarter as wide.

    16 bits: ((2, 2, 2), m tiles, k tiles of 16). 8 bits: ((4, 2, 2), m tiles, k tiles of 32), with the columns in the
    order in which threads hold them: within 16 columns, number 4 i + (0, 1, 2, 3) is column 2 i + (0, 1, 8, 9). B must
    have its rows in the same order (`transpose`)."""
    layout = accumulator.layout
    column, row, block = layout.shape[0]
    s_column, s_row, s_block = layout.stride[0]
    blocks = {16: 2, 8: 4}[bits]
    assert layout.shape[2] == 1 and block % blocks == 0, layout
    if bits == 16:
        shape, stride = (column, row, 2), (s_column, s_row, s_block)
    else:
        shape, stride = ((column, 2), row, 2), ((s_column, s_block), s_row, 2 * s_block)
    shape, stride = (shape, layout.shape[1], block // blocks), (stride, layout.stride[1], blocks * s_block)
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
