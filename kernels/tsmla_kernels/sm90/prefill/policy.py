"""What the four kinds of heads do differently in the Hopper prefill, and the measurement that says why. Pure Python."""

from __future__ import annotations

import dataclasses

from tsmla.identity.variant import PrefillVariant


@dataclasses.dataclass(frozen=True)
class PrefillPolicy:
    """Tiles, rings and choices of one kind of heads.

    tile_q, tile_kv: query rows and keys of a tile. stages: of the rings of K and V. wide_stages: of the ring of
    8-bit values as they are multiplied, widened to float16: products of 8 bits are added in 13 bits, in which a sum
    over the keys of a long context loses most of what it adds (kernels/log/hopper-prefill.md, 57).

    An output of 256 columns takes 128 registers of each thread, which leave less room for a tile's scores, and such
    heads' keys and values more than twice the bytes: `tile_kv` is what registers and shared memory allow. With 8 bits
    and 128 columns three warpgroups attend, with registers for 80 keys: what a warp has to do one after the other is
    most of the time, and no unit is busy for much more than half of it (kernels/log/hopper-prefill.md, 34).

    lazy: a tile in which no row's maximum grows, the common one, is spared shuffles and the rescaling of output. In 16
    bits the test costs more than the shuffles it saves (log, 8), except where the output is twice as wide, and its
    rescaling twice the work.
    alone_if_long: long sequences have a kernel of their own, whose CTAs take one query tile: the loop around tiles
    costs 1 to 2 % of time in 16 bits, which nothing makes up for where a query tile has hundreds of KV tiles.
    follows_if_long: a CTA's query tiles follow each other in long sequences, rather than be far apart (log, 41: far
    apart always, 4 x 512 x 80K 1.013 -> 1.156).
    short_last: a warpgroup without rows passes over all tiles, so that a query tile of fewer rows takes less time, and
    comes last (log, 44, 48: 4 x 512 x 80K 1.015 -> 1.000, 0.999 -> 0.973).
    ends_early: warpgroups pass over tiles that none of their rows sees, mask only those that one of their rows does not
    see all of, and find the ends of rows while the last values are multiplied. That gains 0 to 9 % of short rows of 256
    columns (log, 51: b over main); narrow heads tie or lose (log, 52).
    starts_early: a query tile's first keys and values (to be widened) are loaded before its queries, and the queries
    as soon as the last scores of the tile before are there (log, 51: d over b, 1K 1.011 -> 0.973). With 16 bits the
    loop is slower for it.
    reads_ahead: with a key mask, a tile's words are read while the tile before is in softmax, which holds registers
    that 8 bits do not have (log, 56).
    masked: a key mask decides which tiles are visited, all of which every warpgroup visits."""

    tile_q: int
    tile_kv: int
    stages: int
    wide_stages: int = 0
    lazy: bool = False
    alone_if_long: bool = False
    follows_if_long: bool = False
    short_last: bool = False
    ends_early: bool = False
    starts_early: bool = False
    reads_ahead: bool = False
    masked: bool = False

    @property
    def passes(self) -> bool:
        """Whether a warpgroup passes over tiles that none of its rows sees."""
        return self.ends_early or self.short_last


POLICIES = {
    (16, 128): PrefillPolicy(128, 128, 2, alone_if_long=True, reads_ahead=True),
    (16, 256): PrefillPolicy(128, 80, 2, lazy=True, ends_early=True, reads_ahead=True),
    (8, 128): PrefillPolicy(192, 80, 3, 3, lazy=True, follows_if_long=True, short_last=True),
    (8, 256): PrefillPolicy(128, 96, 2, 2, lazy=True, ends_early=True, starts_early=True),
}
"""(bits of a number, columns of a value) -> policy."""


def policy_of(variant: PrefillVariant) -> PrefillPolicy:
    """Return the policy of a variant's heads."""
    policy = POLICIES[variant.dtype.bits, variant.d_v]
    if not variant.masked:
        return policy
    return dataclasses.replace(policy, masked=True, alone_if_long=False, short_last=False, ends_early=False)
