"""Maximum of three: one instruction on Blackwell."""

from __future__ import annotations

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """The greatest; NaN only when all are."""
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b, c)]
    return Float32(llvm.inline_asm(T.f32(), operands, "max.f32 $0, $1, $2, $3;", "=f,f,f,f", loc=loc, ip=ip))
