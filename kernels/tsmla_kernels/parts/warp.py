"""Lanes of a warp: which of them share a row, and what they make together."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

QUAD = 4
"""Neighbouring lanes that share a row."""


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """The sum of the values of all lanes up to this one."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            value += below
    return value


@cute.jit
def inclusive_maximum(value: Int32) -> Int32:
    """The largest of the values of all lanes up to this one."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if cute.arch.lane_idx() >= 1 << step:
            value = cutlass.max(value, below)
    return value
