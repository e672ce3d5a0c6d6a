"""Scales of the Blackwell decode, for cache rows that have one of their own: role `load_scales`, and what softmax does.

A key's scale sigma is the factor of all of its row: the score of a query row with the scale sigma_q is

    x = (q . k as they are stored) sigma_q sigma softmax_scale,

and the value is sigma times the latent part as it is stored, which alone enters the product with P. A probability times
sigma does not fit 8 bits (scales are 1e-5 to 1), so sigma goes into the exponent, where the row's reference M takes it
away again: with the *folded* score y = x log2(e) + log2(sigma),

    p = 2^(y - M + bias),  acc += p * stored latent,  sum += p / sigma,  out = acc / sum,  LSE = M - bias + log2(sum).

What a probability must not exceed, and how much of a row's weight a key has, are questions about p; so the row also has
the sum of all p, which decides when M moves. (The formulas that this replaces, which quantise P anew in every page:
SnapMLA, as read in FlagGems' flash_mla_ckv_fp8_per_token.)
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...parts.alignment import aligned
from ...parts.decode_work import Segment, next_unit, segment_of
from ...parts.division import Divisor, quotient
from ...parts.key_source import BOX_KEYS, LANE_BOXES, Lookup, Wanted, exists, look_further, look_up, wanted_of
from .assignment import Assignment
from .geometry import SCALE_WORDS, DecodeGeometry
from .storage import Shared

LEAST = 2.0**-100
"""Smaller scales, among them 0, count as this one, so that reciprocals are finite."""
AHEAD = 2
"""Tiles whose scales are on their way to registers, besides those in shared memory."""
_SCALE, _LOGARITHM, _RECIPROCAL = range(SCALE_WORDS)
_VECTOR = 4
"""Numbers that a thread takes from shared memory at a time."""
_CHAINS = 4


class Scales(NamedTuple):
    """Of keys [pages, page size], and of query rows [batch, q_len, heads]: float32 with any strides."""

    keys: cute.Tensor
    queries: cute.Tensor


@cute.jit
def load_scales(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, assignment: Assignment):
    """Scales of all keys of each tile, with their logarithms and reciprocals; numbers where there is no key."""
    deal, tile_boxes = geometry.deal, geometry.tile_kv // BOX_KEYS
    tile = Int32(0)
    unit = assignment.unit
    while unit.start < assignment.work.end:
        segment = segment_of(deal, assignment.work, assignment.view, unit)
        if segment.valid and segment.tiles > 0:
            wanted = wanted_of(assignment.source, segment, tile_boxes)
            lookup = look_up(wanted)
            coming = (Float32(1.0),) * (AHEAD * geometry.lane_keys)
            for i in cutlass.range(segment.tiles + AHEAD, unroll=1):
                first = i * tile_boxes
                if i > 0 and first % LANE_BOXES == 0:
                    lookup = look_further(wanted, lookup, first // LANE_BOXES)
                found = _found(geometry, keys, wanted, lookup, first)
                if i >= AHEAD:
                    count = tile + i - AHEAD
                    shared.scales_edge.wait_empty(count)
                    _put(shared, geometry, coming[: geometry.lane_keys], count)
                coming = (*coming[geometry.lane_keys :], *found)
            tile += segment.tiles
        unit = next_unit(deal, assignment.work, assignment.view, unit)


@cute.jit
def _found(
    geometry: cutlass.Constexpr[DecodeGeometry], keys: cute.Tensor, wanted: Wanted, lookup: Lookup, first: Int32
) -> tuple:
    """The scales of this lane's keys of the tile that begins with box `first`: every 32nd key."""
    lane = cute.arch.lane_idx()
    values = cute.make_rmem_tensor(geometry.lane_keys, Float32)
    values.fill(1.0)
    for index in cutlass.range_constexpr(geometry.lane_keys):
        page = lookup.page_of(first + (index * 32 + lane) // BOX_KEYS)
        row = wanted.key_of(first) + index * 32 + lane & (wanted.source.page_size - 1)
        if exists(wanted.source, page):
            values[index] = keys[page, row]
    return tuple(values[index] for index in range(geometry.lane_keys))


@cute.jit
def _put(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], values: tuple, count: Int32):
    """This lane's scales of tile number `count`. Whatever was found where no row sees a key, a reciprocal is finite:
    the key's probability is 0."""
    place = _stage(shared, geometry, count) + cute.arch.lane_idx()
    for index in cutlass.range_constexpr(geometry.lane_keys):
        scale = Float32(LEAST) if values[index] < LEAST else values[index]
        found = place + index * 32
        found[_SCALE * geometry.tile_kv] = scale
        found[_LOGARITHM * geometry.tile_kv] = cute.math.log2(scale, fastmath=True)
        found[_RECIPROCAL * geometry.tile_kv] = cute.arch.fmin(cute.arch.rcp_approx(scale), 1.0 / LEAST)
    cute.arch.sync_warp()
    shared.scales_edge.hand_over(count)


