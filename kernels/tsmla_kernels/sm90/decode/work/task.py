"""A segment as the dealing warp of the Hopper decode tells it to the others."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....parts.keys.visible import VisibleKeys
from ....parts.pipeline import WarpEdge
from .ring import TASK_WORDS


class Dealt(NamedTuple):
    """The ring of tasks: words [TASK_WORDS, TASK_RING] int32 and its edge."""

    words: cute.Tensor
    edge: WarpEdge


class Task(NamedTuple):
    """A segment as every role needs it: KV tiles `first_tile ..` for `rows` rows of a request, counted from `first_row`
    over all query tokens; some row sees keys within `first_key .. end_key - 1`. The request's query tokens end at
    `end_token`.

    more: False behind the last segment. slot: -1 where the result itself is written. first_count, loads: tiles, and
    segments with tiles, that came before. kept: whether other CTAs read the keys later, too, in a call whose requests
    differ."""

    more: Boolean
    request: Int32
    first_row: Int32
    rows: Int32
    end_token: Int32
    first_tile: Int32
    tiles: Int32
    slot: Int32
    first_key: Int32
    end_key: Int32
    first_count: Int32
    loads: Int32
    kept: Boolean

    @property
    def keys(self) -> VisibleKeys:
        return VisibleKeys(self.first_key, self.end_key)


def rehearsal() -> Task:
    """What a CTA without a segment is told: a partial result of no rows and no tiles. It runs the code that ends a
    segment, which is in no cache, well before the CTAs that have one come there, and so brings it into L2 for them."""
    zeros = (Int32(0) for _ in range(len(Task._fields) - 2))
    return Task(Boolean(True), *zeros, Boolean(False))


def is_rehearsal(task: Task) -> Boolean:
    """Whether a task with a slot is a rehearsal: a segment with a slot has tiles."""
    return task.tiles == 0


@cute.jit
def tell(dealt: Dealt, number: Int32, task: Task) -> None:
    """Tell the other warps task `number` of this CTA; called by the dealing warp."""
    dealt.edge.wait_empty(number)
    words = dealt.words
    place = dealt.edge.stage(number)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(TASK_WORDS):
            words[i, place] = Int32(task[i]) if const_expr(i > 0) else Int32(task.more) + Int32(task.kept)
    cute.arch.sync_warp()
    dealt.edge.hand_over(number)


@cute.jit
def take(dealt: Dealt, number: Int32) -> Task:
    """Wait for task `number` of this CTA, which this warp must `leave`, as `take_next` does."""
    dealt.edge.wait_full(number)
    return look(dealt, number)


@cute.jit
def look(dealt: Dealt, number: Int32) -> Task:
    """Read again a task that this warp has taken and not left, rather than keep it in registers."""
    values = [dealt.words[i, dealt.edge.stage(number)] for i in range(TASK_WORDS)]
    return Task(values[0] != 0, *values[1:], values[0] > 1)


@cute.jit
def leave(dealt: Dealt, number: Int32) -> None:
    cute.arch.sync_warp()
    dealt.edge.release(number)


@cute.jit
def take_next(dealt: Dealt, number: Int32) -> tuple[Int32, Task]:
    """Leave task `number`, and take the one behind it: its number, and the task."""
    leave(dealt, number)
    number += 1
    return number, take(dealt, number)


@cute.jit
def for_each_task(dealt: Dealt, act) -> None:
    """Call `act(number, task)` for every task of this CTA, in one warp."""
    number = Int32(0)
    task = take(dealt, number)
    while task.more:
        act(number, task)
        number, task = take_next(dealt, number)


@cute.jit
def count_over_tasks(dealt: Dealt, act) -> None:
    """Call `act(number, task, count)` for every task of this CTA, in one warp; what it returns is the next one's count,
    0 the first one's."""
    number, count = Int32(0), Int32(0)
    task = take(dealt, number)
    while task.more:
        count = act(number, task, count)
        number, task = take_next(dealt, number)


@cute.jit
def border_tile(task: Task, tile: Int32, tile_kv: cutlass.Constexpr):
    """Whether a tile holds keys that no row sees: they may be NaN, or lie in pages that do not exist."""
    return task.keys.lacks(tile * tile_kv, tile_kv)


def in_smaller_tiles(task: Task, parts: int) -> Task:
    """A task whose tiles are counted in parts of those of the plan, `parts` to one."""
    if parts == 1:
        return task
    counts = {name: getattr(task, name) * parts for name in ("first_tile", "tiles", "first_count")}
    return task._replace(**counts)
