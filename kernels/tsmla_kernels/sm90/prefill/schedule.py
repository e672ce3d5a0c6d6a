"""Who does what in the Hopper prefill: roles, edges between them, register budgets."""

from __future__ import annotations

import dataclasses

from ...limits import WARPGROUP, registers_at_launch
from ...parts.edges import Copies, EdgeSpec, EdgeTable, Role, Warps
from .geometry import TASKS_AT, PrefillGeometry


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
    """Who does what in the Hopper prefill: warp 0 loads (one elected thread issues every TMA), of the rest of its
    warpgroup the first `widen_warps` widen 8-bit values, and the other warpgroups attend, 64 rows each."""

    geometry: PrefillGeometry
    attend_warpgroups: int
    widen_warps: int
    load_registers: int
    attend_registers: int

    @classmethod
    def of(cls, geometry: PrefillGeometry) -> PrefillSchedule:
        groups = geometry.tile_q // 64
        fewer = geometry.widens_values or geometry.policy.masked  # with a key mask: log, 56
        load, attend = {2: (40, 232) if fewer else (24, 240), 3: (32, 160)}[groups]
        warps = WARPGROUP // 32 - 1 if geometry.widens_values else 0
        schedule = cls(geometry, groups, warps, load, attend)
        schedule.check()
        return schedule

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.attend_warpgroups)

    @property
    def load(self) -> Role:
        return Role("load", (0,), self.load_registers)

    @property
    def widen(self) -> Role:
        return Role("widen_values", tuple(range(1, 1 + self.widen_warps)), self.load_registers)

    @property
    def attend(self) -> Role:
        return Role("attend", tuple(range(WARPGROUP // 32, self.threads // 32)), self.attend_registers)

    @property
    def roles(self) -> tuple[Role, ...]:
        return (self.load, *((self.widen,) if self.widen_warps else ()), self.attend)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Hopper prefill. Each warpgroup's rows of the query are a stage. Where values have 8 bits, what
        was loaded (`v`) is widened (`values`); else it is multiplied as it is."""
        geometry, load = self.geometry, (Copies(self.load),)
        stages, attend, widen = geometry.stages, (Warps(self.attend),), (Warps(self.widen),)
        groups = self.attend_warpgroups
        one_group = (Warps(self.attend, groups, "the warpgroup whose rows they are"),)
        edges = [
            EdgeSpec("q", load, one_group, groups, geometry.q_bytes // groups),
            EdgeSpec("k", load, attend, stages, geometry.k_bytes),
            EdgeSpec("v", load, widen if self.widen_warps else attend, stages, geometry.v_bytes),
        ]
        if self.widen_warps:
            edges.append(EdgeSpec("values", widen, attend, geometry.wide_stages, geometry.wide_bytes))
        return EdgeTable(tuple(edges), TASKS_AT)

    def check(self) -> None:
        assert self.geometry.tasks <= self.threads // 32, self  # a warp finds one each
        assert 0 <= self.widen_warps < WARPGROUP // 32, self
        assert (self.widen_warps > 0) == self.geometry.widens_values, self
        for registers in (self.load_registers, self.attend_registers):
            assert registers % 8 == 0 and 24 <= registers <= 256, self
        total = WARPGROUP * (self.load_registers + self.attend_warpgroups * self.attend_registers)
        assert total <= self.threads * registers_at_launch(self.threads), f"{total} registers: {self}"
        assert self.geometry.accumulator_registers + 24 <= self.attend_registers, self
