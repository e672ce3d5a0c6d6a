"""The steps of a tile where two warpgroups score in turns: scores, probabilities, what the warpgroups hand each other,
and the value product. `attend.py` says in which order, and why."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .....parts.hopper import mma
from .....parts.hopper.fragment import as_operand_a, rows_columns
from .....parts.hopper.lazy_softmax import exceeds, exponentiate, follow_reference, is_ahead, move_reference
from .....parts.hopper.softmax import scale_rows
from ..geometry import OUTPUTS
from ..state import DecodeState, hide, keys_there, lacks_keys, rescale_sums


@cute.jit
def end_scores(state: DecodeState, scores: cute.Tensor, index: Int32, follows: cutlass.Constexpr):
    """Wait for tile `index`'s scores, and hide what rows may not see. On a segment's first tile (with `follows`, the
    one after it) also set the references, which `make_probabilities` needs."""
    there = keys_there(state, index)
    warpgroup.wait_group(0)
    first_key = (state.first_tile + index) * state.geometry.tile_kv
    is_border = lacks_keys(state, first_key, there)
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


def _supposes(state: DecodeState) -> bool:
    """Whether `make_probabilities` computes exponentials at once, and again in case the references turn out to move.
    Scores and exponentials then take registers side by side, which there are not where a fifth warpgroup converts."""
    return not state.geometry.converts


@cute.jit
def make_probabilities(
    state: DecodeState, scores: cute.Tensor, index: Int32, follows: cutlass.Constexpr, must_move: Boolean | bool = False
) -> Boolean:
    """Make the probabilities of an own tile, and tell its references. The tile is number `index`, or it `follows` that
    tile, which is the other warpgroup's, and goes on from its references. Returns whether references have moved, which
    they do if they `must_move`, so that output must be rescaled once more: where the tile follows, after the product of
    the one before.

    References rarely move: probabilities are computed as if they did not, without waiting for maxima, and computed
    again if one does, but for rows that are converted (`_supposes`): there, references are told first."""
    if const_expr(_supposes(state)):
        _exponentiate(state, scores)
    beyond = exceeds(rows_columns(scores), state.rows.reference, state.scale_log2, state.geometry.probabilities)
    if const_expr(follows):
        beyond = beyond or is_ahead(await_references(state, index), state.rows.reference)
    if const_expr(must_move is not False):
        beyond = beyond or must_move
    moves = cute.arch.vote_any_sync(beyond)
    if moves:
        if const_expr(follows):
            follow(state, await_references(state, index))
            rescale_outputs(state, state.multiplying.rescale_received, index)
        _move(state, scores)
        if const_expr(not follows):
            rescale_outputs(state, state.rows.rescale, index)
        if const_expr(_supposes(state)):
            _exponentiate(state, scores)
    references = state.shared.exchange.references
    cute.arch.sync_warp()  # all lanes have read the references that one of them now writes over
    if state.place.coordinates[0, 0][1] == 0:
        for row in cutlass.range_constexpr(cute.size(state.rows.reference)):
            references[state.place.coordinates[row, 0][0]] = state.rows.reference[row]
    state.shared.edges.referenced.hand_over(state.place.warp)
    if const_expr(not _supposes(state)):
        _exponentiate(state, scores)
    state.rows.total.store(state.multiplying.next_total.load())
    mma.pin(state.multiplying.own)
    return moves


@cute.jit
def _move(state: DecodeState, scores: cute.Tensor):
    move_reference(rows_columns(scores), state.rows.reference, None, state.rows.rescale, state.scale_log2)
    rescale_sums(state.rows.total, state.rows.rescale)


@cute.jit
def _exponentiate(state: DecodeState, scores: cute.Tensor):
    """Make probabilities of `scores`, as operand of the value product, and the sums of rows with them."""
    exponentials = cute.make_rmem_tensor_like(scores)
    sums = exponentiate(
        rows_columns(scores), rows_columns(exponentials), state.rows.reference, state.rows.total, state.scale_log2,
        state.geometry.probabilities,
    )  # fmt: skip
    state.multiplying.next_total.store(sums.load())
    state.multiplying.own.store(as_operand_a(exponentials).load().to(state.multiplying.own.element_type))


@cute.jit
def give(state: DecodeState):
    """Hand the own probabilities to the other warpgroup."""
    _vectors(state.multiplying.own, state.shared.exchange.probabilities, state.place.thread, True)
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
    follow_reference(received, state.rows.reference, state.multiplying.rescale_received, state.scale_log2)
    rescale_sums(state.rows.total, state.multiplying.rescale_received)


@cute.jit
def receive(state: DecodeState, index: Int32):
    """Receive the probabilities of a tile from the other warpgroup."""
    state.shared.edges.exchanged.wait_full(state.place.warp, state.first_count + index)
    _vectors(state.multiplying.received, state.shared.exchange.probabilities, state.place.thread, False)


@cute.jit
def start_values(state: DecodeState, probabilities: cute.Tensor, index: Int32, mine: cutlass.Constexpr):
    """Start adding a tile's value product to this warpgroup's half of the output; that of tile 0 is the output."""
    for output, place in zip(state.multiplying.outputs, state.geometry.places(mine), strict=True):
        stage = state.shared.edges.kv[place].stage(state.first_count + index)
        mma.issue(
            state.operands.pv_op, output, probabilities, state.operands.v[place][None, None, None, stage], index > 0
        )


@cute.jit
def rescale_outputs(state: DecodeState, rescale: cute.Tensor, index: Int32):
    """Rescale the output before the value product of tile `index`. Before that of tile 0 there is none, and this code
    would be as cold as it is useless."""
    if index > 0:
        for output in state.multiplying.outputs:
            scale_rows(rows_columns(output), rescale)


@cute.jit
def end_values(state: DecodeState, index: Int32, mine: cutlass.Constexpr):
    """Wait for the value product, one output after the other, and release the values of each."""
    for i in cutlass.range_constexpr(OUTPUTS):
        warpgroup.wait_group(OUTPUTS - 1 - i)
        state.shared.edges.kv[state.geometry.places(mine)[i]].release(state.first_count + index)


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
