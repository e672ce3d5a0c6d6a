"""Which scores of a tile count, by a key mask.

Bit b of word w of a query token is key 32 w + b of its sequence; a key without a word is not seen. Words are read where
callers have them, in global memory, and only of tiles that some row may not see all of. Four neighbouring lanes read
the words of a row. An attending lane has scores in all of these words, so that lanes exchange what they have read
(kernels/log/hopper-prefill.md, 56)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Vector, const_expr
from cutlass.cutlass_dsl import select_
from tsmla.identity.key_mask import MASK_BITS

from ...parts import ptx
from ...parts.seqlen import Span
from ...parts.warp import QUAD
from ...prefill.visits import KeyMask, below, word_address, words_of
from ...prefill.work_range import last_column_ahead


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


@cute.jit
def masked_rows(
    mask: KeyMask, q: Span, len_kv: Int32, first_row: Int32, coordinates: cute.Tensor, tile_kv: cutlass.Constexpr[int]
) -> MaskedRows:
    """What this lane needs of the mask for its rows of a task. first_row: the warpgroup's."""
    rows = tuple(first_row + coordinates[row, 0][0] for row in range(cute.size(coordinates, mode=[0])))
    ahead = last_column_ahead(mask.causal, q.length, len_kv)
    return MaskedRows(
        address=word_address(mask.words, q.start + rows[0], cute.arch.lane_idx() % QUAD),
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
        # Rows behind the sequence's end see all keys, as without a mask. Hidden, their references would move in a later
        # whole tile, and rescale the whole warp's rows.
        own = select_(rows.exists[row], rows.words[row], Int32(-1)) & below(rows.ends[row] - first_of_word)
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
