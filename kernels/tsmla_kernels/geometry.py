"""variant -> sizes: tiles, stages, shared-memory bytes, registers. Pure Python; every budget is asserted here,
before any instruction is generated."""

from __future__ import annotations

import dataclasses

from tsmla.variant import Arch, PrefillVariant

SHARED_BYTES_PER_CTA = 227 * 1024
"""Opt-in shared memory that one CTA can have on sm_90a, sm_100a and sm_103a (CUDA programming guide)."""
REGISTERS_PER_SM = 64 * 1024
BARRIER_BYTES = 1024
"""Room kept for mbarriers ahead of the first 1024-byte aligned tile."""
TILE_ALIGNMENT = 1024
"""The 128-byte swizzle pattern repeats every 1024 bytes, so each tile starts on such a boundary."""


@dataclasses.dataclass(frozen=True)
class PrefillGeometry:
    """Sizes of the sm_90a prefill: one CTA computes `tile_q` query rows of one head, one warpgroup per 64 rows."""

    tile_q: int
    tile_kv: int
    d_qk: int
    d_v: int
    stages: int
    element_bytes: int

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillGeometry:
        assert variant.arch is Arch.SM90A, variant
        geometry = cls(
            tile_q=128,
            tile_kv=128,
            d_qk=variant.d_qk,
            d_v=variant.d_v,
            stages=2,
            element_bytes=variant.dtype.bits // 8,
        )
        geometry.check()
        return geometry

    @property
    def q_bytes(self) -> int:
        return self.tile_q * self.d_qk * self.element_bytes

    @property
    def k_bytes(self) -> int:
        """One stage."""
        return self.tile_kv * self.d_qk * self.element_bytes

    @property
    def v_bytes(self) -> int:
        """One stage."""
        return self.tile_kv * self.d_v * self.element_bytes

    @property
    def out_bytes(self) -> int:
        return self.tile_q * self.d_v * self.element_bytes

    @property
    def shared_bytes(self) -> int:
        """The output takes Q's place, 64 rows by 64 rows, once a warpgroup's last score has been computed."""
        return BARRIER_BYTES + self.q_bytes + self.stages * (self.k_bytes + self.v_bytes)

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers a consumer thread holds through the main loop: scores, their 16-bit copy, output."""
        rows_per_thread = 2
        columns = (self.tile_kv + self.tile_kv // 2 + self.d_v) // 4
        return rows_per_thread * columns

    def check(self) -> None:
        assert self.tile_q % 64 == 0 and self.tile_kv % 16 == 0, self
        assert self.d_qk * self.element_bytes % 128 == 0, self
        assert self.d_v * self.element_bytes % 128 == 0, self
        assert self.d_v <= self.d_qk, f"an output slice does not fit in its Q slice: {self}"
        for size in (self.q_bytes, self.k_bytes, self.v_bytes, self.out_bytes):
            assert size % TILE_ALIGNMENT == 0, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
