"""Which KV tiles each query tile visits where a key mask decides: a kernel of its own lists them, once for all heads.

Partial tiles are visited first, with the mask, and the others last, without one (`identity/key_mask.py` has a list's
layout). Attention takes as many instructions to look through a tile's words of the mask as a tenth of a tile of 8 bits
(kernels/log/hopper-prefill.md, 56), and its heads see the same."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cutlass_dsl import select_
from tsmla.identity.key_mask import LIST_COUNTS, MASK_BITS, SMALLEST_PREFILL_TILE, first_partial

from ..parts import ptx
from ..parts.warp import QUAD
from .tile_bounds import LIST_WORDS
from .tile_scheduler import Packs, QueryTile, query_tile, tile_bound
from .work_range import WorkRange, tile_at, work_range

WARPS = 32
"""Warps of a CTA that makes a list, each of which looks at one tile at a time."""


class KeyMask(NamedTuple):
    """A call's mask, [tokens, words], whether the call is causal, too, and the lists [tiles, words] that are made of
    it."""

    words: cute.Tensor
    causal: Int32
    lists: cute.Tensor


def key_mask_of(given, masked: bool) -> KeyMask | None:
    """Collect, on the host, what a call's arguments, by name, say of its mask."""
    return KeyMask(given.key_mask, given.causal, given.visits) if masked else None


def list_number(tile: QueryTile, tile_q: int) -> Int32:
    """The number of a query tile's list: different for all tiles, and below `tile_bound`."""
    return tile.q.start // tile_q + tile.sequence + tile.tile


def list_of(mask: KeyMask, tile: QueryTile, tile_q: int) -> tuple[Int32, Int32, Int32, Int32]:
    """LIST_WORDS words: how many tiles a query tile visits, none if there is no such query tile, how many of them are
    partial, and the address of the first partial one's word."""
    row = mask.lists.iterator.toint() + Int64(list_number(tile, tile_q)) * mask.lists.stride[0] * 4
    listed = row + Int64(first_partial(mask.lists.shape[1])) * 4
    tiles, partial = (
        ptx.load_if(tile.valid, listed, offset, 1)[0] for offset in (-4 * LIST_COUNTS, 4 - 4 * LIST_COUNTS)
    )
    return tiles, partial, listed.to(Int32), (listed >> 32).to(Int32)


def address_of(low: Int32, high: Int32) -> Int64:
    """The address of two words."""
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def listed_work(words) -> WorkRange:
    """The KV tiles of a query tile whose list is where LIST_WORDS `words` say."""
    tiles, partial, low, high = (words[index] for index in range(LIST_WORDS))
    return WorkRange(tiles, partial, address_of(low, high))


