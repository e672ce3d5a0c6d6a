"""Role `convert_keys` of the Blackwell decode, where cache rows hold 8 bits and scales of their parts (DeepSeek's 656
bytes) and products read bf16: eight warps read stored rows, multiply them by their scales, and write what MMAs read.

A scale is that of one key and 128 columns, so no product can take it out of its sum: each value is multiplied by it in
float32 and rounded to bf16, as `mla_read_cache` does. Rows go from global memory through registers, not through shared
memory, whose bandwidth is the bound (kernels/log/blackwell-decode.md); loading `AHEAD` slots before they are needed
hides memory's latency. Where keys are gathered one by one, a lane looks up its own key of each slot, a tile ahead.

A warp writes swizzle atoms: 8 keys by 64 columns. A lane has 16 columns of one key, which are 16 bytes in the cache and
two vectors in shared memory; eight lanes that store together have two neighbouring keys, whose swizzles differ in the
vector, so that no two use the same banks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Vector, const_expr
from tsmla.identity.row_format import SCALE_BYTES

from ....decode.segments import Segment
from ....limits import SWIZZLE_BYTES, VECTOR_BYTES, VECTOR_WORDS
from ....parts.alignment import aligned
from ....parts.blackwell.pair import rank_of
from ....parts.keys.listed import ListedKeys, entry_of, place_of, slot_of
from ....parts.keys.paged import GROUP
from ....parts.keys.source import BOX_KEYS, Lookup, Wanted, exists, follow, look_up, wanted_of
from ....parts.keys.visible import Viewers, VisibleKeys, seen_bits, seen_by_both
from ....parts.ptx import load_if
from ..assignment import Assignment, Done, for_each_segment
from ..geometry import ATOM, CONVERT_WARPS, DecodeGeometry
from ..storage import Shared

AHEAD = 2
"""Slots that are on their way to registers."""
ROW_LANES = 32 // GROUP
"""Lanes that share a key."""
ROPE_VECTORS = 2
"""Vectors of 16 bytes that each of these lanes has of the rope piece."""


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """What the converting warps write to one slot of a tile.

    edge, index: which slot of a tile on which edge. keys: how many, in the tile's boxes from `first_box` on. chunks:
    latent chunks of each row, from `first_chunk` on; behind them, the `rope` piece or not. In a pair, CTA number r has
    keys `rank_boxes` x r boxes further and columns `rank_chunks` x r chunks further. scale_chunks: chunks that share a
    scale. own_box: whether its keys are not those of the slot done.

    A warp has 8 of the keys; where those are too few for all warps, `sharing` warps have them together, each its part
    of the columns."""

    edge: str
    index: int
    keys: int
    first_box: int
    first_chunk: int
    chunks: int
    rope: bool
    scale_chunks: int
    rank_boxes: int = 0
    rank_chunks: int = 0
    own_box: bool = True

    def __post_init__(self) -> None:
        assert GROUP * CONVERT_WARPS % self.keys == 0 and self.keys % GROUP == 0, self
        assert self.sharing == 1 or self.chunks % (self.sharing * self.scale_chunks) == 0, self
        assert ROPE_VECTORS % self.sharing == 0, self

    @property
    def sharing(self) -> int:
        return GROUP * CONVERT_WARPS // self.keys

    @property
    def own_chunks(self) -> int:
        """Latent chunks that a warp has of each row."""
        return self.chunks // self.sharing

    @property
    def rope_vectors(self) -> int:
        """Vectors that a lane has of the rope piece of one key."""
        return ROPE_VECTORS // self.sharing if self.rope else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of 8 keys in shared memory."""
        return (self.chunks + self.rope) * ATOM

    @property
    def first_scale(self) -> int:
        return self.first_chunk // self.scale_chunks

    @property
    def scales(self) -> int:
        """Scales that a lane loads of one key."""
        return (self.first_chunk + self.own_chunks - 1) // self.scale_chunks + 1 - self.first_scale

    @property
    def vectors(self) -> int:
        """Vectors that a lane loads of one key: one of each latent chunk, and those of the rope piece."""
        return self.own_chunks + self.rope_vectors

    @property
    def words(self) -> int:
        """32-bit words that a lane loads of one key: vectors, and scales behind them."""
        return self.vectors * VECTOR_WORDS + self.scales


