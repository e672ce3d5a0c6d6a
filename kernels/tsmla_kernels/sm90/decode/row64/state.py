"""What a thread that scores has of its task, and what it does with a tile's scores whatever becomes of them: start
their product, find which keys are there, hide what rows may not see."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cutlass_dsl import select_

from ....parts.hopper import mma
from ....parts.hopper.fragment import rows_columns
from ....parts.keys.visible import VisibleKeys
from ....parts.ptx import mul_rn
from ....parts.warp import QUAD
from .geometry import DecodeGeometry
from .scaling import Scaling
from .storage import Shared


class RowStates(NamedTuple):
    """What a thread keeps of its rows: their references, their sums of exponentials so far, and what outputs are
    multiplied by where references move."""

    reference: cute.Tensor
    total: cute.Tensor
    rescale: cute.Tensor


class Multiplying(NamedTuple):
    """What a thread has that both scores tiles and multiplies them: probabilities of its own tile and of the other
    warpgroup's, as operands; outputs; sums of exponentials as the next tile leaves them; and what outputs are
    multiplied by where references follow the other warpgroup's."""

    own: cute.Tensor
    received: cute.Tensor
    outputs: tuple
    next_total: cute.Tensor
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
    """What a step needs besides the tile number: operands, running state, positions. rope_op: the operation that
    multiplies rope pieces. multiplying: None where value products are turned, and others multiply."""

    operands: mma.Operands
    rope_op: object
    multiplying: Multiplying | None
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
        op = state.operands.qk_op if const_expr(strip <= last) else state.rope_op
        keys = state.operands.k[strip][None, None, None, edge.stage(count)]
        mma.issue(op, scores, state.operands.q[strip], keys, strip > 0)
    return scores


@cute.jit
def keys_there(state: DecodeState, index: Int32) -> tuple[Int32, ...] | None:
    """Which keys of tile `index` are there, a bit for each, where keys are gathered."""
    if const_expr(not state.geometry.gathers):
        return None
    told = state.shared.exchange.there[None, state.shared.edges.kv[0].stage(state.first_count + index)]
    return tuple(told[word] for word in range(cute.size(told)))


def lacks_keys(state: DecodeState, first_key: Int32, there: tuple | None) -> Boolean:
    """Whether a row may not see some of the keys of the tile that begins with `first_key`, or these are not there."""
    lacks = state.all_keys.lacks(first_key, state.geometry.tile_kv)
    return lacks if there is None else lacks | (functools.reduce(operator.and_, there) != -1)


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


@cute.jit
def rescale_sums(sums: cute.Tensor, rescale: cute.Tensor):
    """Rescale sums of rows by products that are rounded by themselves: fused with the sum that follows in some kernels
    only, they would make last bits differ between rows that are converted and bf16 ones."""
    for row in cutlass.range_constexpr(cute.size(sums)):
        sums[row] = mul_rn(sums[row], rescale[row])
