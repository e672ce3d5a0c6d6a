"""PrefillVariant -> sizes of the Blackwell prefill. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses

from tsmla.identity.variant import PrefillVariant

from ...limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, TMEM_COLUMNS

HEADER_BYTES = 3072
"""Room ahead of the first tile, for each of `factors`: for mbarriers, the tensor memory address and twice 128 floats
per query tile."""
SECTION_HEADS = 32
"""Key heads worked on at a time where tiles are of unlike lengths: the longest tiles of as many heads start first, so
that the last are short; and 148 CTAs still have four to five tiles of each head, which read the same keys
(kernels/log/blackwell-prefill.md)."""


@dataclasses.dataclass(frozen=True)
class PrefillGeometry:
    """Sizes of the Blackwell prefill: one CTA computes two query tiles of 128 rows of one head.

    Shared memory is cut into slots of 128 rows x 64 elements, what one copy moves: a Q or K tile is d_qk / 64 of them,
    a V tile d_v / 64. K and V slots share one ring, in the order in which they are used, so that memory which is too
    small for two whole stages (16-bit, d_qk 192: 1.6) is used to the end.
    """

    d_qk: int
    d_v: int
    element_bytes: int
    out_bytes: int
    ring_slots: int
    factors: int
    """Places for a row's factors, used in turn."""
    rows: int = 128
    query_tiles: int = 2
    tile_kv: int = 128
    slot_elements: int = 64

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillGeometry:
        element_bytes = variant.dtype.bits // 8
        geometry = cls(
            d_qk=variant.d_qk,
            d_v=variant.d_v,
            element_bytes=element_bytes,
            out_bytes=variant.out_dtype.bits // 8,
            ring_slots=16 // element_bytes,
            factors=2 if element_bytes == 1 else 1,
        )
        geometry.check()
        return geometry

    @property
    def slot_bytes(self) -> int:
        return self.rows * self.slot_elements * self.element_bytes

    @property
    def k_slots(self) -> int:
        """Slots of one K tile, and of one Q tile."""
        return self.d_qk // self.slot_elements

    @property
    def v_slots(self) -> int:
        return self.d_v // self.slot_elements

    @property
    def q_pitch(self) -> int:
        """Slots from one query tile to the next: its output takes its place at the end and may be larger."""
        return max(self.k_slots, -(-self.rows * self.d_v * self.out_bytes // self.slot_bytes))

    @property
    def q_bytes(self) -> int:
        """Bytes that the copies of one query tile move."""
        return self.k_slots * self.slot_bytes

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES * self.factors

    @property
    def shared_bytes(self) -> int:
        return self.header_bytes + (self.query_tiles * self.q_pitch + self.ring_slots) * self.slot_bytes

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
        """Offset of the tensor memory address; barriers lie before it."""
        return self.factors_offset - 16

    @property
    def tmem_scores(self) -> int:
        """First column of the scores of query tile 0; the tiles follow each other. Probabilities take their place."""
        return 0

    @property
    def tmem_output(self) -> int:
        return self.query_tiles * self.tile_kv

    @property
    def tmem_columns(self) -> int:
        return self.query_tiles * (self.tile_kv + self.d_v)

    def check(self) -> None:
        assert self.d_qk % self.slot_elements == 0 and self.d_v % self.slot_elements == 0, self
        assert self.ring_slots & (self.ring_slots - 1) == 0, self
        assert self.ring_slots >= self.k_slots + self.v_slots, f"a step's K and V tiles do not fit in the ring: {self}"
        assert self.slot_bytes % TILE_ALIGNMENT == 0, self
        assert self.tmem_columns <= TMEM_COLUMNS, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
