"""What a decode call asks of one pair of CTAs, as every role is told."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from ..parts.decode_work import Segment, Work
from ..parts.visible import Keys, Visibility, keys_of_tokens


class Task(NamedTuple):
    """cache [pages, page size, dims], block_tables [batch, max pages], which keys rows see, and this pair's work."""

    cache: cute.Tensor
    block_tables: cute.Tensor
    view: Visibility
    work: Work


@cute.jit
def keys_of_segment(task: Task, segment: Segment) -> Keys:
    """The keys that some row of the segment's row tile may see; all others must count as if they were not there."""
    first_token = segment.first_row // task.work.heads
    last_token = (segment.first_row + segment.rows - 1) // task.work.heads
    return keys_of_tokens(task.view, segment.request, first_token, last_token)
