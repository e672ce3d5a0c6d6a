"""Telling the compiler that an address is a multiple of something, which it cannot see."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def aligned(pointer: cute.Pointer, size: int) -> cute.Pointer:
    """Declare a pointer a multiple of `size` bytes and return it; nothing is checked. (`Pointer.align` would round it
    up, with instructions.)"""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=size)


@cute.jit
def shared_vector(dtype: cutlass.Constexpr, address: Int32) -> cute.Tensor:
    """View 16 bytes of shared memory at an address that is a multiple of 16."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(128 // dtype.width))


@cute.jit
def wipe_vector(place: cute.Tensor) -> None:
    """Write zeros over 16 bytes of shared memory."""
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    cute.autovec_copy(zeros, place)


@cute.jit
def shared_word(dtype: cutlass.Constexpr, address: Int32):
    """Read one element of shared memory."""
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.smem), cute.make_layout(1))[0]
