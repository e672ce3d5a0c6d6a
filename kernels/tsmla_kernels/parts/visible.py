"""Which keys of the paged cache a decode row sees: the one predicate of attention and the work line.

Keys are counted as they lie in this rank's cache. With decode context parallelism, key c of rank r out of `cp_world`
has the global position (c // I) I world + r I + c % I, where I is the interleave; without it, positions are keys. The
query tokens of a request are its last q_len positions.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .division import quotient


class Visibility(NamedTuple):
    """What the predicate needs of a call: seq_lens [B] keys in the cache, causal_seqs [B] positions that the last
    query token may see, visible [B, q_len] keys per query token or [0, 0], and the scalars; causal is 0 or 1,
    window_left -1 for none."""

    seq_lens: cute.Tensor
    causal_seqs: cute.Tensor
    visible: cute.Tensor
    q_len: Int32
    causal: Int32
    window_left: Int32
    cp_world: Int32
    cp_rank: Int32
    cp_interleave: Int32


class Keys(NamedTuple):
    """Keys `first .. end - 1` of the cache; none when end <= first."""

    first: Int32
    end: Int32


@cute.jit
def keys_of_row(view: Visibility, request: Int32, token: Int32) -> Keys:
    """What every row of one query token sees."""
    keys = keys_of_tokens(view, request, token, token)
    end = keys.end
    if view.visible.shape[0] > 0:
        end = cutlass.min(end, view.visible[request, token])
    return Keys(keys.first, end)


@cute.jit
def keys_of_tokens(view: Visibility, request: Int32, first_token: Int32, last_token: Int32) -> Keys:
    """The least range that holds what each of these query tokens sees; `visible` can only make it smaller."""
    bound = view.causal_seqs[request]
    last_bound = bound - view.causal * (view.q_len - 1 - last_token)
    end = cutlass.min(_keys_below(view, last_bound), view.seq_lens[request])
    first = Int32(0)
    if view.window_left >= 0:
        first_bound = bound - view.causal * (view.q_len - 1 - first_token)
        first = _keys_below(view, first_bound - 1 - view.window_left)
    return Keys(first, end)


@cute.jit
def _keys_below(view: Visibility, position: Int32) -> Int32:
    """How many of this rank's keys have a global position below `position`."""
    count = cutlass.max(position, 0)
    if view.cp_world > 1:
        period = view.cp_interleave * view.cp_world
        periods = quotient(count, period)
        mine = count - periods * period - view.cp_rank * view.cp_interleave
        count = periods * view.cp_interleave + cutlass.min(cutlass.max(mine, 0), view.cp_interleave)
    return count
