"""Sizes of the Hopper decode of few rows. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses

from tsmla.row_format import RowFormat
from tsmla.variant import Dtype

from ...limits import SHARED_BYTES_PER_CTA, WARPGROUP
from ...parts.hopper.storage import BARRIER_BYTES
from ...parts.precision import LIFTED_COLUMNS, NUMERIC, Lifted, PartialRows

FEW_ROWS = 16
"""Query rows of a CTA: those of one warp-level product."""
TILE_KV = 64
"""Keys of a tile."""
BLOCK = 8
"""Keys, or output columns, of a product's second dimension."""
BLOCKS = TILE_KV // BLOCK
STAGES = 4
TEAMS = 2
"""Each takes every other tile."""
TEAM_WARPS = WARPGROUP // 32
"""A warp has the columns of one scale."""
STRIP = 128
"""Columns that share a scale, which are as many bytes."""


@dataclasses.dataclass(frozen=True)
class FewRowsGeometry:
    """Rows lie in shared memory as they are stored, one behind the other."""

    stored: RowFormat

    @property
    def row_bytes(self) -> int:
        return self.stored.bytes

    @property
    def rope_at(self) -> int:
        """In a row, as what follows."""
        return self.stored.offset("rope")

    @property
    def scales_at(self) -> int:
        return self.stored.scales_offset

    @property
    def stage_bytes(self) -> int:
        return TILE_KV * self.row_bytes

    @property
    def partial_rows(self) -> PartialRows:
        """A factor for the columns of each warp."""
        return PartialRows(NUMERIC[Dtype.FP16], lifted=Lifted.NONE)

    @property
    def exchange_at(self) -> int:
        return BARRIER_BYTES + STAGES * self.stage_bytes

    @property
    def exchange_bytes(self) -> int:
        """Of a team: each warp's part of the scores of a tile, in float32."""
        return TEAM_WARPS * FEW_ROWS * TILE_KV * 4

    @property
    def sums_bytes(self) -> int:
        """Of a team: the sums of these."""
        return FEW_ROWS * TILE_KV * 4

    @property
    def ends_at(self) -> int:
        return self.exchange_at + TEAMS * (self.exchange_bytes + self.sums_bytes)

    @property
    def ends_bytes(self) -> int:
        """Of each warp of a team three numbers of each row; for either team."""
        return TEAMS * TEAM_WARPS * FEW_ROWS * 3 * 4

    @property
    def largest_at(self) -> int:
        return self.ends_at + self.ends_bytes

    @property
    def largest_bytes(self) -> int:
        """The largest number of each query row in each warp's columns, for either team."""
        return TEAMS * TEAM_WARPS * FEW_ROWS * 4

    @property
    def shared_bytes(self) -> int:
        return self.largest_at + self.largest_bytes

    def check(self) -> None:
        assert self.stored.value_columns == TEAM_WARPS * STRIP and self.stored.piece("latent").dtype is Dtype.E4M3, self
        assert STRIP == LIFTED_COLUMNS, self
        assert self.stored.piece("rope").bytes == STRIP and self.stored.scales.columns == STRIP, self
        assert self.row_bytes % 128 == 16, f"rows of {self.row_bytes} bytes do not begin four banks apart"
        assert all(at % 16 == 0 for at in (self.rope_at, self.scales_at)) and self.stage_bytes % 128 == 0, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, self
        assert TEAMS * self.exchange_bytes >= TEAM_WARPS * FEW_ROWS * STRIP * 4, self
