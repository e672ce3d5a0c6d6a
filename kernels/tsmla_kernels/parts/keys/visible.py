"""Which keys of the paged cache a decode row sees: the one predicate of attention and the work line.

Keys are counted as they lie in this rank's cache. With decode context parallelism, key c of rank r out of `cp_world`
has the global position (c // I) I world + r I + c % I, where I is the interleave; without it, positions are keys. The
query tokens of a request are its last positions, as many as it has. They are counted in the pack of all requests'.

Lengths come from a caller's device memory, so they are not trusted: negative ones count as 0, and no key is seen that
the page table has no entry for."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..division import Divisor, divisor_of, quotient
from ..seqlen import Span, span_behind, two_spans_behind

MOST = (1 << 31) - 1
"""The largest number of 31 bits."""
LARGEST = MOST - 255
"""The most keys of a request, so that the end of its last tile fits 32 bits."""


class Visibility(NamedTuple):
    """What the predicate needs of a call: seq_lens [B] keys in the cache, causal_seqs [B] positions that the last query
    token may see; causal is 0 or 1, window_left -1 for none. This rank has `interleave` of every `period` positions
    (interleave x world), from position `before` on. capacity: the keys that page tables have entries for.

    There are `tokens` query tokens in all. Every request has q_len of them; or they `vary` (1, otherwise 0),
    cum_seq_lens_q [B + 1] says which a request has, and q_len is the most that one may have. visible [B, q_len] or [B,
    tokens]: keys that each query token sees at most, [0, 0] where nothing is hidden; its second dimension begins for
    request b with token b x visible_tokens."""

    seq_lens: cute.Tensor
    causal_seqs: cute.Tensor
    visible: cute.Tensor
    visible_tokens: Int32
    cum_seq_lens_q: cute.Tensor
    vary: Int32
    tokens: Int32
    q_len: Int32
    causal: Int32
    window_left: Int32
    period: Divisor
    before: Int32
    interleave: Int32
    capacity: Int32


class VisibleKeys(NamedTuple):
    """The keys of the cache that a row, or rows together, see: `first .. end - 1`, none when end <= first. Every role
    asks this type. Lists of chosen keys have it too: there it counts a list's entries."""

    first: Int32
    end: Int32

    @classmethod
    def everything(cls) -> VisibleKeys:
        return cls(Int32(0), Int32(MOST))

    def holds(self, key: Int32) -> Boolean:
        """Whether a key is among them."""
        return (key >= self.first) & (key < self.end)

    def meets(self, key: Int32, keys: int) -> Boolean:
        """Whether some of the `keys` keys from `key` on are among them; of use only where these are any."""
        return (key + keys > self.first) & (key < self.end)

    def lacks(self, key: Int32, keys: int) -> Boolean:
        """Whether some of `keys` keys from `key` on are not among them."""
        return (key < self.first) | (key + keys > self.end)


@cute.jit
def visibility(given, tokens: Int32, capacity: Int64) -> Visibility:
    """Collect, on the host, what the predicate needs of a call's arguments, by name, with `tokens` query tokens in
    all."""
    period, before = (_at_most(Int64(given.cp_interleave) * blocks, MOST) for blocks in (given.cp_world, given.cp_rank))
    visible_tokens, vary = given.q_len, Int32(0)
    if given.cum_seq_lens_q.shape[0] > 0:
        visible_tokens, vary = Int32(0), Int32(1)
    return Visibility(
        given.seq_lens, given.causal_seqs, given.visible, visible_tokens, given.cum_seq_lens_q, vary, tokens,
        given.q_len, given.causal, given.window_left, divisor_of(period), before, given.cp_interleave,
        _at_most(capacity, LARGEST),
    )  # fmt: skip


@cute.jit
def _at_most(value: Int64, most: cutlass.Constexpr[int]) -> Int32:
    return Int32(cutlass.min(value, Int64(most)))


def varies(view: Visibility) -> Boolean:
    """Whether requests differ in query tokens."""
    return view.vary != 0


@cute.jit
def tokens_of_two(view: Visibility, request: Int32, before: Int32) -> tuple[Span, Span, Int32]:
    """The query tokens of a request and of the next, two in each lane for 64 neighbouring requests, where tokens before
    these end at `before`; and where those of all 64 end. All lanes of a warp must ask together."""
    one, other, end = Span(request * view.q_len, view.q_len), Span((request + 1) * view.q_len, view.q_len), before
    if varies(view):
        one, other, end = two_spans_behind(view.cum_seq_lens_q, request, view.tokens, before)
        one = Span(one.start, cutlass.min(one.length, view.q_len))
        other = Span(other.start, cutlass.min(other.length, view.q_len))
    return one, other, end


