"""Who does what in the Blackwell decode: warps, registers, named barriers."""

from __future__ import annotations

import dataclasses

from ...limits import REGISTERS_PER_SM

ROW_BARRIER = 1
"""First of two named barriers: rows 0-31 and rows 32-63 of the CTA."""


@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Warps of one CTA. Softmax warps come first: warp w reaches tensor-memory lanes 32 (w % 4) .. + 31 only.

    One softmax warpgroup: the exponentials take as long on two, and what warps do beside them is done once per warp.
    All roles have the same registers, so that none are moved between them."""

    softmax_warps: int = 4
    mma_warp: int = 4
    key_warp: int = 5
    value_warp: int = 6
    threads: int = 256
    registers: int = 255

    def __post_init__(self) -> None:
        assert self.threads % 128 == 0 and self.threads * self.registers <= REGISTERS_PER_SM, self
        assert max(self.mma_warp, self.key_warp, self.value_warp) < self.threads // 32, self