@cute.jit
def launch_survey(
    mask: KeyMask, packs: Packs, tile_q: cutlass.Constexpr[int], tile_kv: cutlass.Constexpr[int], pdl: Int32, stream
):
    """Launch the kernel that makes the lists, on the host."""
    assert min(tile_q, tile_kv) >= SMALLEST_PREFILL_TILE and words_of(tile_kv) <= QUAD, (tile_q, tile_kv)
    tiles = tile_bound(packs.rows[0], packs.cum_seq_lens_q.shape[0] - 1, tile_q)
    one_head = packs._replace(heads=Int32(1), heads_per_kv_head=Int32(1))
    _survey(mask, one_head, tile_q, tile_kv).launch(
        grid=(tiles, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=pdl
    )


@cute.kernel
def _survey(mask: KeyMask, packs: Packs, tile_q: cutlass.Constexpr[int], tile_kv: cutlass.Constexpr[int]):
    """List the tiles that one query tile visits."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    pointer = cute.arch.alloc_smem(Int32, WARPS)
    found = cute.make_tensor(pointer, cute.make_layout(WARPS))
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    tile = query_tile(cute.arch.block_idx()[0], packs, tile_q, 1)
    if tile.valid:
        work = work_range(tile.tile * tile_q, tile_q, tile_kv, tile.q.length, tile.kv.length, mask.causal)
        words, first_place = mask.lists[list_number(tile, tile_q), None], first_partial(mask.lists.shape[1])
        tiles, partial = Int32(0), Int32(0)
        for first in cutlass.range(0, work.tiles, WARPS, unroll=1):
            index, kind = first + warp, Int32(0)
            if index < work.tiles:
                seen, whole = _seen_and_whole(mask, tile_q, tile_kv, tile, tile_at(work, index))
                if seen:
                    kind = select_(whole & (index >= work.masked), Int32(1), Int32(2))
            with cute.arch.elect_one():
                found[warp] = kind
            cute.arch.sync_threads()
            if warp == 0:
                kind, below_lane = found[lane], (Int32(1) << lane) - 1
                wholes, partials = (cute.arch.vote_ballot_sync(kind == each) for each in (1, 2))
                place = first_place + partial + cute.arch.popc(partials & below_lane)
                if kind == 1:
                    place = first_place - LIST_COUNTS - 1 - (tiles - partial) - cute.arch.popc(wholes & below_lane)
                if kind != 0:
                    words[place] = tile_at(work, first + lane)
                partial += cute.arch.popc(partials)
                tiles += cute.arch.popc(wholes | partials)
            cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                words[first_place - LIST_COUNTS], words[first_place - LIST_COUNTS + 1] = tiles, partial


@cute.jit
def _seen_and_whole(
    mask: KeyMask, tile_q: cutlass.Constexpr[int], tile_kv: cutlass.Constexpr[int], tile: QueryTile, number: Int32
) -> tuple[Boolean, Boolean]:
    """Whether any bit of KV tile `number` is set, and whether all are, in the query tile's rows; called by one warp."""
    lane = cute.arch.lane_idx()
    first_key = number * tile_kv
    place = lane % QUAD
    word = first_key // MASK_BITS + place
    row = tile.tile * tile_q + lane // QUAD
    step = Int64(mask.words.stride[0]) * (32 // QUAD * 4)
    address = word_address(mask.words, tile.q.start + row, word)
    has_word = Boolean(word < mask.words.shape[1])
    own = _own_bits(tile_kv, first_key, place)
    some, every = Int32(0), Int32(-1)
    words = []
    for index in cutlass.range_constexpr(tile_q * QUAD // 32):
        exists = Boolean(row + index * (32 // QUAD) < tile.q.length)
        words.append((exists, ptx.load_if(exists & has_word & (own != 0), address + index * step, 0, 1)[0]))
    for exists, bits in words:
        some |= bits
        every &= select_(exists, bits, Int32(-1))
    return cute.arch.vote_any_sync((some & own) != 0), cute.arch.vote_all_sync((every | ~own) == -1)


def words_of(tile_kv: int) -> int:
    """Words of a key mask that have the keys of a tile, wherever in a word its first key is."""
    return -(-(MASK_BITS - math.gcd(tile_kv, MASK_BITS) + tile_kv) // MASK_BITS)


def word_address(words: cute.Tensor, token: Int32, word: Int32) -> Int64:
    """Where a word of a mask lies."""
    return words.iterator.toint() + (Int64(token) * words.stride[0] + word) * 4


def below(end: Int32) -> Int32:
    """The bits of a word before number `end`, which may lie outside of it."""
    inside = (Int32(1) << cutlass.min(cutlass.max(end, 0), MASK_BITS - 1)) - 1
    return Int32(select_(end >= MASK_BITS, Int32(-1), inside))


def _own_bits(tile_kv: int, first_key: Int32, place: Int32) -> Int32:
    """The bits that are a tile's, of its word number `place`."""
    first_bit = first_key % MASK_BITS - place * MASK_BITS  # of the tile, counted in this word
    return below(first_bit + tile_kv) & ~below(first_bit)
