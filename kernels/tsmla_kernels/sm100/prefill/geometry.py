"""PrefillVariant -> sizes of the Blackwell prefill. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses

from tsmla.identity.dtype import bytes_of
from tsmla.identity.variant import PrefillVariant

from ...limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, TMEM_COLUMNS
from ...prefill.tile_bounds import LIST_WORDS
from .plan import TILE, TilePlan, plan_of

HEADER_BYTES = 1536
"""Bytes ahead of the first tile for each query tile and each of its places of factors (`header_bytes` multiplies):
mbarriers, the tensor memory address, where the tile list is, factors, and those of earlier results."""
SECTION_HEADS = 32
"""Key heads worked on at a time where tiles are of unlike lengths: the longest tiles of as many heads start first, so
that the last are short; and 148 CTAs still have four to five tiles of each head, which read the same keys
(kernels/log/blackwell-prefill.md)."""


@dataclasses.dataclass(frozen=True)
class PrefillGeometry:
    """Sizes of the Blackwell prefill: the CTAs of a plan compute query tiles of 128 rows of one head.

    Shared memory is cut into slots of 64 elements of each row, what one copy moves. A Q tile is d_qk / 64 slots of 128
    rows. A slot of K or V has as many rows as a CTA loads keys of a K tile, 128 or, in a pair, 64: a K tile is d_qk /
    64 slots in each CTA, a V tile d_v / 64, in a pair twice half of its keys and every other 64 of its columns. K and V
    slots share one ring, in the order in which they are used, so that memory which is too small for two whole stages
    (16-bit, d_qk 192: 1.6) is used to the end.
    """

    plan: TilePlan
    d_qk: int
    d_v: int
    element_bytes: int
    out_bytes: int
    ring_slots: int
    rows: int = TILE
    tile_kv: int = TILE
    slot_elements: int = 64

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillGeometry:
        element_bytes = bytes_of(variant.dtype.bits)
        plan = plan_of(variant)
        geometry = cls(
            plan=plan,
            d_qk=variant.d_qk,
            d_v=variant.d_v,
            element_bytes=element_bytes,
            out_bytes=bytes_of(variant.out_dtype.bits),
            ring_slots=plan.ctas * 16 // element_bytes,
        )
        geometry.check()
        return geometry

    @property
    def query_tiles(self) -> int:
        return self.plan.query_tiles

    @property
    def factors(self) -> int:
        return self.plan.factors

    @property
    def rows_together(self) -> int:
        """Query rows that the CTAs of the plan compute together."""
        return self.plan.ctas * self.query_tiles * self.rows

    @property
    def q_slot_bytes(self) -> int:
        return self.rows * self.slot_elements * self.element_bytes

    @property
    def slot_rows(self) -> int:
        """Rows of a K or V slot: keys of a K tile that a CTA loads."""
        return self.tile_kv // self.plan.ctas

    @property
    def slot_bytes(self) -> int:
        return self.slot_rows * self.slot_elements * self.element_bytes

    @property
    def k_slots(self) -> int:
        """Slots of one K tile, and of one Q tile."""
        return self.d_qk // self.slot_elements

    @property
    def v_blocks(self) -> int:
        """Blocks of 64 columns of one V tile that a CTA loads."""
        return self.d_v // self.slot_elements // self.plan.ctas

    @property
    def v_slots(self) -> int:
        """Slots of one V tile: those of its first block, then of the others."""
        return self.v_blocks * (self.tile_kv // self.slot_rows)

    @property
    def q_pitch(self) -> int:
        """Slots from one query tile to the next: its output takes its place at the end and may be larger."""
        return max(self.k_slots, -(-self.rows * self.d_v * self.out_bytes // self.q_slot_bytes))

    @property
    def q_bytes(self) -> int:
        """Bytes that the copies of one query tile move."""
        return self.k_slots * self.q_slot_bytes

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES * self.query_tiles * self.factors

    @property
    def ring_offset(self) -> int:
        return self.header_bytes + self.query_tiles * self.q_pitch * self.q_slot_bytes

    @property
    def shared_bytes(self) -> int:
        return self.ring_offset + self.ring_slots * self.slot_bytes

    @property
    def factors_offset(self) -> int:
        """Offset of the factors: floats for the query tiles' rows, `factors` times; with `kept_offset`, the end of the
        header."""
        return self.kept_offset - self.factors * self.query_tiles * self.rows * 4

    @property
    def kept_offset(self) -> int:
        return self.header_bytes - self.query_tiles * self.rows * 4

    @property
    def tmem_base_offset(self) -> int:
        """Offset of the tensor memory address."""
        return self.factors_offset - 16

    @property
    def visits_offset(self) -> int:
        """Offset of the words that say, with a key mask, where the list of KV tiles is; barriers lie before them."""
        return self.tmem_base_offset - 4 * LIST_WORDS

    @property
    def tmem_scores(self) -> int:
        """First column of the scores of query tile 0; the tiles follow each other, and so do the places of each.
        Probabilities take their place."""
        return 0

    @property
    def tmem_output(self) -> int:
        return self.query_tiles * self.plan.score_places * self.tile_kv

    @property
    def tmem_columns(self) -> int:
        return self.plan.columns(self.d_v)

    def check(self) -> None:
        assert self.d_qk % self.slot_elements == 0 and self.d_v % self.slot_elements == 0, self
        assert self.d_v % (self.plan.ctas * self.slot_elements) == 0, self
        assert self.ring_slots & (self.ring_slots - 1) == 0, self
        assert self.plan.score_places & (self.plan.score_places - 1) == 0, self
        assert self.ring_slots >= self.k_slots + self.v_slots, f"a step's K and V tiles do not fit in the ring: {self}"
        assert self.slot_bytes % TILE_ALIGNMENT == 0, self
        assert self.tmem_columns <= TMEM_COLUMNS, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
