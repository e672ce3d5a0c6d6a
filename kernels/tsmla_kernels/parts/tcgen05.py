"""Blackwell's tensor core: shared-memory descriptors, instruction descriptors, products, tensor memory.

Descriptors follow the PTX ISA (tcgen05, "Matrix descriptor" and "Instruction descriptor"). Operands lie in chunks of
8 rows by one swizzled row of 32, 64 or 128 bytes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass.cute.nvgpu import tcgen05 as nvgpu
from cutlass.cutlass_dsl import Numeric, T, dsl_user_op

TENSOR_MEMORY = 6
"""LLVM's address space of tensor memory."""
LANE_SHIFT = 16
BOTH = 0b11
"""CTA mask of a pair."""
STEP_BYTES = 32
"""Bytes of A's and B's rows that one product consumes."""

_SWIZZLES = {128: 2, 64: 4, 32: 6}
_FORMATS = {cutlass.Float16: 0, cutlass.BFloat16: 1, cutlass.Float8E4M3FN: 0, cutlass.Float8E5M2: 1}


def descriptor(swizzle: int, leading_bytes: int, stride_bytes: int) -> int:
    """A shared-memory descriptor without its address.

    `stride_bytes` lies between groups of 8 rows (K-major) or of 8 positions along K (MN-major); `leading_bytes`
    between swizzled rows along M or N (MN-major only).
    """
    return leading_bytes >> 4 << 16 | stride_bytes >> 4 << 32 | 1 << 46 | _SWIZZLES[swizzle] << 61


def instruction(dtype: type[Numeric], m: int, n: int, b_rows_contiguous: bool = False) -> int:
    """The instruction descriptor of D (f32, m x n) = A B^T; with `b_rows_contiguous` B is MN-major."""
    code = _FORMATS[dtype]
    return 1 << 4 | code << 7 | code << 10 | int(b_rows_contiguous) << 16 | n >> 3 << 17 | m >> 4 << 24


@dsl_user_op
def at(base: int, address: Int32, *, loc=None, ip=None) -> Int64:
    """The descriptor `base` for a shared-memory address; `advance` it rather than make one for every product.

    The address passes through an instruction that the compiler cannot move. Otherwise it computes the descriptors of
    a whole tile ahead of the loop, and spills them.
    """
    opaque = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip
    )
    return Int64(base, loc=loc, ip=ip) | Int64((opaque & 0x3FFFF) >> 4, loc=loc, ip=ip)


@cute.jit
def advance(made: Int64, offset_bytes: cutlass.Constexpr) -> Int64:
    """The descriptor of a place `offset_bytes` further."""
    return made + (offset_bytes >> 4)


@dsl_user_op
def _pointer(address: Int32, *, loc=None, ip=None) -> ir.Value:
    space = llvm.PointerType.get(TENSOR_MEMORY)
    return llvm.inttoptr(space, Int32(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def multiply(
    ctas: int, dtype: type[Numeric], d: Int32, a: Int64, b: Int64, instruction: int, keep: Boolean, *, loc=None, ip=None
) -> None:
    """D (+)= A B^T, by one thread of the even one of `ctas` CTAs: 64 rows of A and D are in each, and B's rows are
    divided among them. `keep` adds to what D holds. Either way D's columns are halved: the second half of its columns
    is on lanes 64-127 (PTX ISA, tcgen05 data path layouts B and, for the `.ws` form, E)."""
    kind = nvvm.Tcgen05MMAKind.F8F6F4 if dtype.width == 8 else nvvm.Tcgen05MMAKind.F16
    operands = (
        _pointer(d, loc=loc, ip=ip),
        Int64(a).ir_value(loc=loc, ip=ip),
        Int64(b).ir_value(loc=loc, ip=ip),
        Int32(instruction).ir_value(loc=loc, ip=ip),
        Boolean(keep).ir_value(loc=loc, ip=ip),
    )
    if ctas == 1:
        nvvm.tcgen05_mma_ws(kind, *operands, loc=loc, ip=ip)
    else:
        nvvm.tcgen05_mma(kind, nvvm.CTAGroupKind.CTA_2, *operands, loc=loc, ip=ip)


@dsl_user_op
def commit(barrier: cute.Pointer, ctas: int, *, loc=None, ip=None) -> None:
    """Arrive on the barrier at this offset of every CTA when this thread's products so far are done."""
    if ctas == 1:
        nvgpu.commit(barrier, loc=loc, ip=ip)
    else:
        nvgpu.commit(barrier, BOTH, nvgpu.CtaGroup.TWO, loc=loc, ip=ip)


@dsl_user_op
def load(address: Int32, columns: int, *, loc=None, ip=None) -> cute.Tensor:
    """Start loading `columns` columns of this thread's lane; `wait_loads` before the values are used."""
    found = nvvm.tcgen05_ld(
        T.vector(columns, T.i32()), nvvm.Tcgen05LdStShape.SHAPE_32X32B, _pointer(address, loc=loc, ip=ip),
        loc=loc, ip=ip,
    )  # fmt: skip
    floats = vector.bitcast(T.vector(columns, T.f32()), found, loc=loc, ip=ip)
    values = cute.make_rmem_tensor(columns, Float32, loc=loc, ip=ip)
    values.store(cute.TensorSSA(floats, columns, Float32), loc=loc, ip=ip)
    return values


@dsl_user_op
def store(address: Int32, values: cute.Tensor, *, loc=None, ip=None) -> None:
    """Start storing to this thread's lane; `wait_stores` before anybody reads it."""
    columns = cute.size(values)
    words = vector.bitcast(T.vector(columns, T.i32()), values.load(loc=loc, ip=ip), loc=loc, ip=ip)
    nvvm.tcgen05_st(
        nvvm.Tcgen05LdStShape.SHAPE_32X32B, _pointer(address, loc=loc, ip=ip), words, loc=loc, ip=ip
    )  # fmt: skip


@dsl_user_op
def wait_loads(*, loc=None, ip=None) -> None:
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD, loc=loc, ip=ip)


@dsl_user_op
def wait_stores(*, loc=None, ip=None) -> None:
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.STORE, loc=loc, ip=ip)


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Between this thread's tensor-memory work and the arrival that tells others."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """Between a wait for others and this thread's tensor-memory work."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
