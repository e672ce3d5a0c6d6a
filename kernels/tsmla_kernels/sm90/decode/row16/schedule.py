"""Who does what in the Hopper decode of few rows: roles, edges between them, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from ....limits import WARPGROUP, registers_at_launch
from ....parts.edges import Copies, EdgeSpec, EdgeTable, LaneCopies, Party, Role, Warps
from ..work.ring import DEALT_AT, TASK_RING, TASK_WORDS
from .geometry import TEAM_WARPS, TEAMS, FewRowsGeometry

LOAD_WARP, DEAL_WARP = 0, 2
GATHER_WARPS, PLAIN_GATHER_WARPS = (0, 1), (0, 1, 3)
"""Warps that gather, where rows are gathered: each half of a tile's keys; of rows without scales, a third of each."""
TEAM_BARRIER, ALL_BARRIER = 1, 3
"""Named barriers: of the first team, and of both."""


@dataclasses.dataclass(frozen=True)
class FewRowsSchedule:
    """Who does what in the Hopper decode of few rows: warpgroup 0 loads (warp 0; where rows are gathered, 0
    and 1, or all but warp 2) and deals (warp 2); the two others are teams that attend."""

    geometry: FewRowsGeometry
    load_registers: int = 40
    attend_registers: int = 232

    @property
    def threads(self) -> int:
        return (1 + TEAMS) * WARPGROUP

    @property
    def load(self) -> Role:
        if self.geometry.gathers:
            warps = PLAIN_GATHER_WARPS if self.geometry.plain else GATHER_WARPS
            return Role("gather_few", warps, self.load_registers)
        return Role("load_few", (LOAD_WARP,), self.load_registers)

    @property
    def deal(self) -> Role:
        return Role("deal", (DEAL_WARP,), self.load_registers)

    @property
    def attend(self) -> Role:
        return Role("attend_few", tuple(range(TEAM_WARPS, (1 + TEAMS) * TEAM_WARPS)), self.attend_registers)

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.load, self.deal, self.attend

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Hopper decode of few rows: `kv` are tiles, `dealt` tasks. Warps that gather rows also say that
        they have told which keys of a tile are there, unless keys' scales do."""
        team = (Warps(self.attend, TEAMS, "the team that has the tile"),)
        told = (Warps(self.load), Warps(self.attend))
        filled_by: tuple[Party, ...] = (Copies(self.load),)
        if self.geometry.gathers:
            tells = () if self.geometry.brings_scales else (Warps(self.load),)
            filled_by = (LaneCopies(self.load), *tells)
        return EdgeTable(
            (
                EdgeSpec("kv", filled_by, team, self.geometry.stages, self.geometry.stage_bytes),
                EdgeSpec("dealt", (Warps(self.deal),), told, TASK_RING, TASK_WORDS * 4),
            ),
            DEALT_AT,
        )

    def check(self) -> None:
        self.geometry.check()
        total = WARPGROUP * (self.load_registers + TEAMS * self.attend_registers)
        assert total <= self.threads * registers_at_launch(self.threads), self
