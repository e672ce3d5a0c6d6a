"""PrefillVariant -> sizes of the Hopper prefill. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses
import math

from tsmla.support import NOPE_DIMS
from tsmla.variant import Arch, PrefillVariant

from ...limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, swizzle_bytes
from ...parts.hopper.storage import BARRIER_BYTES

TASKS_AT = BARRIER_BYTES // 2
"""Where a CTA's tasks lie in shared memory, behind the barriers."""
TASK_WORDS = 6
"""32-bit words of a task: a query tile's head and number, its sequence's rows and keys."""
SINGLE_TILES = 4
"""8-bit prefill: at most this many single-tile CTAs for each CTA slot are kept for the end of the grid."""
SINGLE_SHARE = {128: 4, 192: 8}
"""tile_q -> beyond one for each CTA slot, at most one tile in this many gets a CTA of its own: with few tiles, sharing
a head's keys in L2 is worth more than an even finish."""
FOLLOWING = (2, 4)
"""Tiles of a CTA that follow each other, where keys allow."""
SHORT_KEYS = 4096
"""Keys of a sequence, on average, up to which CTAs' tiles are far apart where they may follow each other
(`may_follow`); twice as many where there are as many queries. In longer sequences a CTA's tiles follow each other, and
have the same keys."""
LONG_KEYS = 8192
"""Keys of a sequence, on average, up to which CTAs of 16 bits take several query tiles (`may_be_alone`)."""


@dataclasses.dataclass(frozen=True)
class PrefillGeometry:
    """Sizes of the sm_90a prefill: one CTA computes `tile_q` query rows of one head, one warpgroup per 64 rows, up to
    `tasks` times, one after the other.

    The rings of K and V have `stages`. 8-bit values are transposed in shared memory, into a ring of
    `transposed_stages`: their MMA reads them with keys contiguous.

    An output of 256 columns takes 128 registers of each thread, which leave less room for a tile's scores, and such
    heads' keys and values more than twice the bytes: `tile_kv` is what registers and shared memory allow. With 8 bits
    and 128 columns three warpgroups attend, with registers for 96 keys: what a warp has to do one after the other is
    most of the time, and no unit is busy for much more than half of it (kernels/log/hopper-prefill.md, 34)."""

    tile_q: int
    tile_kv: int
    d_qk: int
    d_v: int
    stages: int
    tasks: int
    element_bytes: int
    transposed_stages: int

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillGeometry:
        assert variant.arch is Arch.SM90A, variant
        small, wide = variant.dtype.bits == 8, variant.d_v > 128
        tile_kv, stages = (96, 3) if small else (80 if wide else 128, 2)
        geometry = cls(
            tile_q=192 if small and not wide else 128,
            tile_kv=tile_kv,
            d_qk=variant.d_qk,
            d_v=variant.d_v,
            stages=stages,
            tasks=8,
            element_bytes=variant.dtype.bits // 8,
            transposed_stages=(2 if wide else 3) if small else 0,
        )
        geometry.check()
        return geometry

    @property
    def box_columns(self) -> int:
        """Columns of Q and K that one copy moves: as many as are swizzled together. A rope of 64 columns is one box, so
        that pieces are whole boxes."""
        return swizzle_bytes(math.gcd(self.d_qk, NOPE_DIMS[self.d_qk]) * self.element_bytes) // self.element_bytes

    @property
    def may_follow(self) -> bool:
        """Whether a CTA's query tiles follow each other in long sequences, rather than be far apart."""
        return self.element_bytes == 1 and self.d_v <= 128

    @property
    def may_be_alone(self) -> bool:
        """Whether long sequences have a kernel of their own, whose CTAs take one query tile: the loop around tiles
        costs 1 to 2 % of time in 16 bits, which nothing makes up for where a query tile has hundreds of KV tiles."""
        return self.element_bytes == 2 and self.d_v <= 128

    @property
    def keys_fill_l2(self) -> bool:
        """Whether the keys and values of about three query tiles for each SM, as many as prompts have, fill an L2."""
        return self.kv_row_bytes * self.tile_q >= 128 * 1024

    @property
    def passes_rows(self) -> bool:
        """Whether a warpgroup without rows passes over all tiles: a query tile of fewer rows takes less time."""
        return self.tile_q > 128

    @property
    def is_wide(self) -> bool:
        """Whether warpgroups pass over tiles that none of their rows sees, mask only those that one of their rows does
        not see all of, and find the ends of rows while the last values are multiplied. That gains 1 to 10 % of short
        rows here; narrow heads tie or lose (kernels/log/hopper-prefill.md, 52)."""
        return self.d_v > 128

    @property
    def passes_tiles(self) -> bool:
        """Whether a warpgroup passes over tiles that none of its rows sees."""
        return self.is_wide or self.passes_rows

    @property
    def starts_early(self) -> bool:
        """Whether a query tile's first keys and values (to be transposed) are loaded before its queries, and the
        queries as soon as the last scores of the tile before are there. With 16 bits the loop is slower for it."""
        return self.is_wide and self.transposes_values

    @property
    def q_bytes(self) -> int:
        return self.tile_q * self.d_qk * self.element_bytes

    @property
    def k_bytes(self) -> int:
        """Bytes of one stage of K."""
        return self.tile_kv * self.d_qk * self.element_bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of one stage of V."""
        return self.tile_kv * self.d_v * self.element_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a key and its value."""
        return (self.d_qk + self.d_v) * self.element_bytes

    @property
    def transposes_values(self) -> bool:
        return self.transposed_stages > 0

    @property
    def shared_bytes(self) -> int:
        rings = self.stages * (self.k_bytes + self.v_bytes) + self.transposed_stages * self.v_bytes
        return BARRIER_BYTES + self.q_bytes + rings

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers a consumer thread holds through the main loop: scores, their rounded copy, output."""
        return (4 * self.tile_kv + self.element_bytes * self.tile_kv + 4 * self.d_v) * 64 // 4 // 128

    def check(self) -> None:
        k_step = 32 // self.element_bytes
        assert self.transposes_values == (self.element_bytes == 1), self
        assert self.tile_q % 64 == 0 and self.tile_kv % k_step == 0 and self.tile_kv <= 256, self
        hidden = -(-(self.tile_q - 64) // self.tile_kv)  # of the tiles that some row of the CTA sees
        assert hidden < self.stages, self
        assert self.d_qk * self.element_bytes % 64 == 0, self
        assert self.d_v * self.element_bytes % 128 == 0, self
        for size in (self.q_bytes * 64 // self.tile_q, self.k_bytes, self.v_bytes):
            assert size % TILE_ALIGNMENT == 0, self
        assert 4 * TASK_WORDS * self.tasks <= BARRIER_BYTES - TASKS_AT, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