def slot_plans(geometry: DecodeGeometry) -> tuple[SlotPlan, ...]:
    """A tile's slots, in the order in which they are filled."""
    latent = geometry.row.value_columns // geometry.chunk
    slot_boxes, scale_chunks = geometry.k_keys // BOX_KEYS, geometry.stored.scales.columns // geometry.chunk
    if not geometry.is_pair:
        return tuple(
            SlotPlan("k", index, geometry.k_keys, index * slot_boxes, 0, latent, True, scale_chunks)
            for index in range(geometry.k_slots_per_tile)
        )
    keys = [
        SlotPlan(
            "k", index, geometry.k_keys, 0, first, min(geometry.k_chunks, latent - first),
            first + geometry.k_chunks > latent, scale_chunks, rank_boxes=slot_boxes, own_box=index == 0,
        )
        for index, first in enumerate(range(0, geometry.row_chunks, geometry.k_chunks))
    ]  # fmt: skip
    values = [
        SlotPlan(
            "v", index, geometry.v_keys, index * geometry.v_keys // BOX_KEYS, 0, geometry.v_chunks, False,
            scale_chunks, rank_chunks=geometry.v_chunks,
        )
        for index in range(geometry.v_slots_per_tile)
    ]  # fmt: skip
    return (*keys, *values)


class Lane(NamedTuple):
    """What this lane has: its warp's number among the converting ones, its CTA's rank, and which key of its warp's,
    and which vector of each 64 bytes of that key's row."""

    warp: Int32
    rank: Int32
    key: Int32
    vector: Int32


class Found(NamedTuple):
    """Keys of a box: the address of this lane's vector of the first that it has one of; and a bit for each key from
    that one on, 1 if it is there and some row sees it."""

    row: Int64
    keys: Int32


class Sought(NamedTuple):
    """The keys of a segment that are converted: the boxes wanted, or the list that names keys and the segment's first
    key; and who sees them."""

    wanted: Wanted | None
    listed: ListedKeys | None
    viewers: Viewers
    first_key: Int32 | None


