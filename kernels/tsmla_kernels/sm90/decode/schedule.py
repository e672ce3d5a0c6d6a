"""Who does what in the Hopper decode: roles, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from ...limits import REGISTERS_PER_SM, WARPGROUP
from .geometry import LOAD_WARPS, DecodeGeometry

CLEAN_WARP = 1
DEAL_WARP = 2
PAIR_BARRIER = 1
"""First of four named barriers: the two warps, one of each attending warpgroup, that hold the same 16 rows."""


@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Warpgroup 0 loads (warps 0 and 3), cleans tiles at the ends of the visible keys (warp 1) and deals tasks (warp
    2); two warpgroups attend; a fourth transposes values where they have 8 bits."""

    load_registers: int
    attend_registers: int
    transpose_registers: int

    @classmethod
    def of(cls, geometry: DecodeGeometry) -> DecodeSchedule:
        schedule = cls(32, 224, 32) if geometry.transposes else cls(40, 232, 0)
        schedule.check(geometry)
        return schedule

    @property
    def threads(self) -> int:
        return (4 if self.transpose_registers else 3) * WARPGROUP

    @property
    def warps_per_group(self) -> int:
        return WARPGROUP // 32

    @property
    def told_warps(self) -> int:
        """Warps that are dealt tasks: two attending groups, the loading, the cleaning and the transposing ones."""
        groups = 3 if self.transpose_registers else 2
        return groups * self.warps_per_group + len(LOAD_WARPS) + 1

    @property
    def kv_warps(self) -> int:
        """Warps that leave a stage of a piece: those that multiply its values, or score it and transpose it."""
        return (2 if self.transpose_registers else 1) * self.warps_per_group

    def check(self, geometry: DecodeGeometry) -> None:
        total = WARPGROUP * (self.load_registers + 2 * self.attend_registers + self.transpose_registers)
        assert total <= REGISTERS_PER_SM, f"{total} registers: {self}"
        assert geometry.accumulator_registers + 24 <= self.attend_registers, (self, geometry)
