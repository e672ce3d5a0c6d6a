"""What a key mask says of a tile: whether any row sees a key of it, which the loading warp asks, and which scores
count, which attending warps ask.

Bit b of word w of a query token is key 32 w + b of its sequence; a key without a word is not seen. Words are read where
callers have them, in global memory: both roles together read about 5 KB of them a tile, beside 55 to 82 KB of keys and
values. Four neighbouring lanes read the words of a row. An attending lane has scores in all of these words, so that
lanes exchange what they have read (kernels/log/hopper-prefill.md, 55)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Vector, const_expr
from cutlass.cutlass_dsl import select_

from ...parts import ptx
from ...parts.hopper.fragment import QUAD
from ...parts.seqlen import Span
from ...prefill.work_range import last_column_ahead
from .geometry import MASK_BITS, PrefillGeometry, words_of

READ_AT_ONCE = 8
"""Words that a lane of the loading warp has under way."""


class KeyMask(NamedTuple):
    """A call's mask, [tokens, words], and whether the call is causal, too."""

    words: cute.Tensor
    causal: Int32


class MaskedRows(NamedTuple):
    """What an attending lane needs of the mask: the address of its first row's first word, bytes from there to its next
    row, eight rows further, words that rows have, and those of its rows that the sequence has. For each row, `ends`:
    keys before it are seen without the mask; `words`: what the lane has read of the tile under way."""

    address: Int64
    step: Int64
    extent: Int32
    exists: tuple[Boolean, ...]
    ends: tuple[Int32, ...]
    words: cute.Tensor
    tile_kv: int

    @property
    def count(self) -> int:
        """Words that have a row's keys of a tile."""
        return words_of(self.tile_kv)


def key_mask_of(given, masked: bool) -> KeyMask | None:
    """Collect, on the host, what a call's arguments, by name, say of its mask."""
    return KeyMask(given.key_mask, given.causal) if masked else None


@cute.jit
def seen_and_whole(
    mask: KeyMask, geometry: cutlass.Constexpr[PrefillGeometry], q: Span, query_tile: Int32, tile: Int32
) -> tuple[Boolean, Boolean]:
    """Whether any bit of a tile is set, and whether all are, in the rows that there are; called by one warp."""
    lane = cute.arch.lane_idx()
    first_key = tile * geometry.tile_kv
    place = lane % QUAD
    word = first_key // MASK_BITS + place
    row = query_tile * geometry.tile_q + lane // QUAD
    step = Int64(mask.words.stride[0]) * (32 // QUAD * 4)
    address = _address(mask.words, q.start + row, word)
    has_word = Boolean(word < mask.words.shape[1])
    own = _own_bits(geometry, first_key, place)
    some, every = Int32(0), Int32(-1)
    for _ in cutlass.range(geometry.tile_q * QUAD // 32 // READ_AT_ONCE, unroll=1):
        for _ in cutlass.range_constexpr(READ_AT_ONCE):
            exists = Boolean(row < q.length)
            bits = ptx.load_if(exists & has_word & (own != 0), address, 0, 1)[0]
            some |= bits
            every &= select_(exists, bits, Int32(-1))
            row += 32 // QUAD
            address += step
    return cute.arch.vote_any_sync((some & own) != 0), cute.arch.vote_all_sync((every | ~own) == -1)


@cute.jit
def masked_rows(
    mask: KeyMask, q: Span, len_kv: Int32, first_row: Int32, coordinates: cute.Tensor, tile_kv: cutlass.Constexpr[int]
) -> MaskedRows:
    """What this lane needs of the mask for its rows of a task. first_row: the warpgroup's."""
    rows = tuple(first_row + coordinates[row, 0][0] for row in range(cute.size(coordinates, mode=[0])))
    ahead = last_column_ahead(mask.causal, q.length, len_kv)
    return MaskedRows(
        address=_address(mask.words, q.start + rows[0], cute.arch.lane_idx() % QUAD),
        step=Int64(mask.words.stride[0]) * (8 * 4),
        extent=mask.words.shape[1],
        exists=tuple(Boolean(row < q.length) for row in rows),
        ends=tuple(cutlass.min(len_kv, row + ahead + 1) for row in rows),
        words=cute.make_rmem_tensor(len(rows), Int32),
        tile_kv=tile_kv,
    )


@cute.jit
def read_words(rows: MaskedRows, tile: Int32, wanted: Boolean):
    """Start reading this lane's words of a tile, if they are `wanted`."""
    first = tile * rows.tile_kv // MASK_BITS
    place = cute.arch.lane_idx() % QUAD
    address = rows.address + Int64(first) * 4
    found = wanted & (first + place < rows.extent) & (place < rows.count)
    for row in cutlass.range_constexpr(len(rows.exists)):
        rows.words[row] = ptx.load_if(found & rows.exists[row], address + row * rows.step, 0, 1)[0]


@cute.jit
def hide(scores: cute.Tensor, coordinates: cute.Tensor, rows: MaskedRows, tile: Int32):
    """Set to -inf those of this lane's `scores` (rows, columns) of a tile that do not count, by its words and by its
    rows' ends."""
    hidden = Float32(-Float32.inf)
    lane = cute.arch.lane_idx()
    place = lane % QUAD
    first_key = tile * rows.tile_kv
    first_of_word = (first_key // MASK_BITS + place) * MASK_BITS
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        # Rows that there are not see all keys, as without a mask: they would move other rows' references later.
        own = select_(rows.exists[row], rows.words[row], Int32(-1)) & _below(rows.ends[row] - first_of_word)
        words = [cute.arch.shuffle_sync(own, (lane & -QUAD) + number) for number in range(rows.count)]
        if const_expr(rows.tile_kv % MASK_BITS != 0):  # tiles begin at a word or in the middle of one
            middle = first_key % MASK_BITS != 0
            joined = [
                (Uint32(low) >> 16).to(Int32) | (high << 16)
                for low, high in zip(words, [*words[1:], Int32(0)], strict=True)
            ]
            words = [select_(middle, late, early) for late, early in zip(joined, words, strict=True)]
        words = [(Uint32(word) >> Uint32(2 * place)).to(Int32) for word in words]
        mine = scores[row, None]
        kept = []
        for column, score in enumerate(mine.load().to_elements()):
            word, bit = divmod(coordinates.layout((0, column))[1], MASK_BITS)
            kept.append(select_((words[word] & (1 << bit)) != 0, score, hidden))
        mine.store(cute.TensorSSA(Vector.from_elements(tuple(kept), Float32), mine.shape, Float32))


def _address(words: cute.Tensor, token: Int32, word: Int32) -> Int64:
    return words.iterator.toint() + (Int64(token) * words.stride[0] + word) * 4


def _own_bits(geometry: PrefillGeometry, first_key: Int32, place: Int32) -> Int32:
    """The bits that are a tile's, of its word number `place`."""
    first_bit = first_key % MASK_BITS - place * MASK_BITS  # of the tile, counted in this word
    return _below(first_bit + geometry.tile_kv) & ~_below(first_bit)


def _below(end: Int32) -> Int32:
    """The bits of a word before number `end`, which may lie outside of it."""
    inside = (Int32(1) << cutlass.min(cutlass.max(end, 0), MASK_BITS - 1)) - 1
    return Int32(select_(end >= MASK_BITS, Int32(-1), inside))
