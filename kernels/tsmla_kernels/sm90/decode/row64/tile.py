"""The steps of a tile in the role `attend` of the Hopper decode: scores, probabilities, what the two warpgroups hand
each other, and the value product. `attend.py` says in which order, and why."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from ....parts.alignment import aligned
from ....parts.hopper import mma
from ....parts.hopper.fragment import as_operand_a, rows_columns
from ....parts.hopper.lazy_softmax import exceeds, exponentiate, follow_reference, is_ahead, move_reference
from ....parts.hopper.softmax import scale_rows
from ....parts.keys.visible import VisibleKeys
from ....parts.ptx import mul_rn
from ....parts.warp import QUAD
from .geometry import OUTPUTS, PARTS_AT_ONCE, DecodeGeometry
from .storage import Shared


class Scaling(NamedTuple):
    """What attending needs besides where rows have scales (`parts/keys/scales`); scores are then exponents as soon as
    their product is done, so that `scale_log2` is 1.

    factors: what a query row's products with stored keys are multiplied by, but for the keys' scales. totals: the sums
    of rows, as `row_sum` adds up shares of the output. rope_op: the operation that multiplies rope pieces."""

    factors: cute.Tensor
    totals: cute.Tensor
    rope_op: object


class RowStates(NamedTuple):
    """What a thread keeps of its rows: their references, their sums of exponentials so far and as the next tile leaves
    them, and what outputs are multiplied by where references move, or follow the other warpgroup's."""

    reference: cute.Tensor
    total: cute.Tensor
    next_total: cute.Tensor
    rescale: cute.Tensor
    rescale_received: cute.Tensor


class Place(NamedTuple):
    """Where a thread is: the rows and columns of its scores, its number in the warpgroup and in its quad, its warp.

    `warp` is known to be the same for all lanes: addresses that depend on `thread` would make loops that wait on them
    divergent, and operands of products in these be moved to uniform registers one by one."""

    coordinates: cute.Tensor
    thread: Int32
    quad_lane: Int32
    warp: Int32


class DecodeState(NamedTuple):
    """What a step needs besides the tile number: operands, running state, positions. parts: accumulators of parts of a
    value product, where these are summed by themselves."""

    operands: mma.Operands
    own: cute.Tensor | None
    received: cute.Tensor | None
    outputs: tuple
    parts: tuple
    rows: RowStates
    place: Place
    row_keys: cute.Tensor
    all_keys: VisibleKeys
    shared: Shared
    first_count: Int32
    first_tile: Int32
    scale_log2: Float32
    scaling: Scaling | None
    geometry: DecodeGeometry


@cute.jit
def start_scores(state: DecodeState, index: Int32) -> cute.Tensor:
    """Start the score product of a tile, each strip as soon as it is there."""
    count = state.first_count + index
    scores = cute.make_rmem_tensor(state.operands.scores_shape, Float32)
    last = len(state.shared.edges.ready) - 1
    for strip in cutlass.range_constexpr(len(state.operands.k)):
        edge = state.shared.edges.ready[min(strip, last)]
        if const_expr(strip <= last):
            edge.wait_full(count)
        op = state.operands.qk_op
        if const_expr(state.scaling is not None and strip > last):
            op = state.scaling.rope_op
        keys = state.operands.k[strip][None, None, None, edge.stage(count)]
        mma.issue(op, scores, state.operands.q[strip], keys, strip > 0)
    return scores


@cute.jit
def end_scores(state: DecodeState, scores: cute.Tensor, index: Int32, follows: cutlass.Constexpr):
    """Wait for tile `index`'s scores; release its keys, if its values are read elsewhere; hide what rows may not see.
    On a segment's first tile (with `follows`, the one after it) also set the references, which `make_probabilities`
    needs."""
    there = None
    if const_expr(state.geometry.gathers):
        there = _there(state, index)
    warpgroup.wait_group(0)
    if const_expr(state.geometry.element_bytes == 1):
        if const_expr(there is not None):
            cute.arch.sync_warp()  # all lanes have read it
        for edge in state.shared.edges.kv:
            edge.release(state.first_count + index)
    if const_expr(state.scaling is not None):
        _scale(state, scores, index)
    first_key = (state.first_tile + index) * state.geometry.tile_kv
    is_border = state.all_keys.lacks(first_key, state.geometry.tile_kv)
    if const_expr(there is not None):
        is_border = is_border | (functools.reduce(operator.and_, there) != -1)
    is_first = Boolean(False)
    if const_expr(_supposes(state)):
        is_first = index == (1 if const_expr(follows) else 0)
    if is_border or is_first:
        if is_border:
            hide(state, scores, first_key, there)
        if is_first:
            if const_expr(follows):
                follow(state, await_references(state, index - 1))
            else:
                _move(state, scores)


