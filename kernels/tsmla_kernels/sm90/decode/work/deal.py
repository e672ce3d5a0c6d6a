"""Role `deal` of the Hopper decode: one warp asks the work line and tells the others, so that they need not know it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from tsmla.identity.arch import Deal

from ....decode.line import (
    LaneWork,
    Line,
    Terms,
    Work,
    cut_line,
    group_of,
    in_lanes,
    of_equal_lengths,
    of_packs,
    work_of,
)
from ....decode.partials import Partials, begin_records, record_unit
from ....decode.segments import Segment, Unit, begin, for_each_unit, is_read_again
from ....parts.keys.visible import Visibility
from .task import Dealt, Task, rehearsal, tell


@cute.jit
def deal(
    dealing: cutlass.Constexpr[Deal], dealt: Dealt, view: Visibility, terms: Terms, partials: Partials,
    varying: cutlass.Constexpr[bool], apart: cutlass.Constexpr[bool] = True,
) -> None:  # fmt: skip
    """Tell the other warps every segment of this CTA, or a rehearsal if it has none, then the end; and record what the
    combine must know. By one warp.

    varying: calls whose requests differ in query tokens have a kernel of their own. The kernel for all others lacks the
    code that only these need: where a CTA begins, instructions are in no cache yet. `apart`: whether CTAs with
    neighbouring numbers may be far from each other on the line."""
    if const_expr(varying):
        line = cut_line(dealing, of_packs(view), terms)
        _deal(dealing, dealt, in_lanes(_work(line, apart)), partials)
    else:
        line = cut_line(dealing, *of_equal_lengths(view, terms))
        _deal(dealing, dealt, _work(line, apart), partials)


@cute.jit
def _work(line: Line, apart: cutlass.Constexpr[bool]) -> Work:
    """This CTA's place on the line. Blocks with neighbouring numbers run on the two SMs of a TPC, and both together
    take longer. Where no more than half of the CTAs have work, one of each two gets it, if they may be `apart`."""
    worker, workers = cute.arch.block_idx()[0], line.terms.workers.value
    if const_expr(apart):
        if 2 * line.groups * group_of(line) <= workers:
            worker = (worker & 1) * ((workers + 1) // 2) + worker // 2
    return work_of(line, worker)


class Told(NamedTuple):
    """What the other warps have been told: tasks; tiles; tasks with tiles."""

    tasks: Int32
    tiles: Int32
    loads: Int32


def _deal(dealing: Deal, dealt: Dealt, work: Work | LaneWork, partials: Partials) -> None:
    begin_records(work, partials.records)
    work, unit = begin(dealing, work)

    @cute.jit
    def tell_segment(work: Work | LaneWork, unit: Unit, segment: Segment, told: Told) -> Told:
        number, tiles, loads = told
        if segment.valid:
            tell(
                dealt,
                number,
                Task(
                    Boolean(True), segment.request, segment.first_row, segment.rows, segment.end_token,
                    segment.first_tile, segment.tiles, segment.slot, segment.keys.first, segment.keys.end, tiles, loads,
                    is_read_again(dealing, work, segment),
                ),
            )  # fmt: skip
            number += 1
            tiles += segment.tiles
            if segment.tiles > 0:
                loads += 1
        record_unit(dealing, work, partials.records, unit, segment)
        return Told(number, tiles, loads)

    told = for_each_unit(dealing, work, unit, tell_segment, Told(Int32(0), Int32(0), Int32(0)))
    _end(dealt, told.tasks)


@cute.jit
def _end(dealt: Dealt, number: Int32) -> None:
    """Tell that nothing follows task `number` - 1; behind a rehearsal where there was no task."""
    if number == 0:
        tell(dealt, number, rehearsal())
        number += 1
    tell(dealt, number, Task(Boolean(False), *(Int32(0) for _ in range(len(Task._fields) - 2)), Boolean(False)))
