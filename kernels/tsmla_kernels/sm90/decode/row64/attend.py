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

A short call runs most of this once or twice, and an instruction that is not in the cache yet takes 13 clk
(kernels/log/hopper-decode.md). For this reason little stands in two places: both warpgroups begin and end a task in the
same code, and outputs are not rescaled before there are any, nor filled with zeros first, but where products of 8 bits
are added to them. Rare code stands together behind one branch: each jump over code costs, too. CTAs that have no work
run the end of a task, which is in no cache, for those that have."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....limits import WARPGROUP
from ....parts.division import Divisor, quotient
from ....parts.hopper import mma
from ....parts.hopper.fragment import rows_columns
from ....parts.hopper.lazy_softmax import NO_ROW, is_ahead, lowest_reference
from ....parts.keys.scales import RowScales, query_scale
from ....parts.keys.visible import Visibility, VisibleKeys, keys_of_row, seen_by_all, seen_by_both
from ....parts.logarithm import LOG2_E
from ....parts.warp import QUAD
from ..results import Results
from ..work.task import Task, for_each_task
from .finish import finish
from .geometry import OUTPUTS, PARTS_AT_ONCE, DecodeGeometry
from .storage import Shared
from .tile import (
    DecodeState,
    Place,
    RowStates,
    Scaling,
    await_references,
    end_scores,
    end_values,
    follow,
    give,
    make_probabilities,
    receive,
    rescale_outputs,
    start_scores,
    start_values,
)


class Attending(NamedTuple):
    """What an attending warpgroup needs of a call."""

    products: object
    view: Visibility
    heads: Divisor
    results: Results
    softmax_scale: Float32
    scales: RowScales | None


@cute.jit
def attend(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending
) -> None:  # fmt: skip
    """Attend every task, as one of two warpgroups."""
    mine = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32) - 1
    act = functools.partial(_attend_task, geometry, shared, attending, mine)
    for_each_task(shared.dealt, act, Int32(0))


