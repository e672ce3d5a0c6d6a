"""Tensor memory seen by a warpgroup whose thread t owns lane t: one row of 32-bit columns per thread.

Addresses are lane << 16 | column, of a warp's first lane. Loads and stores are asynchronous: `wait_loads` and
`wait_stores` end those of the calling warp. The fences order tcgen05 operations before a barrier with those after it in
another thread (PTX ISA, tcgen05 memory consistency model).

Loads and stores are written as PTX: values come and go as registers of their own. Through register tensors the compiler
pairs them up and takes them apart again, 200 moves a row of 128 columns.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import Numeric, dsl_user_op

MAXIMUM_REPETITION = 32
"""Columns that one instruction moves here."""


def row_address(base: Int32, column, warp: Int32) -> Int32:
    """Where the rows of a warpgroup's warp number `warp` start: its 32 lanes, from `column` on."""
    return base + column + (warp << 21)


def load(address: Int32, columns: int) -> list[Float32]:
    """Start loading this thread's row from `address` on."""
    values: list[Float32] = []
    for first in range(0, columns, MAXIMUM_REPETITION):
        count = min(MAXIMUM_REPETITION, columns - first)
        code = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {_operands('w', count)}, [{{$r0}}];"
        values += cute.arch.inline_ptx(code, write_only_types=[Float32] * count, read_only_args=[address + first])
    return values


def load_with_maximum(address: Int32, columns: int) -> tuple[list[Float32], list[Float32]]:
    """Start loading this thread's row, and the largest of every MAXIMUM_REPETITION values, NaN ignored. sm_103a
    only."""
    values: list[Float32] = []
    maxima: list[Float32] = []
    count = MAXIMUM_REPETITION
    for first in range(0, columns, count):
        code = f"tcgen05.ld.red.sync.aligned.32x32b.x{count}.max.f32 {_operands('w', count)}, {{$w{count}}}, [{{$r0}}];"
        *loaded, largest = cute.arch.inline_ptx(
            code, write_only_types=[Float32] * (count + 1), read_only_args=[address + first]
        )
        values += loaded
        maxima.append(largest)
    return values, maxima


def store(address: Int32, values: list[Numeric]) -> None:
    """Start storing 32-bit `values` to this thread's row from `address` on; any count, in powers of two."""
    first = 0
    while first < len(values):
        count = min(MAXIMUM_REPETITION, 1 << ((len(values) - first).bit_length() - 1))
        code = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r{count}}}], {_operands('r', count)};"
        cute.arch.inline_ptx(code, read_only_args=[*values[first : first + count], address + first])
        first += count


def _operands(kind: str, count: int) -> str:
    return "{" + ", ".join(f"{{${kind}{index}}}" for index in range(count)) + "}"


def wait_loads() -> None:
    """Wait until this warp's loads have arrived in its registers."""
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    """Wait until this warp's stores have arrived in tensor memory."""
    cute.arch.fence_view_async_tmem_store()


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Order tcgen05 operations done here before an arrival or barrier that tells another thread of them."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """Order tcgen05 operations behind a wait for what another thread did."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
