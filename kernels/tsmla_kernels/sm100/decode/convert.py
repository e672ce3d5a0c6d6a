"""Role `convert_keys` of the Blackwell decode, where the cache's rows are of 8 bits with scales in them and products read
bf16 (DeepSeek's 656-byte rows): four warps bring rows as they are stored, multiply, and write what MMAs read.

A scale is that of one key and 128 columns, so no product can take it out of its sum: each value is multiplied by it in
float32 and rounded to bf16, as `mla_read_cache` does. Rows go from global memory through registers, not through shared
memory, whose bandwidth is the bound (kernels/log/blackwell-decode.md); what has been loaded `AHEAD` slots before it is
needed is what hides memory's latency.

A warp writes swizzle atoms: 8 keys by 64 columns. A lane has 16 columns of one key, which are 16 bytes in the cache and
two vectors in shared memory; eight lanes that store together have two neighbouring keys, whose swizzles differ in the
vector, so that no two use the same banks.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Vector, const_expr

from ...parts.alignment import aligned
from ...parts.decode_work import next_unit, segment_of
from ...parts.key_source import (
    BOX_KEYS,
    LANE_BOXES,
    Lookup,
    Wanted,
    exists,
    look_further,
    look_up,
    wanted_of,
)
from ...parts.paged import GROUP
from ...parts.visible import Viewers, seen_by_any, viewers_of
from .assignment import Assignment, rank_of
from .geometry import ATOM, CONVERT_WARPS, SWIZZLE, DecodeGeometry
from .storage import Shared

AHEAD = 2
"""Slots that are on their way to registers."""
VECTOR_BYTES = 16
VECTOR_WORDS = VECTOR_BYTES // 4
ROW_LANES = 32 // GROUP
"""Lanes that share a key."""


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """One slot of a tile: which of its edge's, the boxes of the tile that its keys are in, from `first_box` on, and of
    each row `latent_chunks` chunks from `first_chunk` on and, behind them, the rope piece or not. In a pair, CTA number
    r has keys `rank_boxes` x r further and columns `rank_chunks` x r further."""

    edge: str
    index: int
    keys: int
    first_box: int
    first_chunk: int
    latent_chunks: int
    rope: bool
    rank_boxes: int = 0
    rank_chunks: int = 0

    @property
    def chunks(self) -> int:
        return self.latent_chunks + self.rope

    @property
    def warp_groups(self) -> int:
        """Groups of 8 keys that a warp has."""
        return self.keys // GROUP // CONVERT_WARPS

    @property
    def group_vectors(self) -> int:
        """Vectors that a lane loads of one key: latent ones, the scales, and two of the rope piece."""
        return self.latent_chunks + 1 + 2 * self.rope

    @property
    def words(self) -> int:
        return self.warp_groups * self.group_vectors * VECTOR_WORDS


def slot_plans(geometry: DecodeGeometry) -> tuple[SlotPlan, ...]:
    """A tile's slots, in the order in which they are filled."""
    latent = geometry.row.value_columns // geometry.chunk
    slot_boxes = geometry.k_keys // BOX_KEYS
    if not geometry.is_pair:
        return tuple(
            SlotPlan("k", index, geometry.k_keys, index * slot_boxes, 0, latent, True)
            for index in range(geometry.k_slots_per_tile)
        )
    keys = [
        SlotPlan(
            "k", index, geometry.k_keys, 0, first, min(geometry.k_chunks, latent - first),
            first + geometry.k_chunks > latent, rank_boxes=slot_boxes,
        )
        for index, first in enumerate(range(0, geometry.row_chunks, geometry.k_chunks))
    ]  # fmt: skip
    values = [
        SlotPlan(
            "v", index, geometry.v_keys, index * geometry.v_keys // BOX_KEYS, 0, geometry.v_chunks, False,
            rank_chunks=geometry.v_chunks,
        )
        for index in range(geometry.v_slots_per_tile)
    ]  # fmt: skip
    return (*keys, *values)


class Lane(NamedTuple):
    """This warp's number among the converting ones, this CTA's rank, and which key of a group and which vectors of its
    rows this lane has."""

    warp: Int32
    rank: Int32
    key: Int32
    part: Int32


