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


def as_operand_a(accumulator: cute.Tensor) -> cute.Tensor:
    """View an accumulator's registers in the order of an A fragment of elements of 16 bits: ((2, 2, 2), m tiles, k
    tiles of 16)."""
    layout = accumulator.layout
    column, row, block = layout.shape[0]
    s_column, s_row, s_block = layout.stride[0]
    assert layout.shape[2] == 1 and block % 2 == 0, layout
    shape = (column, row, 2), layout.shape[1], block // 2
    stride = (s_column, s_row, s_block), layout.stride[1], 2 * s_block
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
