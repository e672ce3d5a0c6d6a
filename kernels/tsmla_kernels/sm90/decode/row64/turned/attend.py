"""Role `attend_turned` of the Hopper decode, where value products are turned: one of two warpgroups that share 64 query
rows, each with half of the output's dims.

A third warpgroup makes probabilities (`score.py`), and leaves them in shared memory, where both warpgroups' products
read them. Values lie there in 8 bits with their dims contiguous; they are turned and widened on the way to registers.
So nobody transposes or widens them in shared memory, and sums have the 25 bits of float16 products. (Products of 8 bits
want values whose keys are contiguous, and are added in 13 bits: `tsmla.problems.sums`.)"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....limits import WARPGROUP
from .....parts.warp import QUAD
from ...work.task import Task, for_each_task
from ..begin import Attending
from ..geometry import GROUP_ROWS, PATTERN_COLUMNS, TURNED_DIMS, TURNED_OUTPUTS, DecodeGeometry
from ..storage import Shared
from .finish import finish
from .tile import KEYS_AT_ONCE, OPERANDS, Turned, add_values, await_tile


@cute.jit
def attend_turned(geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending) -> None:
    """Attend every task, as one of two warpgroups."""
    mine = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32) - 1
    act = functools.partial(_attend_task, geometry, shared, attending, mine)
    for_each_task(shared.dealt, act)


@cute.jit
def _attend_task(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending, mine: Int32, number: Int32,
    task: Task,
) -> None:  # fmt: skip
    """Attend task `number` as warpgroup `mine` (0 or 1)."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32)
    mma_pv = attending.products.pv
    pv = mma_pv.get_slice(0)
    outputs = tuple(
        cute.make_rmem_tensor(mma_pv.partition_shape_C((TURNED_DIMS, geometry.tile_q)), Float32)
        for _ in range(TURNED_OUTPUTS)
    )
    for output in outputs:
        output.fill(0.0)
    row = lane & 7
    first = shared.keys.loaded[0] + mine * (shared.keys.loaded[1] - shared.keys.loaded[0])
    state = Turned(
        pv_op=mma_pv.op,
        weights=pv.make_fragment_B(pv.partition_B(shared.exchange.turned.weights)),
        outputs=outputs,
        values=tuple(pv.make_fragment_A(pv.partition_shape_A((TURNED_DIMS, KEYS_AT_ONCE))) for _ in range(OPERANDS)),
        loaded=tuple(cute.make_rmem_tensor(4, Int32) for _ in range(2)),
        source=first
        + warp * (GROUP_ROWS * PATTERN_COLUMNS)
        + (lane >> 3) * (GROUP_ROWS * geometry.d_strip)
        + row * PATTERN_COLUMNS
        + ((row >> 1) << 4),
        mine=mine,
        warp=warp,
        lane=lane,
        quad_lane=lane % QUAD,
        first_count=task.first_count,
        shared=shared,
        geometry=geometry,
    )
    moved = Boolean(False)
    if task.tiles > 0:
        moved = await_tile(state, Int32(0))
    for index in cutlass.range(task.tiles, unroll=1):
        moved = add_values(state, index, task.tiles, moved)
    finish(state, number, attending.results)