@cute.jit
def _attend_task(
    geometry: cutlass.Constexpr[DecodeGeometry], shared: Shared, attending: Attending, mine: Int32, number: Int32,
    task: Task, kept: Int32,
) -> Int32:  # fmt: skip
    """Attend task `number` as warpgroup `mine` (0 or 1)."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    products, view, heads, results, softmax_scale, scales = attending
    mma_qk, mma_rope, mma_pv = products
    qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
    rope = qk if mma_rope is None else mma_rope.get_slice(0)
    of_strip = (*(qk for _ in range(geometry.latent_strips)), *(rope for _ in geometry.behind_latent))
    outputs = tuple(
        cute.make_rmem_tensor(mma_pv.partition_shape_C((64, geometry.value_columns)), Float32) for _ in range(OUTPUTS)
    )
    coordinates = rows_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((64, geometry.tile_kv))))
    rows = cute.size(coordinates, mode=[0])
    query_scales = None
    if const_expr(scales is not None):
        query_scales = _query_scales(scales.queries, task, heads, coordinates)  # on their way while the rest begins
    parts = ()
    if const_expr(geometry.transposes):
        part_shape = mma_pv.partition_shape_C((64, geometry.product_columns))
        parts = tuple(cute.make_rmem_tensor(part_shape, Float32) for _ in range(PARTS_AT_ONCE))
        for output in outputs:
            output.fill(0.0)
    reference, row_sum, rescale, rescale_received = (cute.make_rmem_tensor(rows, Float32) for _ in range(4))
    row_keys = shared.exchange.row_keys[None, None, mine]
    scale_log2 = softmax_scale * LOG2_E if const_expr(scales is None) else Float32(1.0)
    reference.fill(lowest_reference(scale_log2))
    row_sum.fill(0.0)
    all_keys = tell_keys(view, task, heads, coordinates, reference, row_keys)
    scaling = None
    if const_expr(scales is not None):
        scaling = _scaling(query_scales, mma_rope.op, softmax_scale * LOG2_E)
    cute.arch.sync_warp()  # all four lanes of a quad read what its first has written
    operands = mma.Operands(
        qk_op=mma_qk.op,
        pv_op=mma_pv.op,
        q=tuple(x.make_fragment_A(x.partition_A(rows)) for x, rows in zip(of_strip, shared.query.strips, strict=True)),
        k=tuple(x.make_fragment_B(x.partition_B(rows)) for x, rows in zip(of_strip, shared.keys.strips, strict=True)),
        v=tuple(pv.make_fragment_B(pv.partition_B(values)) for values in shared.keys.values),
        scores_shape=mma_qk.partition_shape_C((64, geometry.tile_kv)),
    )
    state = DecodeState(
        operands=operands,
        own=pv.make_fragment_A(pv.partition_shape_A((64, geometry.tile_kv))),
        received=pv.make_fragment_A(pv.partition_shape_A((64, geometry.tile_kv))),
        outputs=outputs,
        parts=parts,
        rows=RowStates(reference, row_sum, cute.make_rmem_tensor_like(row_sum), rescale, rescale_received),
        place=Place(
            coordinates,
            thread,
            quad_lane=thread % QUAD,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // 32),
        ),
        row_keys=row_keys,
        all_keys=seen_by_all(all_keys),
        shared=shared,
        first_count=task.first_count,
        first_tile=task.first_tile,
        scale_log2=scale_log2,
        scaling=scaling,
        geometry=geometry,
    )
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
    finish(state, mine, number, results)
    return kept


@cute.jit
def tell_keys(
    view: Visibility, task: Task, heads: Divisor, coordinates: cute.Tensor, reference: cute.Tensor,
    row_keys: cute.Tensor,
) -> VisibleKeys:  # fmt: skip
    """Tell the other lanes of each quad which keys its rows see, and give rows that the task does not have a reference
    of their own. Returns the keys that all rows of this thread see."""
    leader = coordinates[0, 0][1] == 0
    all_keys = VisibleKeys.everything()
    for row in cutlass.range_constexpr(cute.size(reference)):
        position = coordinates[row, 0][0]
        keys = VisibleKeys.everything()
        if position < task.rows:
            keys = keys_of_row(view, task.request, task.end_token, quotient(task.first_row + position, heads))
        else:
            reference[row] = NO_ROW
        if leader:
            row_keys[0, position] = keys.first
            row_keys[1, position] = keys.end
        all_keys = seen_by_both(all_keys, keys)
    return all_keys


@cute.jit
def _query_scales(queries: cute.Tensor, task: Task, heads: Divisor, coordinates: cute.Tensor) -> cute.Tensor:
    """The scales of this thread's query rows. Rows that the task does not have get another's: a branch would make the
    loads wait."""
    rows = cute.size(coordinates, mode=[0])
    found = cute.make_rmem_tensor(rows, Float32)
    for row in cutlass.range_constexpr(rows):
        position = cutlass.max(cutlass.min(coordinates[row, 0][0], task.rows - 1), 0)
        found[row] = query_scale(queries, task.request, task.first_row + position, heads)
    return found


@cute.jit
def _scaling(query_scales: cute.Tensor, rope_op: cutlass.Constexpr, scale_log2: Float32) -> Scaling:
    """What a task's rows need of their queries' scales, and what they add up beside `row_sum`."""
    factors, totals = (cute.make_rmem_tensor_like(query_scales) for _ in range(2))
    totals.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(factors)):
        factors[row] = query_scales[row] * scale_log2
    return Scaling(factors, totals, rope_op)


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
    start_values(state, state.own, index, mine)
    end_values(state, state.own, index, mine)


@cute.jit
def _received_tile(state: DecodeState, index: Int32, mine: cutlass.Constexpr) -> Boolean:
    """Add the values of tile `index`, whose probabilities the other warpgroup has made. Returns whether this one's
    references had to follow."""
    received = await_references(state, index)
    follows = cute.arch.vote_any_sync(is_ahead(received, state.rows.reference))
    if follows:
        follow(state, received)
        rescale_outputs(state, state.rows.rescale_received, index)
    receive(state, index)
    start_values(state, state.received, index, mine)
    end_values(state, state.received, index, mine)
    return follows


@cute.jit
def _received_and_own_tile(state: DecodeState, index: Int32, mine: cutlass.Constexpr):
    """A received tile and the own one after it, whose probabilities need only the received one's references."""
    scores = start_scores(state, index + 1)
    end_scores(state, scores, index + 1, True)
    moves = make_probabilities(state, scores, index, True)
    receive(state, index)
    give(state)
    start_values(state, state.received, index, mine)
    end_values(state, state.received, index, mine)
    if moves:
        rescale_outputs(state, state.rows.rescale, index + 1)
    start_values(state, state.own, index + 1, mine)
    end_values(state, state.own, index + 1, mine)
