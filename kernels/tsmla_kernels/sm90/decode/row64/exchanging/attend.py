"""Role `attend` of the Hopper decode: one of two warpgroups that share 64 query rows, each with half of the output.

The warpgroups take turns: the first computes scores and probabilities of even tiles, the second those of odd ones, and
hands them to the other through shared memory; both add every tile's value product to their half of the output. Each
row's reference is handed over first: it is all that the second warpgroup's softmax needs of the first's. A thread and
its counterpart 128 threads on hold the same rows and columns of the probabilities, so these travel in register order,
and each warp synchronises with its counterpart only. (Output split over two warpgroups that exchange probabilities:
FlashMLA, docs/20250422-new-kernel-deep-dive.md; there, a warpgroup multiplies its own tile first. Here tiles are added
in order, so that the earlier one's strips are free before the later one has arrived; and the second warpgroup's softmax
comes before its part of the first's value product, so that the first waits less. Where strips are converted, its own
tile is rarely there by then: it multiplies the received one first, whose strips are free again a tile sooner.)

A short call runs most of this once or twice, and part of it lies behind a kernel's first 64 KB, where an instruction
that is not in the cache yet takes 13 clk (kernels/log/hopper-decode.md, "Where code lies"). For this reason little
stands in two places: both warpgroups begin and end a task in the same code, and outputs are not rescaled before there
are any, nor filled with zeros first. Rare code stands together behind one branch: each jump over code costs, too. CTAs
that have no work run the end of a task, which is in no cache, for those that have."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....limits import WARPGROUP
from .....parts.hopper.lazy_softmax import is_ahead
from ...work.task import Task, for_each_task
from ..begin import Attending, begin
from ..geometry import OUTPUTS, DecodeGeometry
from ..state import DecodeState, Multiplying, start_scores
from ..storage import Shared
from .finish import finish
from .tile import (
    await_references,
    end_scores,
    end_values,
    follow,
    give,
    make_probabilities,
    receive,
    rescale_outputs,
    start_values,
)


@cute.jit
def attend(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending
) -> None:  # fmt: skip
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
    mma_pv = attending.products.pv
    pv = mma_pv.get_slice(0)
    own, received = (pv.make_fragment_A(pv.partition_shape_A((64, geometry.tile_kv))) for _ in range(2))
    output_shape = mma_pv.partition_shape_C((64, geometry.value_columns))
    outputs = tuple(cute.make_rmem_tensor(output_shape, Float32) for _ in range(OUTPUTS))
    state = begin(geometry, shared, attending, mine, task)
    next_total, rescale_received = (cute.make_rmem_tensor_like(state.rows.total) for _ in range(2))
    state = state._replace(multiplying=Multiplying(own, received, outputs, next_total, rescale_received))
    tiles = task.tiles
    if tiles > 0:
        shared.edges.q.wait_full(task.loads)
    if mine == 0:
        index = Int32(0)
        more = tiles > 0
        while more:
            _own_tile(state, index, 0, index == 0 if const_expr(geometry.converts) else False)
            more = index + 1 < tiles
            if more:
                _received_tile(state, index + 1, 0)
                index += 2
                more = index < tiles
        if tiles > 0:
            shared.edges.q.release(task.loads)
    else:
        for turn in cutlass.range(tiles // 2, unroll=1):
            if const_expr(geometry.converts):
                followed = _received_tile(state, 2 * turn, 1)
                _own_tile(state, 2 * turn + 1, 1, followed and turn > 0)
            else:
                _received_and_own_tile(state, 2 * turn, 1)
        if tiles > 0:
            shared.edges.q.release(task.loads)
        if tiles % 2 == 1:
            _received_tile(state, tiles - 1, 1)
    finish(state, mine, number, attending.results)


@cute.jit
def _own_tile(state: DecodeState, index: Int32, mine: cutlass.Constexpr, must_move: Boolean | bool = False):
    """Score tile `index`, hand its probabilities to the other warpgroup, and add its values to this one's half of the
    output.

    must_move: whether references move to the rows' maxima in any case. Where rows are not converted they do, before a
    task's first tile (`end_scores`), and where they have just followed those of the tile before
    (`_received_and_own_tile`)."""
    scores = start_scores(state, index)
    end_scores(state, scores, index, False)
    make_probabilities(state, scores, index, False, must_move)
    give(state)
    start_values(state, state.multiplying.own, index, mine)
    end_values(state, index, mine)


@cute.jit
def _received_tile(state: DecodeState, index: Int32, mine: cutlass.Constexpr) -> Boolean:
    """Add the values of tile `index`, whose probabilities the other warpgroup has made. Returns whether this one's
    references had to follow."""
    received = await_references(state, index)
    follows = cute.arch.vote_any_sync(is_ahead(received, state.rows.reference))
    if follows:
        follow(state, received)
        rescale_outputs(state, state.multiplying.rescale_received, index)
    receive(state, index)
    start_values(state, state.multiplying.received, index, mine)
    end_values(state, index, mine)
    return follows


@cute.jit
def _received_and_own_tile(state: DecodeState, index: Int32, mine: cutlass.Constexpr):
    """A received tile and the own one after it, whose probabilities need only the received one's references."""
    scores = start_scores(state, index + 1)
    end_scores(state, scores, index + 1, True)
    moves = make_probabilities(state, scores, index, True)
    receive(state, index)
    give(state)
    start_values(state, state.multiplying.received, index, mine)
    end_values(state, index, mine)
    if moves:
        rescale_outputs(state, state.rows.rescale, index + 1)
    start_values(state, state.multiplying.own, index + 1, mine)
    end_values(state, index + 1, mine)
