"""The value product of a tile where it is turned."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from .....parts.alignment import aligned, shared_vector
from .....parts.hopper import mma
from .....parts.hopper.fragment import rows_columns
from .....parts.pipeline import one_of
from .....parts.precision import widened
from .....parts.warp import QUAD
from ..geometry import TILE_KV, TURNED_OUTPUTS, DecodeGeometry
from ..storage import Shared

KEYS_AT_ONCE = 32
"""Keys of 16 dims that one ldmatrix loads."""
KEY_BLOCKS = TILE_KV // KEYS_AT_ONCE
STEPS = TURNED_OUTPUTS * KEY_BLOCKS
"""Steps of a warpgroup's value product of a tile: each multiplies a block of the keys for one output."""
OPERANDS = 3
"""Operands of values in registers: one is loaded while others are multiplied."""


class Turned(NamedTuple):
    """What an attending warpgroup has: the operation that multiplies values, and probabilities as its operand in all
    stages; outputs; operands of values, as they are multiplied and as they are loaded; where this lane reads the first
    stage's values of its warp's first dims; and who it is."""

    pv_op: object
    weights: cute.Tensor
    outputs: tuple
    values: tuple
    loaded: tuple
    source: Int32
    mine: Int32
    warp: Int32
    lane: Int32
    quad_lane: Int32
    first_count: Int32
    shared: Shared
    geometry: DecodeGeometry


@cute.jit
def await_tile(state: Turned, index: Int32) -> Boolean:
    """Wait for the operands of tile `index`'s value product, and load the first values. Returns whether its scorer has
    told to rescale outputs before."""
    await_values(state, index)
    return await_weights(state, index)


@cute.jit
def add_values(state: Turned, index: Int32, tiles: Int32, moved: Boolean) -> Boolean:
    """Add the value product of tile `index` of `tiles` to this warpgroup's outputs, which are rescaled before if they
    have `moved`. The tile has been awaited, as the next one is: returns whether outputs must be rescaled for that."""
    rescale_outputs(state, index, moved)
    for step in cutlass.range_constexpr(STEPS):
        add_step(state, index, step)
    moved = Boolean(False)
    if index + 1 < tiles:
        moved = await_tile(state, index + 1)
    end_values(state, index)
    return moved


@cute.jit
def end_values(state: Turned, index: Int32):
    """Wait for tile `index`'s value product, and release its probabilities."""
    warpgroup.wait_group(0)
    state.shared.edges.exchanged.release(state.first_count + index)


@cute.jit
def await_values(state: Turned, index: Int32):
    """Wait for the values of tile `index`, and load those of the first step."""
    count = state.first_count + index
    one_of(state.shared.edges.kv, state.mine).wait_full(count)
    _load_values(state, _source(state, count), 0)


@cute.jit
def await_weights(state: Turned, index: Int32) -> Boolean:
    """Wait for the probabilities of tile `index`. Returns whether its scorer has told to rescale outputs before."""
    count, exchanged = state.first_count + index, state.shared.edges.exchanged
    exchanged.wait_full(count)
    told = state.shared.exchange.turned.moved[state.quad_lane, exchanged.stage(count)]
    return cute.arch.vote_any_sync(Boolean(told != 0))


@cute.jit
def add_step(state: Turned, index: Int32, step: cutlass.Constexpr[int]):
    """Start step `step` of tile `index`'s value product, which adds to its output; release the tile's values when all
    have been loaded."""
    count, keys = state.first_count + index, one_of(state.shared.edges.kv, state.mine)
    source = _source(state, count)
    values = state.values[step % OPERANDS]
    if const_expr(step >= OPERANDS):
        warpgroup.wait_group(OPERANDS - 1)
    if const_expr(step + 1 < STEPS):
        _load_values(state, source, step + 1)
    widen_values(state, values, state.loaded[step % 2])
    if const_expr(step == STEPS - 1):
        cute.arch.sync_warp()  # all lanes have loaded theirs
        keys.release(count)
    output, block = divmod(step, KEY_BLOCKS)
    weights = state.weights[None, None, None, state.shared.edges.exchanged.stage(count)]
    mma.issue(state.pv_op, state.outputs[output], values, weights, True, block * cute.size(values, mode=[2]))


def _source(state: Turned, count: Int32) -> Int32:
    """Where this lane reads the values of tile number `count`."""
    return state.source + state.shared.edges.kv[0].stage(count) * state.geometry.strip_bytes[0]


@cute.jit
def rescale_outputs(state: Turned, index: Int32, moved: Boolean):
    """Multiply outputs, if `moved`, by what the scorer of tile `index` has told."""
    stage = state.shared.edges.exchanged.stage(state.first_count + index)
    if moved:
        factors = columns_of(state.shared.exchange.turned.rescales[None, stage], state.quad_lane)
        for output in state.outputs:
            scale_columns(rows_columns(output), factors)


@cute.jit
def columns_of(numbers: cute.Tensor, quad_lane: Int32) -> cute.Tensor:
    """Numbers of this thread's columns, of one for each column: of every 8, the two from 2 * `quad_lane` on."""
    count = cute.size(numbers) // QUAD
    found = cute.make_rmem_tensor(count, Float32)
    for block in cutlass.range_constexpr(count // 2):
        place = aligned(numbers.iterator + (8 * block + 2 * quad_lane), 8)
        two = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.make_tensor(place, 2), two)
        for i in cutlass.range_constexpr(2):
            found[2 * block + i] = two[i]
    return found


@cute.jit
def scale_columns(accumulator: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiply each column of a (rows, columns) view by its factor."""
    for row in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        for column in cutlass.range_constexpr(cute.size(factors)):
            accumulator[row, column] = accumulator[row, column] * factors[column]


@cute.jit
def _load_values(state: Turned, source: Int32, step: cutlass.Constexpr[int]):
    """Load the values of step `step` of a tile: of a warp's 16 dims of an output, a block of the keys.

    ldmatrix.trans gives each lane, of two dims (2p, 2p + 1), p being a quarter of the lane's number, two keys:
    bytes (key, key, next key, next key)."""
    dtype = state.shared.keys.strips[0].element_type
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dtype)
    output, block = divmod(step, KEY_BLOCKS)
    place = (source ^ (output << 4)) + block * KEYS_AT_ONCE * state.geometry.d_strip
    cute.copy(load, shared_vector(dtype, place), cute.recast_tensor(state.loaded[step % 2], dtype))


@cute.jit
def widen_values(state: Turned, values: cute.Tensor, loaded: cute.Tensor):
    """Make an operand of values that have been loaded, widened to float16: a permutation puts the two keys of
    each dim together. Row p of the operand is dim 2p, and row p + 8 dim 2p + 1."""
    dtype, words = state.shared.keys.strips[0].element_type, cute.recast_tensor(values, Int32)
    for matrix in cutlass.range_constexpr(4):
        by_dim = Int32(cute.arch.prmt(loaded[matrix], Int32(0), Int32(0x3120)))
        words[2 * matrix], words[2 * matrix + 1] = widened(by_dim, dtype)
    mma.pin(values)
