"""Who does what in the Blackwell prefill: roles, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from tsmla.variant import Arch, PrefillVariant

from ...limits import REGISTERS_PER_SM, WARPGROUP

CORRECT_BARRIER = 1
"""Named barrier of the four correcting warps."""


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
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
    def of(cls, variant: PrefillVariant) -> PrefillSchedule:
        ultra = variant.arch is Arch.SM103A
        emulated = 0 if ultra else 2
        # Found by the audit: with 48 registers the MMA thread of 16-bit tiles without a mask spills its descriptors,
        # with 184 the softmax of masked ones does.
        roomy = variant.dtype.bits == 16 and variant.d_qk == 192 and not variant.causal
        softmax, issue = (184, 64) if roomy else (192, 48)
        schedule = cls(softmax, 80, issue, emulated, ultra)
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
