"""Role `transpose` of the Hopper prefill: warps that turn each 8-bit value tile, as loaded, into keys contiguous."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...parts.hopper.transpose import transpose
from ...parts.work_range import WorkRange
from .storage import Shared


@cute.jit
def transpose_values(shared: Shared, part: Int32, parts: cutlass.Constexpr, work: WorkRange):
    """Warp `part` of `parts`, from `shared.v` to `shared.values`."""
    for count in cutlass.range(work.tiles, unroll=1):
        shared.v_edge.wait_full(count)
        shared.values_edge.wait_empty(count)
        transpose(
            shared.v[None, None, shared.v_edge.stage(count)],
            shared.values[None, None, shared.values_edge.stage(count)],
            part,
            parts,
        )
        shared.values_edge.publish(count)
        shared.v_edge.release(count)
