"""What a decode call asks of the CTAs that work together, as every role is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...decode.line import LaneWork, Work
from ...decode.partials import begin_records, record_unit
from ...decode.segments import Segment, Unit, for_each_unit
from ...parts.blackwell.pair import rank_of
from ...parts.keys.source import KeySource
from ...parts.keys.visible import Viewers, viewers_of
from ...parts.pipeline import LEADER
from .geometry import DecodeGeometry


class Assignment(NamedTuple):
    """What a worker has to do: cache [pages, page size, columns], where in it keys lie, the work of these CTAs, and
    the unit that it begins with."""

    cache: cute.Tensor
    source: KeySource
    work: Work
    unit: Unit

    def viewers(self, segment: Segment) -> Viewers:
        """The rows of a segment, as viewers."""
        return viewers_of(self.work.view, segment, self.work.terms.heads)


class Done(NamedTuple):
    """What a role has done of its worker's segments: how many that have tiles, and their tiles."""

    segments: Int32
    tiles: Int32

    @classmethod
    def nothing(cls) -> Done:
        return cls(Int32(0), Int32(0))

    def and_all_of(self, segment: Segment) -> Done:
        return Done(self.segments + 1, self.tiles + segment.tiles)


def for_each_segment(
    geometry: DecodeGeometry,
    assignment: Assignment,
    body: Callable,
    done: NamedTuple,
    records: cute.Tensor | None = None,
    empty_too: bool = False,
) -> None:
    """Call done = body(segment, done) for each segment of this worker that has tiles, or also for those that have none.
    Where `records` are given, write what the combine must know of each unit.

    A body that lies in its role's function is a @cute.jit function and the role's is not: the DSL rewrites both as one
    otherwise, and takes objects whose methods the body calls under a condition for the body's own variables."""
    if records is not None:
        _begin_records(geometry, assignment.work, records)

    @cute.jit
    def act(work: Work | LaneWork, unit: Unit, segment: Segment, done: NamedTuple) -> NamedTuple:
        wanted = segment.valid if const_expr(empty_too) else segment.valid and segment.tiles > 0
        if wanted:
            done = body(segment, done)
        if const_expr(records is not None):
            if is_leader(geometry):
                record_unit(geometry.deal, work, records, unit, segment)
        return done

    for_each_unit(geometry.deal, assignment.work, assignment.unit, act, done)


@cute.jit
def _begin_records(geometry: cutlass.Constexpr[DecodeGeometry], work: Work | LaneWork, records: cute.Tensor) -> None:
    if is_leader(geometry):
        begin_records(work, records)


@cute.jit
def is_leader(geometry: cutlass.Constexpr[DecodeGeometry]) -> Boolean:
    """Whether this CTA issues the MMAs."""
    return rank_of(True) == LEADER if const_expr(geometry.is_pair) else Boolean(True)
