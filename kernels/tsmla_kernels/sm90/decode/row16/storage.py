"""What lies where in a CTA's shared memory of the Hopper decode of few rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.pipeline import Barriers, TmaEdge, WarpEdge
from ..work.ring import DEALT_AT, TASK_RING, TASK_WORDS
from ..work.task import Dealt
from .schedule import FewRowsSchedule


class Shared(NamedTuple):
    """What the roles see of a CTA's shared memory: addresses of the first stage, of the teams' exchange, of the ends of
    rows and of their queries' largest numbers; edges and tasks."""

    stages: Int32
    exchange: Int32
    ends: Int32
    largest: Int32
    kv_edge: TmaEdge
    dealt: Dealt


def shared_of(schedule: FewRowsSchedule, base: cute.Pointer, barriers: Barriers) -> Shared:
    geometry = schedule.geometry
    tasks = cute.make_tensor(cute.recast_ptr(base + DEALT_AT, dtype=Int32), cute.make_layout((TASK_WORDS, TASK_RING)))
    return Shared(
        stages=(base + BARRIER_BYTES).toint(),
        exchange=(base + geometry.exchange_at).toint(),
        ends=(base + geometry.ends_at).toint(),
        largest=(base + geometry.largest_at).toint(),
        kv_edge=barriers.edge("kv", TmaEdge),
        dealt=Dealt(tasks, barriers.edge("dealt", WarpEdge)),
    )