@cute.jit
def row_factor(scales: Scales, segment: Segment, row: Int32, heads: Divisor, scale_log2: Float32) -> Float32:
    """What makes of a row's scores, times the keys' scales, logarithms of base 2. `row` is one of the segment's."""
    batch, q_len, _ = scales.queries.shape
    # Where query tokens of all requests lie one behind the other, `queries` has one request.
    request = cutlass.min(segment.request, batch - 1)
    token = quotient(segment.first_row + row, heads)
    head = segment.first_row + row - token * heads.value
    return scale_log2 * scales.queries[request, token - request * q_len, head]


def folded(
    shared: Shared, geometry: DecodeGeometry, half: Int32, scores: list, factor: Float32, count: Int32
) -> list:
    """The folded scores of this thread's half of the keys of tile number `count`, whose scales are there then."""
    shared.scales_edge.wait_full(count)
    mine = _mine(shared, geometry, half, count)
    values = []
    for first in range(0, len(scores), _VECTOR):
        scale, logarithm = (_vector(mine, word * geometry.tile_kv + first) for word in (_SCALE, _LOGARITHM))
        for index in range(0, _VECTOR, 2):
            x = cute.arch.mul_packed_f32x2(scores[first + index : first + index + 2], scale[index : index + 2])
            values += cute.arch.fma_packed_f32x2(x, (factor, factor), logarithm[index : index + 2])
    return values


def unfolded_sum(
    shared: Shared, geometry: DecodeGeometry, half: Int32, values: list, start: Float32, count: Int32
) -> Float32:
    """start + this thread's probabilities of tile number `count`, each divided by its key's scale. The scales are not
    needed any more."""
    mine = _mine(shared, geometry, half, count)
    chains = [(start, Float32(0.0))] + [(Float32(0.0), Float32(0.0))] * (_CHAINS - 1)
    for first in range(0, len(values), _VECTOR):
        reciprocal = _vector(mine, _RECIPROCAL * geometry.tile_kv + first)
        for index in range(0, _VECTOR, 2):
            pair, chain = values[first + index : first + index + 2], (first + index) // 2 % _CHAINS
            chains[chain] = cute.arch.fma_packed_f32x2(pair, reciprocal[index : index + 2], chains[chain])
    cute.arch.sync_warp()
    shared.scales_edge.release(count)
    low, high = (cute.arch.add_packed_f32x2(chains[i], chains[i + 1]) for i in (0, 2))
    both = cute.arch.add_packed_f32x2(low, high)
    return both[0] + both[1]


def _stage(shared: Shared, geometry: DecodeGeometry, count: Int32) -> cute.Pointer:
    """Vectors of the tile's keys, the first of them _SCALE."""
    return shared.scales + shared.scales_edge.stage(count) * (geometry.scale_bytes // 4)


def _mine(shared: Shared, geometry: DecodeGeometry, half: Int32, count: Int32) -> cute.Pointer:
    """The first vector's number for the first key of a thread's half of the tile."""
    return _stage(shared, geometry, count) + half * geometry.s_columns


def _vector(mine: cute.Pointer, first: int) -> list:
    """_VECTOR numbers from number `first` on, which all lanes of a warp read together."""
    values = cute.make_rmem_tensor(_VECTOR, Float32)
    cute.autovec_copy(cute.make_tensor(aligned(mine + first, 4 * _VECTOR), _VECTOR), values)
    return [values[index] for index in range(_VECTOR)]