@cute.jit
def convert_keys(
    shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], warp: Int32, assignment: Assignment
):
    """Keys of each segment, and of a pair its values. Those that no row sees become zeros: probabilities of hidden keys
    are 0, but 0 x NaN is NaN."""
    plans = slot_plans(geometry)
    deal, tile_boxes = geometry.deal, geometry.tile_kv // BOX_KEYS
    number = cute.arch.lane_idx()
    lane = Lane(warp, rank_of(geometry), number // ROW_LANES, number % ROW_LANES)
    tile = Int32(0)
    unit = assignment.unit
    while unit.start < assignment.work.end:
        segment = segment_of(deal, assignment.work, assignment.view, unit)
        if segment.valid and segment.tiles > 0:
            wanted = wanted_of(assignment.source, segment, tile_boxes)
            viewers = viewers_of(assignment.view, segment, assignment.work.terms.heads)
            lookup = look_up(wanted)
            coming = ()
            for plan in plans[:AHEAD]:
                coming += _load(geometry, plan, lane, assignment.cache, wanted, viewers, lookup, Int32(0))
            for i in cutlass.range(segment.tiles, unroll=1):
                for position in cutlass.range_constexpr(len(plans)):
                    plan = plans[position]
                    _fill(shared, geometry, plan, lane, coming[: plan.words], tile + i)
                    further, following = divmod(position + AHEAD, len(plans))
                    first = (i + further) * tile_boxes
                    if const_expr(following == 0):
                        if first % LANE_BOXES == 0:
                            lookup = look_further(wanted, lookup, first // LANE_BOXES)
                    coming = coming[plan.words :] + _load(
                        geometry, plans[following], lane, assignment.cache, wanted, viewers, lookup, first
                    )
            tile += segment.tiles
        unit = next_unit(deal, assignment.work, assignment.view, unit)


@cute.jit
def _load(
    geometry: cutlass.Constexpr[DecodeGeometry],
    plan: cutlass.Constexpr[SlotPlan],
    lane: Lane,
    cache: cute.Tensor,
    wanted: Wanted,
    viewers: Viewers,
    lookup: Lookup,
    first: Int32,
) -> tuple:
    """Start loading this lane's part of a slot of the tile that begins with box `first`: words as they are stored, 0
    for keys that are not there."""
    stored = geometry.stored
    groups = plan.warp_groups
    box = first + plan.first_box + lane.rank * plan.rank_boxes + lane.warp * (groups * GROUP) // BOX_KEYS
    page = lookup.page_of(box)
    words = []
    for group in cutlass.range_constexpr(groups):
        within = (lane.warp * groups + group) * GROUP % BOX_KEYS
        key = wanted.key_of(box) + within + lane.key
        vectors = [cute.make_rmem_tensor(VECTOR_WORDS, Int32) for _ in range(plan.group_vectors)]
        for vector in vectors:
            vector.fill(0)
        if exists(wanted.source, page) & seen_by_any(viewers, key):
            place = key & (wanted.source.page_size - 1)
            row = cache.iterator.toint() + Int64(page) * cache.stride[0] + Int64(place) * stored.bytes
            mine = row + lane.rank * (plan.rank_chunks * geometry.chunk) + lane.part * VECTOR_BYTES
            for chunk in cutlass.range_constexpr(plan.latent_chunks):
                _bring(mine + (plan.first_chunk + chunk) * geometry.chunk, vectors[chunk])
            _bring(row + stored.scales_offset, vectors[plan.latent_chunks])
            if const_expr(plan.rope):
                rope = row + stored.offset("rope") + lane.part * VECTOR_BYTES
                for half in cutlass.range_constexpr(2):
                    _bring(rope + _rope_byte(lane, half), vectors[plan.latent_chunks + 1 + half])
        for vector in vectors:
            words += [vector[index] for index in range(VECTOR_WORDS)]
    return tuple(words)


@cute.jit
def _fill(
    shared: Shared,
    geometry: cutlass.Constexpr[DecodeGeometry],
    plan: cutlass.Constexpr[SlotPlan],
    lane: Lane,
    words: tuple,
    tile: Int32,
):
    """Write this warp's keys of a slot of tile number `tile` as MMAs read them, once the slot is free."""
    pair_values = const_expr(plan.edge == "v")
    edge, base = (shared.v_edge, shared.v_words) if pair_values else (shared.k_edge, shared.k_words)
    per_tile = geometry.v_slots_per_tile if pair_values else geometry.k_slots_per_tile
    slot_bytes = geometry.v_bytes if pair_values else geometry.k_wide_bytes
    count = tile * per_tile + plan.index
    turned = lane.key * VECTOR_BYTES
    edge.wait_empty(count)
    line = edge.stage(count) * slot_bytes + lane.key * SWIZZLE
    for group in cutlass.range_constexpr(plan.warp_groups):
        mine = words[group * plan.group_vectors * VECTOR_WORDS :]
        start = line + (lane.warp * plan.warp_groups + group) * (plan.chunks * ATOM)
        low = start + ((lane.part * (2 * VECTOR_BYTES)) ^ turned)
        high = start + ((lane.part * (2 * VECTOR_BYTES) + VECTOR_BYTES) ^ turned)
        scales = mine[plan.latent_chunks * VECTOR_WORDS :][:VECTOR_WORDS]
        for chunk in cutlass.range_constexpr(plan.latent_chunks):
            scale = _scale(geometry, plan, lane, scales, plan.first_chunk + chunk)
            wide = _multiplied(mine[chunk * VECTOR_WORDS :][:VECTOR_WORDS], scale)
            _put(base, low + chunk * ATOM, wide[:VECTOR_WORDS])
            _put(base, high + chunk * ATOM, wide[VECTOR_WORDS:])
        if const_expr(plan.rope):
            behind = mine[(plan.latent_chunks + 1) * VECTOR_WORDS :]
            for half in cutlass.range_constexpr(2):
                byte = (lane.part * VECTOR_BYTES + _rope_byte(lane, half)) ^ turned
                _put(base, start + plan.latent_chunks * ATOM + byte, behind[half * VECTOR_WORDS :][:VECTOR_WORDS])
    cute.arch.fence_view_async_shared()
    edge.hand_over(count)


def _rope_byte(lane: Lane, half: int) -> Int32:
    """A lane has a vector of either half of the rope piece; keys side by side take theirs in the other order, so that
    lanes that store together reach all banks."""
    return ((lane.key + half) & 1) * (SWIZZLE // 2)


@cute.jit
def _scale(
    geometry: cutlass.Constexpr[DecodeGeometry],
    plan: cutlass.Constexpr[SlotPlan],
    lane: Lane,
    scales: tuple,
    chunk: cutlass.Constexpr[int],
) -> Float32:
    """The scale of a chunk's columns, which of a pair's values depends on the CTA's rank."""
    columns = geometry.stored.scales.columns
    found = scales[chunk * geometry.chunk // columns]
    if const_expr(plan.rank_chunks > 0):
        found = cutlass.select_(lane.rank == 0, found, scales[(chunk + plan.rank_chunks) * geometry.chunk // columns])
    return Vector.from_elements((found,), Int32).bitcast(Float32).to_elements()[0]


def _multiplied(words: tuple, scale: Float32) -> list[Int32]:
    """Numbers of e4m3, four in a word, times `scale` in float32 and rounded to bf16, two in a word."""
    numbers = Vector.from_elements(tuple(words), Int32).bitcast(Float8E4M3FN).to(Float32).to_elements()
    products = []
    for index in range(0, len(numbers), 2):
        products += cute.arch.mul_packed_f32x2(numbers[index : index + 2], (scale, scale))
    return list(Vector.from_elements(tuple(products), Float32).to(BFloat16).bitcast(Int32).to_elements())


@cute.jit
def _bring(address: Int64, target: cute.Tensor):
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
    cute.autovec_copy(cute.make_tensor(pointer, VECTOR_WORDS), target)


def _put(base: cute.Pointer, byte: Int32, words: list) -> None:
    mine = cute.make_rmem_tensor(VECTOR_WORDS, Int32)
    for index in range(VECTOR_WORDS):
        mine[index] = words[index]
    cute.autovec_copy(mine, cute.make_tensor(aligned(base + byte // 4, VECTOR_BYTES), VECTOR_WORDS))
