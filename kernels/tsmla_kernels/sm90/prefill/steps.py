"""Steps of an attending warpgroup of the Hopper prefill: scores, softmax and values of one KV tile."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...parts.hopper import lazy_softmax, mma
from ...parts.hopper.fragment import as_operand_a, rows_columns
from ...parts.hopper.mask import mask_scores
from ...parts.hopper.softmax import exponentiate, scale_rows
from ...parts.pipeline import TmaEdge, WarpEdge
from ...parts.precision import Probabilities
from ...prefill.tile_scheduler import QueryTile
from ...prefill.work_range import WorkRange, tile_at
from .key_mask import MaskedRows, hide, read_words
from .policy import PrefillPolicy


class Edges(NamedTuple):
    """The edges of the query's rows, of keys, and of values as they are multiplied."""

    q: TmaEdge
    k: TmaEdge
    v: TmaEdge | WarpEdge


class RowStates(NamedTuple):
    """What a thread keeps of its rows: outputs, references, sums of exponentials, and what outputs are multiplied by
    where references move."""

    output: cute.Tensor
    reference: cute.Tensor
    total: cute.Tensor
    rescale: cute.Tensor


class PrefillState(NamedTuple):
    """What a step needs besides the number of a KV tile: operands, running state, positions. `tile`: the task's query
    tile; `tiles_before`: KV tiles done before this task; `query`: which of the warpgroups' shares of Q, counted over
    all tasks, this one has."""

    operands: mma.Operands
    edges: Edges
    rows: RowStates
    coordinates: cute.Tensor
    probabilities: cute.Tensor
    first_row: Int32
    tile: QueryTile
    work: WorkRange
    tiles_before: Int32
    query: Int32
    scale_log2: Float32
    tile_kv: int
    causal: bool
    policy: PrefillPolicy
    precision: Probabilities
    masked: MaskedRows | None

    @property
    def may_hide_rows(self) -> bool:
        """Whether a tile may hide all of a row that sees others."""
        return self.causal or self.masked is not None


@cute.jit
def start_scores(state: PrefillState, count: Int32) -> cute.Tensor:
    """Start the score product of tile `count`."""
    scores = cute.make_rmem_tensor(state.operands.scores_shape, Float32)
    keys = state.operands.k[None, None, None, state.edges.k.stage(count)]
    state.edges.k.wait_full(count)
    mma.issue(state.operands.qk_op, scores, state.operands.q, keys, False)
    return scores


@cute.jit
def have_scores(state: PrefillState, count: Int32):
    """Release K of tile `count`, whose scores are there, and, where queries are loaded early, Q behind the last
    tile's."""
    q_edge, query, last = state.edges.q, state.query, state.tiles_before + state.work.tiles - 1
    state.edges.k.release(count)
    if const_expr(state.policy.starts_early):
        if count == last:
            q_edge.release(query)


@cute.jit
def start_values(state: PrefillState, count: Int32):
    """Start adding tile `count`'s value product to the output."""
    values = state.operands.v[None, None, None, state.edges.v.stage(count)]
    state.edges.v.wait_full(count)
    mma.issue(state.operands.pv_op, state.rows.output, state.probabilities, values, True)


@cute.jit
def _read_ahead(state: PrefillState, count: Int32, listed: tuple[Int32, Int32] | None):
    """With a key mask, start reading what it says of the tile behind number `count`, if some row may not see all of
    it: that takes longer than the tile's scores."""
    if const_expr(listed is not None and state.policy.reads_ahead):
        read_words(state.masked, listed[1], count + 1 - state.tiles_before < state.work.masked)


@cute.jit
def _hide(state: PrefillState, scores: cute.Tensor, count: Int32, listed: tuple[Int32, Int32] | None):
    """Set to -inf what rows do not see of tile `count`'s scores; with a key mask, the words of it are there."""
    view = rows_columns(scores)
    if const_expr(listed is None):
        first_column = tile_at(state.work, count - state.tiles_before) * state.tile_kv
        mask_scores(
            view, state.coordinates, state.first_row, first_column, state.tile.q.length, state.tile.kv.length,
            state.causal,
        )  # fmt: skip
    else:
        hide(view, state.coordinates, state.masked, listed[0])


@cute.jit
def _softmax(
    state: PrefillState, scores: cute.Tensor, may_hide_row: cutlass.Constexpr, is_first: cutlass.Constexpr
) -> Boolean:
    """Replace the scores of a tile, which may hide all of a row, by exponentials. Returns whether earlier output must
    be rescaled."""
    view = rows_columns(scores)
    moves = Boolean(True)
    if const_expr(state.policy.lazy):
        if const_expr(not is_first):
            beyond = lazy_softmax.exceeds(view, state.rows.reference, state.scale_log2, state.precision)
            moves = cute.arch.vote_any_sync(beyond)
        may_hide_row = may_hide_row and state.precision.values.bits == 16  # those of 8 bits have NO_KEYS
        if moves:
            lazy_softmax.move_reference(
                view, state.rows.reference, state.rows.total, state.rows.rescale, state.scale_log2, may_hide_row
            )
        sums = lazy_softmax.exponentiate(
            view, view, state.rows.reference, state.rows.total, state.scale_log2, state.precision, may_hide_row
        )
        state.rows.total.store(sums.load())
    else:
        exponentiate(
            view, state.rows.reference, state.rows.total, state.rows.rescale, state.scale_log2, is_first, may_hide_row
        )
    return moves


@cute.jit
def _round(state: PrefillState, scores: cute.Tensor):
    dtype = state.probabilities.element_type
    state.probabilities.store(as_operand_a(scores).load().to(dtype))
    if const_expr(state.policy.lazy):
        mma.pin(state.probabilities)


@cute.jit
def first_tile(state: PrefillState, count: Int32, listed: tuple[Int32, Int32] | None = None):
    """Make scores and softmax of the first tile. listed: with a key mask, its number and the next partial tile's."""
    scores = start_scores(state, count)
    if const_expr(listed is not None):
        read_words(state.masked, listed[0], True)
    warpgroup.wait_group(0)
    have_scores(state, count)
    _hide(state, scores, count, listed)
    _read_ahead(state, count, listed)
    _softmax(state, scores, state.may_hide_rows, True)
    _round(state, scores)


@cute.jit
def step(state: PrefillState, count: Int32, hides: cutlass.Constexpr, listed: tuple[Int32, Int32] | None = None):
    """Make scores of tile `count` while the values of the tile before are added; then its softmax. hides: some row may
    not see all of its keys. listed: with a key mask, such a tile's number and the next one's."""
    scores = start_scores(state, count)
    start_values(state, count - 1)
    if const_expr(listed is not None and not state.policy.reads_ahead):
        read_words(state.masked, listed[0], True)
    warpgroup.wait_group(1)
    have_scores(state, count)
    if const_expr(hides):
        _hide(state, scores, count, listed)
    _read_ahead(state, count, listed)
    moves = _softmax(state, scores, hides and state.may_hide_rows, False)
    warpgroup.wait_group(0)
    state.edges.v.release(count - 1)
    if moves:
        scale_rows(rows_columns(state.rows.output), state.rows.rescale)
    _round(state, scores)
