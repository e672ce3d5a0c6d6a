"""Which KV tiles a CTA visits where a key mask decides: the loading warp tells the others, tile by tile.

A word in a ring for each tile that is visited, in order, and one for the end of each task, so that the word of a tile
is the number of tiles and of tasks before it. Whoever uses tiles reads all of them, so that nobody needs to know how
many tiles there are."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...parts.pipeline import Edge

END = -1
"""The word behind a task's last tile; the only one of a task without tiles."""


class Visits(NamedTuple):
    """The ring: words in shared memory, and the edge that they are told on. A word is END, or a tile's number times 2,
    plus 1 where some row may not see all of its keys."""

    words: cute.Tensor
    edge: Edge


@cute.jit
def tell(visits: Visits, count: Int32, word: Int32):
    """Tell word number `count`; called by the loading warp."""
    visits.edge.wait_empty(count)
    with cute.arch.elect_one():
        visits.words[visits.edge.stage(count)] = word
    cute.arch.sync_warp()
    visits.edge.hand_over(count)


@cute.jit
def told(visits: Visits, count: Int32) -> Int32:
    """Wait for word number `count`, and return it; called by a warp of each role that uses tiles."""
    visits.edge.wait_full(count)
    word = cute.arch.make_warp_uniform(visits.words[visits.edge.stage(count)])
    cute.arch.sync_warp()
    visits.edge.release(count)
    return word


def visit_of(tile: Int32, partial: Boolean) -> Int32:
    """The word of a tile, of which some row may not see all keys where it is `partial`."""
    return tile * 2 + cutlass.select_(partial, Int32(1), Int32(0))


def tile_of(word: Int32) -> Int32:
    """The number of the tile that a word tells of."""
    return word >> 1


def is_partial(word: Int32) -> Boolean:
    """Whether some row may not see all of the tile's keys."""
    return (word & 1) != 0
