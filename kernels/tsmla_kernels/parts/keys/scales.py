"""Rows with a scale each: what becomes of the scales of keys and queries, in scores, sums and outputs.

A key is stored as numbers that its scale s_t multiplies, in its latent and its rope piece; a query row likewise, with
the scale u. The score of both is u s_t x_t, where x_t is the product of what is stored, and the value is s_t c_t.
Probabilities of 8 bits times s_t would lose most of what they hold, or all of it, because scales are far from 1. The
scale is therefore folded into the exponent that the row's reference follows:

    y_t = softmax_scale log2(e) u s_t x_t + log2(f_t), where s_t = s f_t
    p_t = 2^(y_t - reference + bias)
    output = s sum(p_t c_t) / sum(p_t / f_t)
    log2-sum-exp = reference - bias + log2(sum(p_t / f_t))

The precision of a probability then depends on its share of the *output*, and references follow y. The *anchor* s is a
power of two, the scale of one of the segment's keys without its fraction: whatever magnitude scales have, those of one
request are near each other. This keeps f_t near 1, and float32 sums free of the scales' magnitude. (SnapMLA multiplies
each tile's probabilities by s_t, and divides by the tile's largest product, for every tile:
docs/reference/cache-formats.md.)"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cutlass_dsl import select_
from tsmla.identity.row_format import SCALE_BYTES

from ..division import Divisor, quotient
from ..ptx import copy_word
from .listed import ListedKeys, entry_of, page_and_row, slot_of
from .source import KeySource, exists
from .visible import Viewers

MOST_INVERSE = 2.0**126
"""Largest inverse of a folded scale: finite, so that a probability of 0 times it is 0."""
_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0xFF << 23
_ONE = 127 << 23
_LEAST_EXPONENT, _MOST_EXPONENT = 1 << 23, 253 << 23
"""Exponent fields that an anchor may have: those for which its inverse is a normal float32, too."""


class RowScales(NamedTuple):
    """Scales of keys [pages, page size], and of query rows [batch, q_len, heads]."""

    keys: cute.Tensor
    queries: cute.Tensor


class Folded(NamedTuple):
    """What one key's scale becomes: its factor of scores, the logarithm that is added to them, and the factor of its
    probability in the row's sum."""

    scale: Float32
    logarithm: Float32
    inverse: Float32


@cute.jit
def query_scale(queries: cute.Tensor, request: Int32, row: Int32, heads: Divisor) -> Float32:
    """The scale of query row `row`, which counts the heads of all query tokens. Where query tokens of all requests lie
    one behind the other, `queries` has one request."""
    batch, q_len, _ = queries.shape
    token = quotient(row, heads)
    line = cutlass.min(request, batch - 1)
    return queries[line, token - line * q_len, row - token * heads.value]


@cute.jit
def key_scale(source: KeySource, keys: cute.Tensor, page: Int32, key: Int32) -> Float32:
    """The scale of a key; 1 where the cache does not have its page, whose rows count as zeros, whatever their scale."""
    found = Float32(1.0)
    if exists(source, page):
        found = keys[page, key & (source.page_size - 1)]
    return found


@cute.jit
def slot_scale(listed: ListedKeys, keys: cute.Tensor, slot: Int32) -> Float32:
    """The scale of a slot's row; 0 where there is no row."""
    found = Float32(0.0)
    if slot >= 0:
        found = keys[page_and_row(listed, slot)]
    return found


@cute.jit
def copy_slot_scale(listed: ListedKeys, keys: cute.Tensor, slot: Int32, target: Int32) -> None:
    """Start copying the scale of a slot's row to shared memory, by each lane; 0 where there is no row."""
    size = Int32(select_(slot < 0, Int32(0), Int32(SCALE_BYTES)))
    place = cute.domain_offset(page_and_row(listed, cutlass.max(slot, 0)), keys).iterator
    copy_word(target, place.toint(), size)


@cute.jit
def listed_anchor(listed: ListedKeys, keys: cute.Tensor, viewers: Viewers, first_key: Int32, count: Int32) -> Float32:
    """The anchor of `count` keys from `first_key` on, by a warp: that of the first positive and finite scale in their
    order. Lists may begin with many entries that name no key."""
    scale, done = Float32(0.0), Int32(0)
    while (scale == 0.0) & (done < count):
        key = first_key + done + cute.arch.lane_idx()
        own = slot_scale(listed, keys, slot_of(listed, entry_of(listed, viewers, key), key))
        says = cute.arch.vote_ballot_sync((own > 0.0) & (own < Float32.inf))
        found = cute.arch.shuffle_sync(own, cute.arch.popc((says & -says) - 1) & 31)
        scale, done = Float32(select_(says != 0, found, Float32(0.0))), done + 32
    return anchor_of(scale)


def deciding_key(viewers: Viewers, first_tile_key: Int32) -> Int32:
    """The key whose scale decides a segment's anchor: the first that may be seen of the tiles from key `first_tile_key`
    on. A hidden key decides nothing: the anchor is then that of 1."""
    return cutlass.max(first_tile_key, viewers.keys.first)


@cute.jit
def anchor_of(scale: Float32) -> Float32:
    """The power of two in a scale; 1 for what is no number, and for 0, whose key is hidden and says nothing of
    others."""
    magnitude = scale.bitcast(Int32) & _MAGNITUDE
    exponent = magnitude & _EXPONENT
    bounded = cutlass.min(cutlass.max(exponent, _LEAST_EXPONENT), _MOST_EXPONENT)
    says_nothing = (magnitude == 0) | (exponent == _EXPONENT)
    return Int32(select_(says_nothing, Int32(_ONE), bounded)).bitcast(Float32)


@cute.jit
def inverse_of(anchor: Float32) -> Float32:
    """1 / anchor, exactly."""
    return (Int32(254 << 23) - anchor.bitcast(Int32)).bitcast(Float32)


@cute.jit
def fold(scale: Float32, seen: Boolean, anchor: Float32, inverse_anchor: Float32) -> Folded:
    """Fold a key's scale; for a key that nobody sees, whatever its scale holds, into numbers that do no harm."""
    scale = Float32(select_(seen, scale, anchor))
    relative = scale * inverse_anchor
    inverse = cute.arch.fmax(cute.arch.fmin(cute.arch.rcp_approx(relative), MOST_INVERSE), -MOST_INVERSE)
    return Folded(scale, cute.math.log2(relative, fastmath=True), inverse)
