"""Who does what in the Hopper prefill: roles, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from ...limits import REGISTERS_PER_SM, WARPGROUP
from .geometry import PrefillGeometry

EPILOGUE_BARRIER = 1
"""First of `attend_warpgroups` named barriers: the warpgroup's output rows are in shared memory."""


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
    """sm_90a prefill: warp 0 loads (one elected thread issues every TMA), of the rest of its warpgroup the first
    `transpose_warps` transpose 8-bit values, and the other warpgroups attend, 64 rows each."""

    attend_warpgroups: int
    transpose_warps: int
    load_registers: int
    attend_registers: int

    @classmethod
    def of(cls, geometry: PrefillGeometry) -> PrefillSchedule:
        groups = geometry.tile_q // 64
        load, attend = {2: (40, 232) if geometry.transposes_values else (24, 240), 3: (32, 160)}[groups]
        schedule = cls(groups, 2 if geometry.transposes_values else 0, load, attend)
        schedule.check(geometry)
        return schedule

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.attend_warpgroups)

    @property
    def attend_threads(self) -> int:
        return WARPGROUP * self.attend_warpgroups

    @property
    def attend_warps(self) -> int:
        """Arrivals that free a stage that they read: one elected lane of each attending warp."""
        return self.attend_threads // 32

    def check(self, geometry: PrefillGeometry) -> None:
        assert 0 <= self.transpose_warps < WARPGROUP // 32, self
        assert (self.transpose_warps > 0) == geometry.transposes_values, (self, geometry)
        for registers in (self.load_registers, self.attend_registers):
            assert registers % 8 == 0 and 24 <= registers <= 256, self
        total = WARPGROUP * (self.load_registers + self.attend_warpgroups * self.attend_registers)
        assert total <= REGISTERS_PER_SM, f"{total} registers: {self}"
        assert geometry.accumulator_registers + 24 <= self.attend_registers, (self, geometry)
