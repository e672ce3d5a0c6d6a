"""A key mask's words, and the lists of KV tiles that a prefill makes of it.

A list is of one query tile, and a row of int32 words. LIST_COUNTS words in its middle say how many tiles the query tile
visits, and how many of these are partial: some row may not see all of their keys. The partial tiles' numbers follow;
the others' lie before the counts, backwards."""

from __future__ import annotations

from typing import Any

MASK_BITS = 32
"""Keys of a word of a key mask."""
SMALLEST_PREFILL_TILE = 64
"""Fewest rows, and fewest keys, of a tile of any prefill kernel."""
LIST_COUNTS = 2
"""Words of a list that count: all tiles, then those that are partial."""


def words_for(keys: Any) -> Any:
    """Words of a mask that have so many keys (int or Int32)."""
    return (keys + MASK_BITS - 1) // MASK_BITS


def room_for_lists(tokens: int, sequences: int, words: int) -> tuple[int, int]:
    """Lists, and words of each, that serve any kernel, for query tiles of `tokens` rows in all and a mask of `words` a
    row: a sequence has one query tile more than it fills, and all KV tiles may be partial, or none."""
    tiles = words * MASK_BITS // SMALLEST_PREFILL_TILE + 1
    return tokens // SMALLEST_PREFILL_TILE + sequences, 2 * (LIST_COUNTS + tiles)


def first_partial(words: Any) -> Any:
    """The place of the first partial tile's number in a list of so many words (int or Int32)."""
    return words // 2 + LIST_COUNTS
