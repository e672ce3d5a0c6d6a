"""Warp-level products of 16 x 8 x 16, in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm


def multiply(kind: str, accumulator: cute.Tensor, a: list[Int32], low: Int32, high: Int32) -> None:
    """accumulator (4 float32) += a b, of 16-bit numbers of a `kind`, f16 or bf16.

    A lane l has of the accumulator rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the one behind it; of a the same
    rows, for k as these columns and 8 further on; of b column l / 4, for these k in `low` and `high` (PTX ISA,
    mma.m16n8k16)."""
    f32 = Float32.mlir_type
    sums = [accumulator[i] for i in range(4)]
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        [x.ir_value() for x in (*a, low, high, *sums)],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False, is_align_stack=False,
    )  # fmt: skip
    for i in range(4):
        accumulator[i] = Float32(llvm.extractvalue(f32, result, [i]))
