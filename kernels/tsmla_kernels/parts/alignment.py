"""Telling the compiler what it cannot see: that an address is a multiple of something."""

from __future__ import annotations

import cutlass.cute as cute


def aligned(pointer: cute.Pointer, size: int) -> cute.Pointer:
    """The same pointer, which is a multiple of `size` bytes; nothing is checked. (`Pointer.align` would round it up,
    with instructions.)"""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=size)