@cute.jit
def _scale(state: DecodeState, scores: cute.Tensor, index: Int32):
    """Turn the products of tile `index` into exponents: multiply by the scales of query and key, and add the logarithm
    of the key's."""
    edge, pairs = state.shared.edges.scales, state.shared.exchange.folded[0]
    edge.wait_full(state.first_count + index)
    view, factors = rows_columns(scores), state.scaling.factors
    for pair in cutlass.range_constexpr(cute.size(pairs, mode=[1]) // QUAD):
        scales = cute.make_rmem_tensor(4, Float32)  # of two keys, and their logarithms
        place = pairs[None, state.place.quad_lane + QUAD * pair, edge.stage(state.first_count + index)].iterator
        cute.autovec_copy(cute.make_tensor(aligned(place, 16), 4), scales)
        for i in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(cute.size(view, mode=[0])):
                product = view[row, 2 * pair + i]
                view[row, 2 * pair + i] = cute.math.fma(product, scales[i] * factors[row], scales[2 + i])


@cute.jit
def _there(state: DecodeState, index: Int32) -> tuple[Int32, ...]:
    """Which keys of tile `index` are there, a bit for each, where keys are gathered."""
    told = state.shared.exchange.there[None, state.shared.edges.kv[0].stage(state.first_count + index)]
    return tuple(told[word] for word in range(cute.size(told)))


@cute.jit
def hide(state: DecodeState, scores: cute.Tensor, first_key: Int32, there: tuple | None):
    """Set scores of keys that a row may not see, or that are not there, to -inf; `first_key` is the tile's first."""
    view = rows_columns(scores)
    if const_expr(there is not None):  # from this lane's first column on: bits are told by constants, not by registers
        there = tuple(word >> state.place.coordinates[0, 0][1] for word in there)
    for row in cutlass.range_constexpr(cute.size(view, mode=[0])):
        position = state.place.coordinates[row, 0][0]
        keys = VisibleKeys(state.row_keys[0, position] - first_key, state.row_keys[1, position] - first_key)
        for column in cutlass.range_constexpr(cute.size(view, mode=[1])):
            key = state.place.coordinates[row, column][1]
            seen = keys.holds(key)
            if const_expr(there is not None):
                word, bit = divmod(column // 2 * 2 * QUAD + column % 2, 32)
                seen = seen & (there[word] & 1 << bit != 0)
            view[row, column] = Float32(select_(seen, view[row, column], Float32(-Float32.inf)))


def _supposes(state: DecodeState) -> bool:
    """Whether `make_probabilities` computes exponentials at once, and again in case the references turn out to move.
    Scores and exponentials then take registers side by side, which there are not where a fifth warpgroup converts."""
    return not (state.geometry.element_bytes == 1 or state.geometry.converts)


@cute.jit
def make_probabilities(
    state: DecodeState, scores: cute.Tensor, index: Int32, follows: cutlass.Constexpr, must_move: Boolean | bool = False
) -> Boolean:
    """Make the probabilities of an own tile, and tell its references. The tile is number `index`, or it `follows` that
    tile, which is the other warpgroup's, and goes on from its references. Returns whether references have moved, which
    they do if they `must_move`, so that output must be rescaled once more: where the tile follows, after the product of
    the one before.

    With 16 bits, references rarely move: probabilities are computed as if they did not, without waiting for maxima, and
    computed again if one does. With 8 bits references move more often, and are told before probabilities are computed,
    because the other warpgroup has less to do until then; so they are where rows are converted (`_supposes`)."""
    own_index = index + 1 if const_expr(follows) else index
    if const_expr(_supposes(state)):
        _exponentiate(state, scores, own_index)
    parts = 2 * QUAD  # of a row's sum: each warpgroup has that of its own tiles
    beyond = exceeds(
        rows_columns(scores),
        state.rows.reference,
        state.rows.total,
        parts,
        state.scale_log2,
        state.geometry.probabilities,
    )
    if const_expr(follows):
        beyond = beyond or is_ahead(await_references(state, index), state.rows.reference)
    if const_expr(must_move is not False):
        beyond = beyond or must_move
    moves = cute.arch.vote_any_sync(beyond)
    if moves:
        if const_expr(follows):
            follow(state, await_references(state, index))
            rescale_outputs(state, state.rows.rescale_received, index)
        _move(state, scores)
        if const_expr(not follows):
            rescale_outputs(state, state.rows.rescale, index)
        if const_expr(_supposes(state)):
            _exponentiate(state, scores, own_index)
    references = state.shared.exchange.references
    cute.arch.sync_warp()  # all lanes have read the references that one of them now writes over
    if state.place.coordinates[0, 0][1] == 0:
        for row in cutlass.range_constexpr(cute.size(state.rows.reference)):
            references[state.place.coordinates[row, 0][0]] = state.rows.reference[row]
    state.shared.edges.referenced.hand_over(state.place.warp)
    if const_expr(not _supposes(state)):
        _exponentiate(state, scores, own_index)
    state.rows.total.store(state.rows.next_total.load())
    mma.pin(state.own)
    return moves


@cute.jit
def _move(state: DecodeState, scores: cute.Tensor):
    move_reference(rows_columns(scores), state.rows.reference, None, state.rows.rescale, state.scale_log2)
    rescale_sums(state, state.rows.rescale)


@cute.jit
def rescale_sums(state: DecodeState, rescale: cute.Tensor):
    """Rescale the rows' sums by products that are rounded by themselves: fused with the sum that follows in some
    kernels only, they would make last bits differ between rows that are converted and bf16 ones."""
    sums = [state.rows.total]
    if const_expr(state.scaling is not None):
        sums.append(state.scaling.totals)
    for own in sums:
        for row in cutlass.range_constexpr(cute.size(own)):
            own[row] = mul_rn(own[row], rescale[row])


@cute.jit
def _exponentiate(state: DecodeState, scores: cute.Tensor, index: Int32):
    """Make probabilities of tile `index`, as operand of the value product, and the sums of rows with them."""
    exponentials = cute.make_rmem_tensor_like(scores)
    sums = exponentiate(
        rows_columns(scores), rows_columns(exponentials), state.rows.reference, state.rows.total, state.scale_log2,
        state.geometry.probabilities,
    )  # fmt: skip
    state.rows.next_total.store(sums.load())
    if const_expr(state.scaling is not None):
        _count(state, rows_columns(exponentials), index)
    dtype = state.own.element_type
    state.own.store(as_operand_a(exponentials, dtype.width).load().to(dtype))


@cute.jit
def _count(state: DecodeState, exponentials: cute.Tensor, index: Int32):
    """Add a tile's exponentials (rows, columns), without their keys' scales, to the sums of rows."""
    edge, totals = state.shared.edges.scales, state.scaling.totals
    count = state.first_count + index
    stage = edge.stage(count)
    for pair in cutlass.range_constexpr(cute.size(exponentials, mode=[1]) // 2):
        inverse = cute.make_rmem_tensor(2, Float32)
        folded = state.shared.exchange.folded[2]
        cute.autovec_copy(folded[None, state.place.quad_lane + QUAD * pair, stage], inverse)
        for row in cutlass.range_constexpr(cute.size(totals)):
            for i in cutlass.range_constexpr(2):
                totals[row] = cute.math.fma(exponentials[row, 2 * pair + i], inverse[i], totals[row])
    mma.pin(totals)
    cute.arch.sync_warp()
    edge.release(count)


@cute.jit
def give(state: DecodeState):
    """Hand the own probabilities to the other warpgroup."""
    _vectors(state.own, state.shared.exchange.probabilities, state.place.thread, True)
    state.shared.edges.exchanged.hand_over(state.place.warp)


@cute.jit
def await_references(state: DecodeState, index: Int32) -> cute.Tensor:
    """Wait for the references of a tile that the other warpgroup has scored."""
    state.shared.edges.referenced.wait_full(state.place.warp, state.first_count + index)
    received = cute.make_rmem_tensor_like(state.rows.reference)
    for row in cutlass.range_constexpr(cute.size(received)):
        received[row] = state.shared.exchange.references[state.place.coordinates[row, 0][0]]
    return received


@cute.jit
def follow(state: DecodeState, received: cute.Tensor):
    follow_reference(received, state.rows.reference, state.rows.rescale_received, state.scale_log2)
    rescale_sums(state, state.rows.rescale_received)


@cute.jit
def receive(state: DecodeState, index: Int32):
    """Receive the probabilities of a tile from the other warpgroup."""
    state.shared.edges.exchanged.wait_full(state.place.warp, state.first_count + index)
    _vectors(state.received, state.shared.exchange.probabilities, state.place.thread, False)


@cute.jit
def start_values(state: DecodeState, probabilities: cute.Tensor, index: Int32, mine: cutlass.Constexpr):
    """Start adding a tile's value product to this warpgroup's half of the output; that of tile 0 is the output. Where
    tiles are summed by themselves, start the first parts of the product."""
    if const_expr(state.geometry.transposes):
        state.shared.edges.values[mine].wait_full(state.first_count + index)
        for part in cutlass.range_constexpr(PARTS_AT_ONCE):
            _start_part(state, probabilities, index, mine, part)
    else:
        for output, place in zip(state.outputs, state.geometry.places(mine), strict=True):
            edge, block, values = _value_block(state, index, place)
            if const_expr(state.geometry.widens):
                edge.wait_full(block)
            values = values[None, None, None, edge.stage(block)]
            mma.issue(state.operands.pv_op, output, probabilities, values, index > 0)


@cute.jit
def _start_part(
    state: DecodeState, probabilities: cute.Tensor, index: Int32, mine: cutlass.Constexpr, part: cutlass.Constexpr
):
    """Start part `part` of the value product of a tile, a sum of its own."""
    values = state.operands.v[mine * state.geometry.parts + part]
    values = values[None, None, None, state.shared.edges.values[mine].stage(state.first_count + index)]
    mma.issue(state.operands.pv_op, state.parts[part % PARTS_AT_ONCE], probabilities, values, False)


@cute.jit
def _add_part(state: DecodeState, part: cutlass.Constexpr):
    """Add part `part` of a value product to the output."""
    output, of_output = divmod(part, state.geometry.value_columns // state.geometry.product_columns)
    total, sums = state.outputs[output][None, None, of_output], state.parts[part % PARTS_AT_ONCE]
    for i in cutlass.range_constexpr(cute.size(sums)):
        total[i] = total[i] + sums[i]


@cute.jit
def rescale_outputs(state: DecodeState, rescale: cute.Tensor, index: Int32):
    """Rescale the output before the value product of tile `index`. Before that of tile 0 there is none, and this code
    would be as cold as it is useless."""
    if index > 0:
        for output in state.outputs:
            scale_rows(rows_columns(output), rescale)


@cute.jit
def end_values(state: DecodeState, probabilities: cute.Tensor, index: Int32, mine: cutlass.Constexpr):
    """Wait for the value product, one output after the other, and release the values of each. Where tiles are summed by
    themselves, add it to the output part by part, each while the next is multiplied."""
    if const_expr(state.geometry.transposes):
        last = state.geometry.parts - 1
        for part in cutlass.range_constexpr(last + 1):
            warpgroup.wait_group(min(last - part, PARTS_AT_ONCE - 1))
            if const_expr(part == last):
                state.shared.edges.values[mine].release(state.first_count + index)
            _add_part(state, part)
            if const_expr(part + PARTS_AT_ONCE <= last):
                _start_part(state, probabilities, index, mine, part + PARTS_AT_ONCE)
    else:
        for i in cutlass.range_constexpr(OUTPUTS):
            warpgroup.wait_group(OUTPUTS - 1 - i)
            edge, block, _ = _value_block(state, index, state.geometry.places(mine)[i])
            edge.release(block)


def _value_block(state: DecodeState, index: Int32, place: int) -> tuple:
    """Where block `place` of the values of tile `index` is: its edge, its number there, and the operand in all stages.
    Values that are read where they were loaded have an edge for each block, widened ones one ring of blocks."""
    count, edges = state.first_count + index, state.shared.edges.values
    if state.geometry.widens:
        return edges[0], count * state.geometry.value_blocks + place, state.operands.v[0]
    return edges[place], count, state.operands.v[place]


@cute.jit
def _vectors(fragment: cute.Tensor, exchange: cute.Tensor, thread: Int32, give: cutlass.Constexpr):
    """Give this thread's probabilities to its counterpart, or receive them: 16 bytes at a time, lanes side by side."""
    words = cute.recast_tensor(fragment, Int32)
    vectors = cute.make_tensor(words.iterator, cute.make_layout((4, cute.size(words) // 4)))
    for i in cutlass.range_constexpr(cute.size(vectors, mode=[1])):
        if const_expr(give):
            cute.autovec_copy(vectors[None, i], exchange[None, i, thread])
        else:
            cute.autovec_copy(exchange[None, i, thread], vectors[None, i])