@cute.jit
def tokens_behind(view: Visibility, request: Int32, before: Int32) -> Span:
    """The query tokens of a request, where those of the one before it start at `before`."""
    span = Span(request * view.q_len, view.q_len)
    if varies(view):
        span = span_behind(view.cum_seq_lens_q, request, view.tokens, before)
        span = Span(span.start, cutlass.min(span.length, view.q_len))
    return span


@cute.jit
def keys_of_row(view: Visibility, request: Int32, end_token: Int32, token: Int32) -> VisibleKeys:
    """What every row of one query token sees, where the request's query tokens end at `end_token`."""
    later = end_token - 1 - token
    keys = keys_of_tokens(view, request, later, later)
    end = keys.end
    if hides(view):
        end = cutlass.min(end, cutlass.max(view.visible[request, token - request * view.visible_tokens], 0))
    return VisibleKeys(keys.first, end)


@cute.jit
def keys_of_tokens(view: Visibility, request: Int32, first_later: Int32, last_later: Int32) -> VisibleKeys:
    """The least range that holds what each of some query tokens sees; `visible` can only make it smaller. The request
    has `first_later` more tokens behind the first of them, and `last_later` behind the last."""
    bound = view.causal_seqs[request]
    below = _keys_below(view, bound, view.causal * last_later)
    end = cutlass.min(cutlass.min(below, view.seq_lens[request]), view.capacity)
    first = Int32(0)
    if view.window_left >= 0:
        later = view.causal * first_later + 1
        first = _keys_below(view, cutlass.max(bound, later) - later, view.window_left)
    return VisibleKeys(first, end)


@cute.jit
def hides(view: Visibility) -> Boolean:
    """Whether the call has `visible`: the keys that some row sees may then have gaps, and each must be asked for."""
    return view.visible.shape[0] > 0


class Viewers(NamedTuple):
    """Rows of a request that see keys together: `keys` is the least range that holds all that one of them sees."""

    view: Visibility
    keys: VisibleKeys
    request: Int32
    first_row: Int32
    rows: Int32
    end_token: Int32
    heads: Divisor


def viewers_of(view: Visibility, segment, heads: Divisor) -> Viewers:
    """The rows of a segment, or of a task, as viewers."""
    return Viewers(view, segment.keys, segment.request, segment.first_row, segment.rows, segment.end_token, heads)


@cute.jit
def seen_by_any(viewers: Viewers, key: Int32) -> Boolean:
    """Whether one of the rows sees a key. Lanes may ask on their own."""
    seen = viewers.keys.holds(key)
    if hides(viewers.view):
        seen = Boolean(False)
        last_token = quotient(viewers.first_row + viewers.rows - 1, viewers.heads)
        for token in cutlass.range(quotient(viewers.first_row, viewers.heads), last_token + 1, unroll=1):
            keys = keys_of_row(viewers.view, viewers.request, viewers.end_token, token)
            seen = seen | keys.holds(key)
    return seen


@cute.jit
def surely_seen(viewers: Viewers, key: Int32, keys: cutlass.Constexpr) -> Boolean:
    """Whether the range alone says that each of `keys` keys from `key` on is seen by some row."""
    return not viewers.keys.lacks(key, keys) and not hides(viewers.view)


@cute.jit
def seen_bits(viewers: Viewers, key: Int32, keys: cutlass.Constexpr) -> Int32:
    """Which of `keys` keys from `key` on some row sees. All lanes of a warp must ask together."""
    return cute.arch.vote_ballot_sync(seen_by_any(viewers, key + cute.arch.lane_idx())) & ((1 << keys) - 1)


def seen_by_both(one: VisibleKeys, other: VisibleKeys) -> VisibleKeys:
    return VisibleKeys(cutlass.max(one.first, other.first), cutlass.min(one.end, other.end))


@cute.jit
def seen_by_all(keys: VisibleKeys) -> VisibleKeys:
    """The keys that all lanes of the warp see; `keys` are those that this lane sees."""
    return VisibleKeys(cute.arch.warp_redux_sync(keys.first, "max"), cute.arch.warp_redux_sync(keys.end, "min"))


@cute.jit
def _keys_below(view: Visibility, bound: Int32, less: Int32) -> Int32:
    """How many of this rank's keys have a global position below `bound` - `less`; `less` is not negative."""
    count = cutlass.max(bound, less) - less
    periods = quotient(count, view.period)
    mine = cutlass.max(count - periods * view.period.value - view.before, 0)
    return periods * view.interleave + cutlass.min(mine, view.interleave)
