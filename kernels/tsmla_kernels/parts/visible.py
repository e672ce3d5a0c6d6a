"""Which keys of the paged cache a decode row sees: the one predicate of attention and the work line.

Keys are counted as they lie in this rank's cache. With decode context parallelism, key c of rank r out of `cp_world`
has the global position (c // I) I world + r I + c % I, where I is the interleave; without it, positions are keys. The
query tokens of a request are its last q_len positions.

Lengths come from a caller's device memory, so they are not trusted: negative ones count as 0, and no key is seen that
the page table has no entry for.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .division import quotient

LARGEST = (1 << 31) - 256
"""The most keys of a request, so that the end of its last tile fits 32 bits."""


class Visibility(NamedTuple):
    """What the predicate needs of a call: seq_lens [B] keys in the cache, causal_seqs [B] positions that the last
    query token may see, visible [B, q_len] keys per query token or [0, 0], and the scalars; causal is 0 or 1,
    window_left -1 for none, capacity the keys that page tables have entries for."""

    seq_lens: cute.Tensor
    causal_seqs: cute.Tensor
    visible: cute.Tensor
    q_len: Int32
    causal: Int32
    window_left: Int32
    cp_world: Int32
    cp_rank: Int32
    cp_interleave: Int32
    capacity: Int32


class Keys(NamedTuple):
    """Keys `first .. end - 1` of the cache; none when end <= first."""

    first: Int32
    end: Int32


@cute.jit
def visibility(
    seq_lens: cute.Tensor, causal_seqs: cute.Tensor, visible: cute.Tensor, q_len: Int32, scalars,
    block_tables: cute.Tensor, page_size: Int32,
) -> Visibility:  # fmt: skip
    """On the host, of a call's arguments; `scalars` are causal, window_left, cp_world, cp_rank and cp_interleave."""
    capacity = cutlass.min(Int64(block_tables.shape[1]) * page_size, LARGEST)
    return Visibility(seq_lens, causal_seqs, visible, q_len, *scalars, Int32(capacity))


@cute.jit
def keys_of_row(view: Visibility, request: Int32, token: Int32) -> Keys:
    """What every row of one query token sees."""
    keys = keys_of_tokens(view, request, token, token)
    end = keys.end
    if hides(view):
        end = cutlass.min(end, cutlass.max(view.visible[request, token], 0))
    return Keys(keys.first, end)


@cute.jit
def keys_of_tokens(view: Visibility, request: Int32, first_token: Int32, last_token: Int32) -> Keys:
    """The least range that holds what each of these query tokens sees; `visible` can only make it smaller."""
    bound = view.causal_seqs[request]
    below = _keys_below(view, bound, view.causal * (view.q_len - 1 - last_token))
    end = cutlass.min(cutlass.min(below, view.seq_lens[request]), view.capacity)
    first = Int32(0)
    if view.window_left >= 0:
        later = view.causal * (view.q_len - 1 - first_token) + 1
        first = _keys_below(view, cutlass.max(bound, later) - later, view.window_left)
    return Keys(first, end)


@cute.jit
def hides(view: Visibility) -> Boolean:
    """Whether what rows see together need not be a range: then `seen_by_any` must be asked."""
    return view.visible.shape[0] > 0


@cute.jit
def seen_by_any(
    view: Visibility, request: Int32, first_row: Int32, rows: Int32, heads: Int32, key: Int32
) -> Boolean:
    """Whether one of these rows of a request sees a key. Lanes may ask on their own."""
    seen = Boolean(False)
    last_token = quotient(first_row + rows - 1, heads)
    for token in cutlass.range(quotient(first_row, heads), last_token + 1, unroll=1):
        keys = keys_of_row(view, request, token)
        seen = seen or (key >= keys.first and key < keys.end)
    return seen


@cute.jit
def _keys_below(view: Visibility, bound: Int32, less: Int32) -> Int32:
    """How many of this rank's keys have a global position below `bound` - `less`; `less` is not negative."""
    count = cutlass.max(bound, less) - less
    if view.cp_world > 1:
        period = view.cp_interleave * view.cp_world
        periods = quotient(count, period)
        mine = count - periods * period - view.cp_rank * view.cp_interleave
        count = periods * view.cp_interleave + cutlass.min(cutlass.max(mine, 0), view.cp_interleave)
    return count
