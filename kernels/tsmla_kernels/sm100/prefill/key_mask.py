"""Which keys of a tile a query row sees, by a key mask.

Bit b of word w of a query token is key 32 w + b of its sequence; a key without a word is not seen. A softmax thread has
one row, whose words of a tile are consecutive. It reads them where callers have them, in global memory, and only of
tiles that some row may not see all of."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from tsmla.identity.key_mask import MASK_BITS

from ...parts import ptx
from ...parts.seqlen import Span
from ...prefill.visits import KeyMask, below, word_address
from .plan import TILE

WORDS = TILE // MASK_BITS
"""Words of a row that have the keys of a tile: tiles begin with a word."""


class MaskedRow(NamedTuple):
    """A query row's words of the mask: the address of the first, and how many there are, none behind the last row of
    the sequence."""

    address: Int64
    extent: Int32


@cute.jit
def masked_row(mask: KeyMask, q: Span, position: Int32) -> MaskedRow:
    """The words of the row with this position in its sequence, which has the rows `q`."""
    extent = mask.words.shape[1] if position < q.length else Int32(0)
    return MaskedRow(word_address(mask.words, q.start + position, Int32(0)), extent)


def read_words(row: MaskedRow, tile: Int32) -> tuple[Int32, ...]:
    """Start reading a row's words of a KV tile, 0 where there is none."""
    first = tile * WORDS
    address = row.address + Int64(first) * 4
    return tuple(ptx.load_if(Boolean(first + index < row.extent), address, 4 * index, 1)[0] for index in range(WORDS))


def seen_keys(words: tuple[Int32, ...], end: Int32) -> tuple[Int32, ...]:
    """A tile's words as they have been read, less the bits of columns `end` and beyond."""
    return tuple(word & below(end - index * MASK_BITS) for index, word in enumerate(words))