def convert_keys(shared: Shared, geometry: cutlass.Constexpr[DecodeGeometry], warp: Int32, assignment: Assignment):
    """Convert the keys of each segment and, in a pair, also its values. Keys that no row sees become zeros:
    probabilities of hidden keys are 0, but 0 x NaN is NaN."""
    plans = slot_plans(geometry)
    number = cute.arch.lane_idx()
    lane = Lane(warp, rank_of(geometry.is_pair), number // ROW_LANES, number % ROW_LANES)

    @cute.jit
    def convert_keys_of(segment: Segment, done: Done) -> Done:
        sought, lookup = _look_up(geometry, plans, lane, assignment, segment)
        coming, found = (), Found(Int64(0), Int32(0))
        for plan in plans[:AHEAD]:
            if const_expr(plan.own_box):
                found, lookup = _find(geometry, plans, plan, lane, assignment.cache, sought, lookup, Int32(0))
            coming += _load(geometry, plan, lane, found)
        for i in cutlass.range(segment.tiles, unroll=1):
            for position in cutlass.range_constexpr(len(plans)):
                _fill(shared, geometry, plans[position], lane, coming[: plans[position].words], done.tiles + i)
                coming = coming[plans[position].words :]
                further, following = divmod(position + AHEAD, len(plans))
                plan, tile = plans[following], i + further
                if const_expr(following == 0 and not geometry.gathers):
                    lookup = follow(sought.wanted, lookup, tile * sought.wanted.tile_boxes)
                if const_expr(plan.own_box):
                    found, lookup = _find(geometry, plans, plan, lane, assignment.cache, sought, lookup, tile)
                coming += _load(geometry, plan, lane, found)
        return done.and_all_of(segment)

    for_each_segment(geometry, assignment, convert_keys_of, Done.nothing())


def _look_up(
    geometry: DecodeGeometry, plans: tuple[SlotPlan, ...], lane: Lane, assignment: Assignment, segment: Segment
) -> tuple[Sought, Lookup | tuple[Int32, ...]]:
    """A segment's keys, and what is known at first of where they lie: pages of boxes; or, where a table lists keys, its
    entries for this lane's keys of the first tile, one for each slot that brings keys of its own."""
    source, viewers = assignment.source, assignment.viewers(segment)
    if not geometry.gathers:
        wanted = wanted_of(source, segment, geometry.tile_kv // BOX_KEYS)
        return Sought(wanted, None, viewers, None), look_up(wanted)
    first_key = segment.first_tile * geometry.tile_kv
    own = VisibleKeys(first_key, first_key + segment.tiles * geometry.tile_kv)
    viewers = viewers._replace(keys=seen_by_both(viewers.keys, own))
    keys = [_listed_key(plan, lane, first_key) for plan in plans if plan.own_box]
    return Sought(None, source, viewers, first_key), tuple(entry_of(source, viewers, key) for key in keys)


def _find(
    geometry: DecodeGeometry, plans: tuple[SlotPlan, ...], plan: SlotPlan, lane: Lane, cache: cute.Tensor,
    sought: Sought, lookup: Lookup | tuple[Int32, ...], tile: Int32,
) -> tuple[Found, Lookup | tuple[Int32, ...]]:  # fmt: skip
    """This lane's keys of a slot of tile number `tile` of the segment, and what is known then: of listed keys, the
    entry of the tile behind in place of this one's."""
    if not geometry.gathers:
        first = tile * sought.wanted.tile_boxes
        return _find_in_box(geometry, plan, lane, cache, sought.wanted, sought.viewers, lookup, first), lookup
    number = [each for each in plans if each.own_box].index(plan)
    key = _listed_key(plan, lane, sought.first_key + tile * geometry.tile_kv)
    ahead = entry_of(sought.listed, sought.viewers, key + geometry.tile_kv)
    rows, slot = sought.listed.rows, slot_of(sought.listed, lookup[number], key)
    vectors = cutlass.max(place_of(sought.listed, rows, slot), 0)
    place = rows.start + Int64(vectors) * VECTOR_BYTES + lane.vector * VECTOR_BYTES
    return Found(place, Int32(slot >= 0)), (*lookup[:number], ahead, *lookup[number + 1 :])


def _listed_key(plan: SlotPlan, lane: Lane, tile_key: Int32) -> Int32:
    """This lane's key of a slot of the tile whose first key is `tile_key`."""
    box = plan.first_box + lane.rank * plan.rank_boxes
    return tile_key + box * BOX_KEYS + lane.warp // plan.sharing * GROUP + lane.key


@cute.jit
def _find_in_box(
    geometry: cutlass.Constexpr[DecodeGeometry],
    plan: cutlass.Constexpr[SlotPlan],
    lane: Lane,
    cache: cute.Tensor,
    wanted: Wanted,
    viewers: Viewers,
    lookup: Lookup,
    first: Int32,
) -> Found:
    """This warp's keys of a slot of the tile that begins with box `first`; they are in one box."""
    first_key = lane.warp // plan.sharing * GROUP
    box, within = first + plan.first_box + lane.rank * plan.rank_boxes + first_key // BOX_KEYS, first_key % BOX_KEYS
    page, key = lookup.page_of(box), wanted.key_of(box)
    keys = seen_bits(viewers, key, BOX_KEYS) >> within
    if not exists(wanted.source, page):
        keys = Int32(0)
    place = (key & (wanted.source.page_size - 1)) + within + lane.key
    row = cache.iterator.toint() + Int64(page) * cache.stride[0] + Int64(place) * geometry.stored.bytes
    return Found(row + lane.vector * VECTOR_BYTES, keys >> lane.key)


@cute.jit
def _load(
    geometry: cutlass.Constexpr[DecodeGeometry], plan: cutlass.Constexpr[SlotPlan], lane: Lane, found: Found
) -> tuple:
    """Start loading this lane's part of a slot: words as they are stored, 0 for keys that are not there."""
    stored, row = geometry.stored, found.row
    there, share = found.keys & 1 != 0, lane.warp % plan.sharing
    latent = row + share * (plan.own_chunks * geometry.chunk)
    scales = row - lane.vector * VECTOR_BYTES + share * (plan.own_chunks // plan.scale_chunks * SCALE_BYTES)
    if const_expr(plan.rank_chunks > 0):
        latent += lane.rank * (plan.rank_chunks * geometry.chunk)
        scales += lane.rank * (plan.rank_chunks // plan.scale_chunks * SCALE_BYTES)
    words = []
    for chunk in cutlass.range_constexpr(plan.own_chunks):
        words += load_if(there, latent, (plan.first_chunk + chunk) * geometry.chunk, VECTOR_WORDS)
    for vector in cutlass.range_constexpr(plan.rope_vectors):
        words += load_if(there, row + _rope_byte(lane, share + vector), stored.offset("rope"), VECTOR_WORDS)
    first, size = plan.first_scale * SCALE_BYTES, plan.scales * SCALE_BYTES
    step = math.gcd(VECTOR_BYTES, first, size)
    for at in cutlass.range_constexpr(first, first + size, step):
        words += load_if(there, scales, stored.scales_offset + at, step // SCALE_BYTES)
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
    """Write this warp's part of a slot of tile number `tile` as MMAs read it, once the slot is free."""
    pair_values = const_expr(plan.edge == "v")
    edge, base = (shared.edges.v, shared.words.v) if pair_values else (shared.edges.k, shared.words.k)
    per_tile = geometry.v_slots_per_tile if pair_values else geometry.k_slots_per_tile
    slot_bytes = geometry.v_bytes if pair_values else geometry.k_wide_bytes
    count, share = tile * per_tile + plan.index, lane.warp % plan.sharing
    turned = lane.key * VECTOR_BYTES
    edge.wait_empty(count)
    start = edge.stage(count) * slot_bytes + lane.key * SWIZZLE_BYTES + lane.warp // plan.sharing * plan.group_bytes
    low = start + share * (plan.own_chunks * ATOM) + ((lane.vector * (2 * VECTOR_BYTES)) ^ turned)
    high = low ^ VECTOR_BYTES
    vectors = [words[index : index + VECTOR_WORDS] for index in range(0, plan.vectors * VECTOR_WORDS, VECTOR_WORDS)]
    for chunk in cutlass.range_constexpr(plan.own_chunks):
        scale = (plan.first_chunk + chunk) // plan.scale_chunks - plan.first_scale
        wide = _multiplied(vectors[chunk], words[plan.vectors * VECTOR_WORDS + scale])
        _put(base, low + chunk * ATOM, wide[:VECTOR_WORDS])
        _put(base, high + chunk * ATOM, wide[VECTOR_WORDS:])
    for vector in cutlass.range_constexpr(plan.rope_vectors):
        byte = (lane.vector * VECTOR_BYTES + _rope_byte(lane, share + vector)) ^ turned
        _put(base, start + plan.chunks * ATOM + byte, vectors[plan.own_chunks + vector])
    cute.arch.fence_view_async_shared()
    edge.hand_over(count)


def _rope_byte(lane: Lane, vector: Int32) -> Int32:
    """Offset of a lane's vector in the rope piece. Lanes that share a key have a vector of either half; keys side by
    side take theirs in the other order, so that lanes that store together reach all banks."""
    return ((lane.key + vector) & 1) * (SWIZZLE_BYTES // 2)


def _multiplied(words: list, scale: Int32) -> list[Int32]:
    """Multiply e4m3 numbers, four in a word, by a float32 and round them to bf16, two in a word."""
    numbers = Vector.from_elements(tuple(words), Int32).bitcast(Float8E4M3FN).to(Float32).to_elements()
    (factor,) = Vector.from_elements((scale,), Int32).bitcast(Float32).to_elements()
    products: list[Float32] = []
    for index in range(0, len(numbers), 2):
        products += cute.arch.mul_packed_f32x2(numbers[index : index + 2], (factor, factor))
    return list(Vector.from_elements(tuple(products), Float32).to(BFloat16).bitcast(Int32).to_elements())


def _put(base: cute.Pointer, byte: Int32, words: list) -> None:
    mine = cute.make_rmem_tensor(VECTOR_WORDS, Int32)
    for index in range(VECTOR_WORDS):
        mine[index] = words[index]
    cute.autovec_copy(mine, cute.make_tensor(aligned(base + byte // 4, VECTOR_BYTES), VECTOR_WORDS))
