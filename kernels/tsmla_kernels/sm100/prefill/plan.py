"""Plans of the Blackwell prefill: how query tiles share tensor memory, and CTAs share keys. Pure Python."""

from __future__ import annotations

import dataclasses

from tsmla.identity.variant import PrefillVariant

from ...limits import TMEM_COLUMNS

TILE = 128
"""Rows of a query tile, and keys of a KV tile."""


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """A plan says how many query tiles are computed together, by how many CTAs, and where their scores and
    probabilities lie in tensor memory.

    ctas: CTAs that compute query tiles of their own with the same keys, of which each loads its share. Two are a pair:
        one of them issues the MMAs of both.
    query_tiles: query tiles of each CTA, with a softmax warpgroup for each.
    score_places: places for scores of each query tile, which its KV tiles take in turn.
    crossed: whether probabilities of a query tile lie over the scores of the other one. Else they lie over their own
        scores.
    factors: places for a row's factors, used in turn."""

    ctas: int
    query_tiles: int
    score_places: int
    crossed: bool
    factors: int

    @property
    def ahead(self) -> bool:
        """Whether scores of a KV tile are computed under the softmax of the one before, ahead of its values. Else they
        take the place of its probabilities, and that they are there says that the values have been added."""
        return self.crossed or self.score_places > 1

    def columns(self, d_v: int) -> int:
        """Columns of tensor memory that scores and outputs take in each CTA."""
        return self.query_tiles * (self.score_places * TILE + d_v)


IN_PLACE = TilePlan(ctas=1, query_tiles=2, score_places=1, crossed=False, factors=1)
CROSSED = TilePlan(ctas=1, query_tiles=2, score_places=1, crossed=True, factors=2)
PAIR = TilePlan(ctas=2, query_tiles=1, score_places=2, crossed=False, factors=4)
"""A plan for outputs of which tensor memory holds only one. One CTA would read its operands, and take in keys and
values, at more than what shared memory brings while it multiplies (kernels/log/blackwell-prefill.md)."""


def plan_of(variant: PrefillVariant) -> TilePlan:
    """The plan of a variant: two query tiles in a CTA, if their outputs fit beside their scores."""
    two = CROSSED if variant.dtype.bits == 8 else IN_PLACE
    return two if two.columns(variant.d_v) <= TMEM_COLUMNS else PAIR


def place_of(plan: TilePlan, tile, event):
    """The place among all query tiles' score places that event number `event` of a query tile has, and the event's
    number there. Barriers that concern events have a stage for each place: who arrives for an event may be ahead of
    others by one event less than there are places."""
    places = plan.score_places
    if places == 1:
        return tile, event
    return tile * places + (event & (places - 1)), event >> (places.bit_length() - 1)
