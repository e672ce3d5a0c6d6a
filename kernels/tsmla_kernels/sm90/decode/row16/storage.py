"""What lies where in a CTA's shared memory of the Hopper decode of few rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.pipeline import Barriers, LaneCopiesEdge, TmaEdge, WarpEdge
from ..work.ring import DEALT_AT, TASK_RING, TASK_WORDS
from ..work.task import Dealt
from .geometry import THERE_AT, FewRowsGeometry
from .schedule import FewRowsSchedule


class Shared(NamedTuple):
    """What the roles see of a CTA's shared memory: addresses of the first stage, of the teams' exchange, of the ends of
    rows, of their queries' largest numbers, of what is told of keys that are there, and of keys' scales; edges and
    tasks."""

    stages: Int32
    exchange: Int32
    ends: Int32
    largest: Int32
    there: Int32
    key_scales: Int32
    kv_edge: TmaEdge | LaneCopiesEdge
    dealt: Dealt


def there_of(geometry: FewRowsGeometry, shared: Shared, stage: Int32, word: int = 0) -> cute.Tensor:
    """Which keys of the tile in a stage are there, where rows are gathered: a bit for each, from word `word` on."""
    words = geometry.tile_kv // 32
    pointer = cute.make_ptr(Int32, shared.there + (stage * words + word) * 4, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(words - word))


def shared_of(schedule: FewRowsSchedule, base: cute.Pointer, barriers: Barriers) -> Shared:
    geometry = schedule.geometry
    assert DEALT_AT + TASK_WORDS * TASK_RING * 4 <= THERE_AT <= BARRIER_BYTES - geometry.stages * geometry.tile_kv // 8
    tasks = cute.make_tensor(cute.recast_ptr(base + DEALT_AT, dtype=Int32), cute.make_layout((TASK_WORDS, TASK_RING)))
    return Shared(
        stages=(base + BARRIER_BYTES).toint(),
        exchange=(base + geometry.exchange_at).toint(),
        ends=(base + geometry.ends_at).toint(),
        largest=(base + geometry.largest_at).toint(),
        there=(base + THERE_AT).toint(),
        key_scales=(base + geometry.key_scales_at).toint(),
        kv_edge=barriers.edge("kv", LaneCopiesEdge if geometry.gathers else TmaEdge),
        dealt=Dealt(tasks, barriers.edge("dealt", WarpEdge)),
    )
