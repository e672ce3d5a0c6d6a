"""PrefillVariant -> sizes of the Hopper prefill. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses
import math

from tsmla.identity.arch import Arch
from tsmla.identity.dtype import bytes_of
from tsmla.identity.support import NOPE_DIMS
from tsmla.identity.variant import PrefillVariant

from ...limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, swizzle_bytes
from ...parts.hopper.storage import BARRIER_BYTES
from ...prefill.tile_bounds import LIST_WORDS
from .policy import PrefillPolicy, policy_of

TASKS_AT = BARRIER_BYTES // 2
"""Where a CTA's tasks lie in shared memory, behind the barriers."""
MULTIPLIED_BYTES = 2
"""Bytes of a probability and of a value as they are multiplied."""
TASK_WORDS = 6
"""32-bit words of a task: a query tile's head and number, its sequence's rows and keys."""
SINGLE_TILES = 4
"""8-bit prefill: at most this many single-tile CTAs for each CTA slot are kept for the end of the grid."""
SINGLE_SHARE = 8
"""Beyond one for each CTA slot, at most one tile in this many gets a CTA of its own: with few tiles, sharing a head's
keys in L2 is worth more than an even finish."""
FOLLOWING = (2, 4)
"""Tiles of a CTA that follow each other, where keys allow."""
SHORT_KEYS = 4096
"""Mean keys of a sequence up to which a CTA's tiles are far apart, in kernels that let them follow each other beyond
(`follows_if_long`); twice as many where there are as many queries as keys. Tiles that follow each other have the same
keys."""
LONG_KEYS = 8192
"""Keys of a sequence, on average, up to which CTAs of 16 bits take several query tiles (`alone_if_long`)."""


@dataclasses.dataclass(frozen=True)
class PrefillGeometry:
    """Sizes of the sm_90a prefill: one CTA computes `tile_q` query rows of one head, one warpgroup per 64 rows, up to
    `tasks` times, one after the other. `policy` says what kinds of heads do differently."""

    policy: PrefillPolicy
    d_qk: int
    d_v: int
    tasks: int
    element_bytes: int

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillGeometry:
        assert variant.arch is Arch.SM90A, variant
        geometry = cls(policy_of(variant), variant.d_qk, variant.d_v, 8, bytes_of(variant.dtype.bits))
        geometry.check()
        return geometry

    @property
    def tile_q(self) -> int:
        return self.policy.tile_q

    @property
    def tile_kv(self) -> int:
        return self.policy.tile_kv

    @property
    def stages(self) -> int:
        return self.policy.stages

    @property
    def wide_stages(self) -> int:
        return self.policy.wide_stages

    @property
    def box_columns(self) -> int:
        """Columns of Q and K that one copy moves: as many as are swizzled together. A rope of 64 columns is one box, so
        that pieces are whole boxes."""
        return swizzle_bytes(math.gcd(self.d_qk, NOPE_DIMS[self.d_qk]) * self.element_bytes) // self.element_bytes

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
    def wide_bytes(self) -> int:
        """Bytes of one stage of V as it is multiplied."""
        return self.tile_kv * self.d_v * MULTIPLIED_BYTES

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a key and its value."""
        return (self.d_qk + self.d_v) * self.element_bytes

    @property
    def keys_fill_l2(self) -> bool:
        """Whether the keys and values of about three query tiles for each SM, as many as prompts have, fill an L2. A
        CTA then takes two tiles where heads do not make up a round (log, 46: 12K 1.050 -> 1.007)."""
        return self.kv_row_bytes * self.tile_q >= 128 * 1024

    @property
    def task_words(self) -> int:
        """Words of a task; with a key mask, also those that say where its list of tiles is."""
        return TASK_WORDS + (LIST_WORDS if self.policy.masked else 0)

    @property
    def widens_values(self) -> bool:
        """Whether values are widened to float16 in shared memory before their product."""
        return self.wide_stages > 0

    @property
    def shared_bytes(self) -> int:
        rings = self.stages * (self.k_bytes + self.v_bytes) + self.wide_stages * self.wide_bytes
        return BARRIER_BYTES + self.q_bytes + rings

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers a consumer thread holds through the main loop: scores, their rounded copy, output."""
        return (4 * self.tile_kv + MULTIPLIED_BYTES * self.tile_kv + 4 * self.d_v) * 64 // 4 // 128

    def check(self) -> None:
        k_step = 32 // MULTIPLIED_BYTES
        assert self.widens_values == (self.element_bytes == 1), self
        assert self.tile_q % 64 == 0 and self.tile_kv % k_step == 0 and self.tile_kv <= 256, self
        hidden = -(-(self.tile_q - 64) // self.tile_kv)  # of the tiles that some row of the CTA sees
        assert hidden < self.stages, self
        assert self.d_qk * self.element_bytes % 64 == 0, self
        assert self.d_v * self.element_bytes % 128 == 0, self
        for size in (self.q_bytes * 64 // self.tile_q, self.k_bytes, self.v_bytes):
            assert size % TILE_ALIGNMENT == 0, self
        assert TASKS_AT + 4 * self.task_words * self.tasks <= BARRIER_BYTES, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
