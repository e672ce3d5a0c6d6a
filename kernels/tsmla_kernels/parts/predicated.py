"""Stores with a predicate of their own, not behind a branch: their addresses and values are computed in any case, so
that the code stays one line, and a call that stores nothing runs all of it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm


@cute.jit
def store_if(stored: Boolean, address: Int64, offset: cutlass.Constexpr[int], values: cute.Tensor) -> None:
    """8 or 16 bytes of `values`, in registers, to global memory, `offset` bytes behind `address`, if `stored`; the
    place is a multiple of their size."""
    words = cute.recast_tensor(values, Int32)
    count = cute.size(words)
    assert count in (2, 4), count
    operands = (address, Int32(stored), *(words[i] for i in range(count)))
    value = ", ".join(f"${2 + i}" for i in range(count))
    llvm.inline_asm(
        None,
        [operand.ir_value() for operand in operands],
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        f"@p st.global.v{count}.b32 [$0+{offset}], {{{value}}}; }}",
        ",".join(("l", "r", *("r" for _ in range(count)))),
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip
