"""Sizes of the Hopper decode of few rows. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses

from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of
from tsmla.identity.row_format import SCALE_BYTES, RowFormat
from tsmla.identity.variant import Dtype

from ....decode.partial_rows import LIFTED_COLUMNS, Lifted, PartialRows
from ....limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, VECTOR_BYTES, WARPGROUP
from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.precision import NUMERIC
from ....parts.warp import QUAD

FEW_ROWS = 16
"""Query rows of a CTA: those of one warp-level product."""
BLOCK = 8
"""Keys, or output columns, of a product's second dimension."""
TILE_KV = 64
"""Keys of a tile of the plan."""
STEP = 16
"""Numbers that a product adds up: columns of a row, or keys."""
TEAMS = 2
"""Teams of warps, each of which takes every other tile."""
TEAM_WARPS = WARPGROUP // 32
"""Warps of a team, each with the columns of one scale."""
THERE_AT = 576
"""Byte, behind the barriers, where it is told which keys of each stage are there, where rows are gathered."""
STRIP = 128
"""Columns that a warp has of a row; where rows have scales for parts, those that share one. Bytes of a line."""


@dataclasses.dataclass(frozen=True)
class FewRowsGeometry:
    """Sizes of the Hopper decode of few rows. Rows lie in shared memory as they are stored, one behind the other. Where
    pieces lie `apart`, each is lines of 128 bytes that bulk copies swizzle, those of 8 keys one behind the other: all
    strips of 8 keys of the latent piece before those of the next 8; behind all of them, the rope piece. Scales then
    come to shared memory only where keys are gathered, to a place of their own.

    Rows without scales are bf16. They are gathered, and 32 of them are a tile: half of a tile of the plan."""

    stored: RowFormat
    gathers: bool = False

    @property
    def plain(self) -> bool:
        """Whether rows are multiplied as they are: bf16, and no scales."""
        return self.stored.scales is None

    @property
    def tile_kv(self) -> int:
        """Keys of a tile."""
        return TILE_KV // self.halves

    @property
    def halves(self) -> int:
        """Tiles that a tile of the plan has."""
        return 2 if self.plain else 1

    @property
    def blocks(self) -> int:
        return self.tile_kv // BLOCK

    @property
    def own_blocks(self) -> int:
        """Blocks of scores that a warp adds up."""
        return self.blocks // TEAM_WARPS

    @property
    def key_steps(self) -> int:
        """Steps of a tile's products with values."""
        return self.tile_kv // STEP

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes that a lane has of a row of a strip: a quad has the strip."""
        return STRIP * self.number_bytes // (QUAD * VECTOR_BYTES)

    @property
    def vector_columns(self) -> int:
        return VECTOR_BYTES // self.number_bytes

    @property
    def vector_steps(self) -> int:
        """Products' steps that a quad's vectors are columns of."""
        return QUAD * self.vector_columns // STEP

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the latent piece."""
        return bytes_of(self.stored.piece("latent").dtype.bits)

    @property
    def product(self) -> type[Numeric]:
        """The dtype that numbers of the latent piece and probabilities are multiplied as."""
        return NUMERIC[Dtype.BF16 if self.plain else Dtype.FP16]

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next in shared memory, where rows lie one behind the other: they begin four banks
        apart."""
        return self.stored.bytes + (VECTOR_BYTES if self.plain else 0)

    @property
    def apart(self) -> bool:
        return self.stored.apart

    @property
    def rope_at(self) -> int:
        """Offset of the rope piece in a row; in a stage, where pieces lie apart."""
        return self.stored.offset("rope") * (self.tile_kv if self.apart else 1)

    @property
    def scales_at(self) -> int | None:
        """Offset of the scales in a row, if they lie there."""
        return self.stored.scales_offset

    @property
    def stages(self) -> int:
        return 5 if self.plain else 4

    @property
    def stage_bytes(self) -> int:
        return self.tile_kv * self.row_bytes

    def key_of(self, column: int, quad_lane):
        """The key, counted from its block's first, that is the first (0) or second (1) column of lane `quad_lane` of
        a quad (`tile.py` says why)."""
        if column == 0:
            return 2 * quad_lane
        return (2 * quad_lane + 5) & (BLOCK - 1) if self.apart else 8 + (2 * quad_lane + 4) % 8

    def first_of(self, block: int) -> int:
        """The key that those of a block are counted from."""
        return BLOCK * block if self.apart else block // 2 * 16 + block % 2

    def latent_of(self, block: int) -> int:
        """Bytes from a stage's first latent piece to that of a block's first key."""
        return self.first_of(block) * (self.stored.piece("latent").bytes if self.apart else self.row_bytes)

    def rope_of(self, block: int) -> int:
        """Bytes from a stage's first rope piece to that of a block's first key."""
        return self.first_of(block) * (self.stored.piece("rope").bytes if self.apart else self.row_bytes)

    @property
    def partial_rows(self) -> PartialRows:
        """The form in which partial rows are kept: float16, a factor for the columns of each warp."""
        return PartialRows(NUMERIC[Dtype.FP16], lifted=Lifted.NONE)

    @property
    def exchange_at(self) -> int:
        return BARRIER_BYTES + self.stages * self.stage_bytes

    @property
    def exchange_bytes(self) -> int:
        """Bytes of a team's partial scores: each warp's, of a tile, in float32. At a task's end, both teams' are what
        one gives the other."""
        return max(TEAM_WARPS * FEW_ROWS * self.tile_kv * 4, TEAM_WARPS * FEW_ROWS * STRIP * 4 // TEAMS)

    @property
    def sums_bytes(self) -> int:
        """Bytes of a team's scores, added over its warps."""
        return FEW_ROWS * self.tile_kv * 4

    @property
    def ends_at(self) -> int:
        return self.exchange_at + TEAMS * (self.exchange_bytes + self.sums_bytes)

    @property
    def ends_bytes(self) -> int:
        """Bytes of the three numbers (`ENDS`) that each warp of either team tells of each row."""
        return TEAMS * TEAM_WARPS * FEW_ROWS * 3 * 4

    @property
    def largest_at(self) -> int:
        return self.ends_at + self.ends_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest number of each query row in each warp's columns, for either team, where the query
        becomes float16."""
        return 0 if self.apart or self.plain else TEAMS * TEAM_WARPS * FEW_ROWS * 4

    @property
    def brings_scales(self) -> bool:
        """Whether scales that lie apart come to shared memory: found by the slots of keys, as their rows are."""
        return self.apart and self.gathers

    @property
    def key_scales_at(self) -> int:
        return self.largest_at + self.largest_bytes

    @property
    def key_scales_bytes(self) -> int:
        """Bytes of the scales of each stage's keys, in all."""
        return self.stages * self.tile_kv * SCALE_BYTES if self.brings_scales else 0

    @property
    def shared_bytes(self) -> int:
        return self.key_scales_at + self.key_scales_bytes

    def check(self) -> None:
        assert self.stored.value_columns == TEAM_WARPS * STRIP, self
        assert STRIP == LIFTED_COLUMNS, self
        assert not self.stored.has("rope") or self.stored.piece("rope").bytes == STRIP, self
        scales = self.stored.scales
        if scales is None:
            assert self.gathers and self.row_bytes % 128 == VECTOR_BYTES, self
            assert all(piece.dtype is Dtype.BF16 for piece in self.stored.pieces), self
        elif self.apart:
            assert self.stored.piece("latent").dtype is Dtype.E4M3 and scales.whole_row, self
            assert all(size % TILE_ALIGNMENT == 0 for size in (BARRIER_BYTES, self.rope_at, self.stage_bytes)), self
        else:
            assert self.stored.piece("latent").dtype is Dtype.E4M3, self
            assert scales.columns == STRIP and self.scales_at is not None, self
            assert self.row_bytes % 128 == 16, f"rows of {self.row_bytes} bytes do not begin four banks apart"
            assert all(at % 16 == 0 for at in (self.rope_at, self.scales_at)) and self.stage_bytes % 128 == 0, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, self
