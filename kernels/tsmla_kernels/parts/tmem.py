"""Tensor memory seen by a warpgroup whose thread t owns lane t: one row of 32-bit columns per thread.

Loads and stores are asynchronous: `wait_loads` and `wait_stores` end those of the calling warp. The fences order
tcgen05 operations before a barrier with those after it in another thread (PTX ISA, tcgen05 memory consistency model).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

COLUMNS = 512
"""32-bit columns of one SM's tensor memory."""
LANES = 128
_LANE_STRIDE = 1 << 16


@cute.jit
def _row(tmem: cute.Pointer, columns: cutlass.Constexpr) -> cute.Tensor:
    return cute.make_tensor(tmem, cute.make_layout((LANES, columns), stride=(_LANE_STRIDE, 1)))


@cute.jit
def load(tmem: cute.Pointer, thread: Int32, registers: cute.Tensor, repetition: cutlass.Constexpr = 32) -> None:
    """Start loading this thread's row, from the column of `tmem` on, into `registers` (contiguous, 32-bit)."""
    tile = _row(tmem, repetition)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(repetition)), Float32)
    copy = tcgen05.make_tmem_copy(atom, tile).get_slice(thread)
    shape = copy.partition_D(cute.make_identity_tensor((LANES, repetition))).shape
    for first in cutlass.range_constexpr(0, cute.size(registers), repetition):
        source = copy.partition_S(_row(tmem + first, repetition))
        cute.copy(copy, source, cute.make_tensor(registers.iterator + first, cute.make_layout(shape)))


@cute.jit
def load_with_maximum(
    tmem: cute.Pointer, thread: Int32, registers: cute.Tensor, maxima: cute.Tensor, repetition: cutlass.Constexpr = 32
) -> None:
    """As `load`; `maxima` receives the largest value of every `repetition` columns, NaN ignored. sm_103a only."""
    atom = cute.make_copy_atom(
        tcgen05.LdRed32x32bOp(tcgen05.Repetition(repetition), redOp=tcgen05.TmemLoadRedOp.MAX), Float32
    )
    copy = tcgen05.make_tmem_copy(atom, _row(tmem, repetition)).get_slice(thread)
    for part in cutlass.range_constexpr(cute.size(maxima)):
        first = part * repetition
        source = copy.partition_S(_row(tmem + first, repetition))
        values = cute.make_tensor(registers.iterator + first, cute.make_layout(((repetition, 1), 1)))
        maximum = cute.make_tensor(maxima.iterator + part, cute.make_layout((1, 1)))
        cute.copy_atom_call(copy, source[None, 0, 0], (values[None, 0], maximum[None, 0]))


@cute.jit
def store(tmem: cute.Pointer, thread: Int32, registers: cute.Tensor) -> None:
    """Start storing `registers` (contiguous, 32-bit) to this thread's row, from the column of `tmem` on.

    Any count is split into powers of two, the largest first.
    """
    pieces = _powers_of_two(cute.size(registers))
    for piece in cutlass.range_constexpr(len(pieces)):
        first, repetition = pieces[piece]
        tile = _row(tmem + first, repetition)
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(repetition)), Float32)
        copy = tcgen05.make_tmem_copy(atom, tile).get_slice(thread)
        shape = copy.partition_S(cute.make_identity_tensor((LANES, repetition))).shape
        source = cute.make_tensor(registers.iterator + first, cute.make_layout(shape))
        cute.copy(copy, source, copy.partition_D(tile))


def _powers_of_two(count: int) -> list[tuple[int, int]]:
    """(first, size) of the powers of two that `count` is the sum of, the largest first."""
    pieces, first = [], 0
    while first < count:
        size = 1 << ((count - first).bit_length() - 1)
        pieces.append((first, size))
        first += size
    return pieces


def wait_loads() -> None:
    """This warp's loads have arrived in its registers."""
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    """This warp's stores have arrived in tensor memory."""
    cute.arch.fence_view_async_tmem_store()


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Before an arrival or barrier that tells another thread of tcgen05 operations done here."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """After a wait, before tcgen05 operations that rely on what another thread did."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
