"""Who does what: warp roles, register budgets and named-barrier ids, as frozen tables checked in plain Python."""

from __future__ import annotations

import dataclasses

from tsmla.variant import Arch, PrefillVariant

from .geometry import REGISTERS_PER_SM, PrefillGeometry

WARPGROUP = 128


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
    """sm_90a prefill: warpgroup 0 loads (one elected thread issues every TMA), the others attend, 64 rows each."""

    attend_warpgroups: int
    load_registers: int
    attend_registers: int

    @classmethod
    def of(cls, geometry: PrefillGeometry) -> PrefillSchedule:
        groups = geometry.tile_q // 64
        load, attend = {2: (24, 240), 3: (32, 160)}[groups]
        schedule = cls(groups, load, attend)
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
        """Arrivals that free a K, V or Q stage: one elected lane of each attending warp."""
        return self.attend_threads // 32

    def check(self, geometry: PrefillGeometry) -> None:
        for registers in (self.load_registers, self.attend_registers):
            assert registers % 8 == 0 and 24 <= registers <= 256, self
        total = WARPGROUP * (self.load_registers + self.attend_warpgroups * self.attend_registers)
        assert total <= REGISTERS_PER_SM, f"{total} registers: {self}"
        assert geometry.accumulator_registers + 24 <= self.attend_registers, (self, geometry)


EPILOGUE_BARRIER = 1
"""First of `attend_warpgroups` named barriers: the warpgroup's output rows are in shared memory."""


@dataclasses.dataclass(frozen=True)
class Sm100PrefillSchedule:
    """Blackwell prefill: warpgroups 0 and 1 are the softmax of one query tile each, a thread per row; warpgroup 2
    corrects and writes the output, a thread per row of either tile; of warpgroup 3, one warp issues MMAs, one loads."""

    softmax_registers: int
    correct_registers: int
    issue_registers: int
    emulated_pairs: int
    """Of every 16 pairs of exponentials, so many are computed on the FMA pipes instead of the exponential unit."""
    maximum_on_load: bool
    """tcgen05.ld gives the maximum of what it loads."""

    @classmethod
    def of(cls, variant: PrefillVariant) -> Sm100PrefillSchedule:
        ultra = variant.arch is Arch.SM103A
        emulated = 0 if ultra else 2
        schedule = cls(192, 80, 48, emulated, ultra)
        schedule.check()
        return schedule

    threads = 4 * WARPGROUP
    correct_warpgroup = 2
    mma_warp = 12
    load_warp = 13

    def check(self) -> None:
        budgets = (self.softmax_registers, self.correct_registers, self.issue_registers)
        assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in budgets), self
        total = WARPGROUP * (2 * self.softmax_registers + self.correct_registers + self.issue_registers)
        assert total <= REGISTERS_PER_SM, f"{total} registers: {self}"
        assert 0 <= self.emulated_pairs <= 16, self


CORRECT_BARRIER = 1
"""Named barrier of the four correcting warps."""
