"""DecodeVariant -> sizes of the Blackwell decode. Pure Python; every budget is asserted here.

Two kernels serve a variant. Requests of more than 64 query rows: a *pair* of CTAs works on 128 rows, 64 in each, and
the pair's MMA takes its B operand in halves, so each CTA holds 64 of a tile's 128 keys for the scores and, loaded once
more, 256 of the 512 latent dims for the values. Requests of up to 64 rows: CTAs work *solo*, and what was loaded as
keys is also the values. An SM holds only two tiles of 16-bit keys beside a query: where bulk copies bring them, a pair
of CTAs works even on few rows; where they are gathered, most of the query is in tensor memory, and three tiles fit."""

from __future__ import annotations

import dataclasses

from tsmla.identity.arch import Deal
from tsmla.identity.dtype import Dtype, bytes_of
from tsmla.identity.plan import DEALS, FEW_ROWS_DEALS, FEW_WIDE_ROWS_DEALS, wide_rows
from tsmla.identity.row_format import RowFormat, multiplied_row
from tsmla.identity.variant import DecodeVariant

from ...decode.partial_rows import PartialRows
from ...limits import SHARED_BYTES_PER_CTA, SWIZZLE_BYTES, TILE_ALIGNMENT, TMEM_COLUMNS
from ...parts.keys.source import BOX_KEYS, LANE_BOXES
from ...parts.query import QueryTileLayout

ATOM = TILE_ALIGNMENT
"""Bytes of one swizzle pattern: operands are kept in chunks of SWIZZLE_BYTES by 8 rows."""
CTA_ROWS = 64
"""Query rows of a CTA."""
S_SLOTS = 2
"""Tiles whose scores are in tensor memory, where all of it that is left is theirs."""
HELD_CHUNKS = 7
"""Chunks of a 16-bit query row that tensor memory has room for beside the output and one tile's scores."""
CONTROL_BYTES = 3 * 1024
"""Barriers and the rows' exchange, ahead of the first 1024-byte aligned tile."""
TENSOR_ADDRESS_OFFSET = 512
EXCHANGE_OFFSET = 1024
ROW_THREADS = 2
"""Softmax threads that share a query row, each with half of the keys and of the output's dims."""
LARGE_KEYS = 64
"""Keys that one copy of a pair brings where pages have as many."""
CONVERT_WARPS = 8
"""Warps of the role that converts rows, where products read other rows than the cache holds."""
THERE_OFFSET = 2 * 1024
THERE_SLOTS = 4
"""Tiles for which it is told which keys are there, where keys are gathered."""
SCALE_SLOTS = 4
"""Tiles whose keys' scales are in shared memory, where keys have scales."""
SCALE_WORDS = 3
"""Numbers that a key's scale is folded to (`parts/keys/scales.Folded`)."""
assert EXCHANGE_OFFSET + 2 * CTA_ROWS * ROW_THREADS * 4 <= THERE_OFFSET < CONTROL_BYTES


@dataclasses.dataclass(frozen=True)
class DecodeGeometry:
    """Sizes of one CTA. Query and cache rows are cut into chunks of 128 bytes, the most that a swizzled row holds; the
    latent piece is whole chunks. `tail` is the rest of a row behind its last chunk of the latent dtype: half a chunk in
    an 8-bit row, nothing in a 16-bit one or without a rope piece, the rope piece where it has another dtype.

    K slots of a pair hold the 64 of a tile's keys that this CTA brings; a third of the dims at a time in 16-bit rows (a
    quarter without a rope piece), so that the next tile's first third can follow. Solo, they hold whole rows of a tile
    of 64 keys: all of the tile in 8 bits, half in 16, whose place is free while the other half is still multiplied.

    q_held: chunks of a query row, the first ones, that are in tensor memory and not in shared memory (`query.py`). A
    16-bit rope piece is then a tail, too, whose only slot is free when scores have read it.

    `row` is what products read, and `stored` what the cache has: DeepSeek's rows become bf16 on their way to shared
    memory (`convert.py`), for all others both are equal. gathers: keys are gathered one by one (`gather.py`)."""

    row: RowFormat
    stored: RowFormat
    deal: Deal
    k_slots: int
    k_slots_per_tile: int
    v_slots: int
    gathers: bool
    q_held: int = 0

    @classmethod
    def few(cls, variant: DecodeVariant) -> DecodeGeometry:
        """Sizes for requests of up to 64 rows."""
        wide = wide_rows(variant.row, variant.gathers)
        return cls.pair(variant, FEW_WIDE_ROWS_DEALS[variant.arch]) if wide else cls.solo(variant)

    @classmethod
    def pair(cls, variant: DecodeVariant, deal: Deal | None = None) -> DecodeGeometry:
        """Sizes of a CTA of a pair, with the deal of requests of more than 64 rows unless another is given. A third
        slot of 8-bit keys with a 16-bit rope piece does not fit."""
        row = multiplied_row(variant.row, variant.dtype)
        k_slots, per_tile = 3 if _is_uniform(row) else 2, 1
        if _element_bytes(row) == 2:
            k_slots = per_tile = 3 if row.has("rope") else 4
        v_slots = 4 // _element_bytes(row)
        return cls(row, variant.row, deal or DEALS[variant.arch], k_slots, per_tile, v_slots, variant.gathers)

    @classmethod
    def solo(cls, variant: DecodeVariant) -> DecodeGeometry:
        """Sizes of a single CTA. Five tiles of 8-bit keys without a 16-bit rope piece fit, so that a load need not wait
        for a tile whose output is rescaled; of 16-bit keys that are gathered as they are, three."""
        row = multiplied_row(variant.row, variant.dtype)
        size, deal = _element_bytes(row), FEW_ROWS_DEALS[variant.arch]
        if size == 2 and variant.gathers and row == variant.row:
            return cls(row, row, deal, k_slots=3, k_slots_per_tile=1, v_slots=0, gathers=True, q_held=HELD_CHUNKS)
        k_slots = 5 if size == 1 and _is_uniform(row) else 4
        return cls(row, variant.row, deal, k_slots, k_slots_per_tile=size, v_slots=0, gathers=variant.gathers)

    def __post_init__(self) -> None:
        assert [piece.name for piece in self.row.pieces] in (["latent"], ["latent", "rope"]), self
        assert _is_uniform(self.row) == (self.row.scales is None), self
        assert self.row.scales is None or (self.row.scales.whole_row and not self.row.scales.in_row), self
        if self.converts:
            latent, rope = self.stored.pieces
            assert latent.dtype is Dtype.E4M3 and latent.columns == self.row.value_columns and self.tail == 0, self
            assert rope == self.row.piece("rope") and rope.columns == self.chunk and self.element_bytes == 2, self
            assert self.stored.scales and self.stored.scales.columns % self.chunk == 0, self
        assert self.row.value_columns % self.chunk == 0 and self.row_chunks * self.chunk >= self.row.value_columns, self
        assert self.tail_bytes in (0, SWIZZLE_BYTES // 2, SWIZZLE_BYTES), self
        assert self.deal.row_tile == self.ctas * CTA_ROWS, self
        assert self.row_chunks % self.k_cuts == 0 and (self.k_cuts == 1 or self.tail == 0), self
        assert self.k_slots % self.k_slots_per_tile == 0 and self.k_keys % BOX_KEYS == 0, self
        if self.is_pair:
            assert self.v_slots % self.v_slots_per_tile == 0 and self.v_keys % BOX_KEYS == 0, self
            assert self.k_keys == self.v_keys == LARGE_KEYS, self
        for size in (self.q_bytes, self.k_wide_bytes, self.k_tail_bytes, self.v_bytes, self.p_bytes, CONTROL_BYTES):
            assert size % ATOM == 0, self
        assert LANE_BOXES * BOX_KEYS % self.tile_kv == 0, self
        assert self.q_column + self.q_held_columns <= TMEM_COLUMNS, self
        assert self.q_held == 0 or (self.gathers and not self.converts and not self.is_pair), self
        assert self.k_slots_per_tile == 1 or not self.rope_apart, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"

    @property
    def converts(self) -> bool:
        """Whether rows are converted between the cache and shared memory."""
        return self.stored != self.row

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the latent pieces of query and cache rows, and of probabilities."""
        return _element_bytes(self.row)

    @property
    def tile_kv(self) -> int:
        return self.deal.tile_kv

    @property
    def ctas(self) -> int:
        """CTAs that work on a row tile together."""
        return self.deal.sms

    @property
    def is_pair(self) -> bool:
        return self.ctas == 2

    @property
    def chunk(self) -> int:
        """Elements of one chunk."""
        return SWIZZLE_BYTES // self.element_bytes

    @property
    def row_chunks(self) -> int:
        """Whole chunks of the latent dtype; only those of latent pieces where rope pieces have slots of their own."""
        together = _is_uniform(self.row) and self.q_held == 0
        return (self.row.columns if together else self.row.value_columns) // self.chunk

    @property
    def tail(self) -> int:
        """Elements of a row behind its whole chunks."""
        return self.row.columns - self.row_chunks * self.chunk

    @property
    def tail_bytes(self) -> int:
        return bytes_of(self.row.pieces[-1].dtype.bits, self.tail)

    @property
    def rope_apart(self) -> bool:
        """Whether rope pieces of keys have a slot of their own, which is free once scores have read it."""
        return self.q_held > 0 and self.tail > 0

    @property
    def q_held_columns(self) -> int:
        """Tensor-memory columns of the query: each row once on lanes 0-63 and once on lanes 64-127."""
        return self.q_held * SWIZZLE_BYTES // 4

    @property
    def q_wide_bytes(self) -> int:
        return CTA_ROWS * (self.row_chunks - self.q_held) * SWIZZLE_BYTES

    @property
    def query_tile(self) -> QueryTileLayout:
        """The query in shared memory: what tensor memory does not hold."""
        return QueryTileLayout(self.row, CTA_ROWS, SWIZZLE_BYTES, self.q_held)

    @property
    def q_bytes(self) -> int:
        return self.q_wide_bytes + CTA_ROWS * self.tail_bytes

    @property
    def partial_rows(self) -> PartialRows:
        """The form in which partial rows are kept: float32 where values have scales, as they may then be of any
        magnitude, which float16 does not hold."""
        return PartialRows() if self.row.scales else PartialRows.of(self.row.dtype)

    @property
    def k_cuts(self) -> int:
        """Slots that a key's dims are cut into."""
        return self.k_slots_per_tile if self.is_pair else 1

    @property
    def k_keys(self) -> int:
        """Keys of one K slot."""
        return self.tile_kv // 2 if self.is_pair else self.tile_kv // self.k_slots_per_tile

    @property
    def k_chunks(self) -> int:
        """Chunks of one K slot."""
        return self.row_chunks // self.k_cuts

    @property
    def k_wide_bytes(self) -> int:
        """Bytes of one K slot without its tail part; tail parts lie behind all of these."""
        return self.k_keys * self.k_chunks * SWIZZLE_BYTES

    @property
    def k_tail_bytes(self) -> int:
        return self.k_keys * self.tail_bytes

    @property
    def k_bytes(self) -> int:
        return self.k_wide_bytes + self.k_tail_bytes

    @property
    def tail_slots(self) -> int:
        return 1 if self.rope_apart else self.k_slots

    @property
    def v_dims(self) -> int:
        """Latent columns of one V slot."""
        return self.row.value_columns // 2

    @property
    def v_chunks(self) -> int:
        return self.v_dims // self.chunk

    @property
    def v_slots_per_tile(self) -> int:
        """V slots of a tile: two, so that the first half of a tile's values is free, for the next but one's, while the
        other is multiplied."""
        return 2

    @property
    def v_keys(self) -> int:
        """Keys of one V slot."""
        return self.tile_kv // self.v_slots_per_tile

    @property
    def v_bytes(self) -> int:
        """Bytes of one V slot."""
        return self.v_keys * self.v_chunks * SWIZZLE_BYTES

    @property
    def p_slots(self) -> int:
        return 2 // self.element_bytes

    @property
    def p_row_bytes(self) -> int:
        """Bytes of one swizzled row of P: the tile's keys, or a chunk of them."""
        return min(SWIZZLE_BYTES, self.tile_kv * self.element_bytes)

    @property
    def p_bytes(self) -> int:
        """Bytes of one P slot: chunks of (64 rows, p_row_bytes)."""
        return CTA_ROWS * self.tile_kv * self.element_bytes

    @property
    def q_offset(self) -> int:
        return CONTROL_BYTES

    @property
    def k_offset(self) -> int:
        return self.q_offset + self.q_bytes

    @property
    def k_tail_offset(self) -> int:
        return self.k_offset + self.k_slots * self.k_wide_bytes

    @property
    def v_offset(self) -> int:
        return self.k_tail_offset + self.tail_slots * self.k_tail_bytes

    @property
    def p_offset(self) -> int:
        return self.v_offset + self.v_slots * self.v_bytes

    @property
    def there_bytes(self) -> int:
        """Bytes of one tile's bits, which say of its keys whether they are there."""
        return self.tile_kv // 8

    @property
    def scale_slots(self) -> int:
        """Tiles whose keys' scales are in shared memory."""
        return SCALE_SLOTS if self.row.scales else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of one tile's folded scales: SCALE_WORDS vectors, each over the tile's keys in their order."""
        return 4 * SCALE_WORDS * self.tile_kv

    @property
    def lane_keys(self) -> int:
        """Keys of a tile whose scales one lane of a warp brings."""
        return self.tile_kv // 32

    @property
    def scale_offset(self) -> int:
        return self.p_offset + self.p_slots * self.p_bytes

    @property
    def shared_bytes(self) -> int:
        return self.scale_offset + self.scale_slots * self.scale_bytes

    @property
    def s_columns(self) -> int:
        """Tensor-memory columns of one tile's scores: half of its keys on lanes 0-63, the others on lanes 64-127."""
        return self.tile_kv // 2

    @property
    def o_columns(self) -> int:
        """Columns of the output, half of the dims on lanes 0-63 and half on 64-127."""
        return self.row.value_columns // 2

    @property
    def lane_dims(self) -> int:
        """Dims from column 0 of lanes 0-63 to column 0 of lanes 64-127."""
        return self.row.value_columns // (2 if self.is_pair else 4)

    @property
    def block_dims(self) -> int:
        """Dims from column 0 to column 128: the two products that a tile's values take."""
        return self.row.value_columns // (4 if self.is_pair else 2)

    @property
    def s_column(self) -> int:
        """First column of the scores."""
        return self.o_columns

    @property
    def s_slots(self) -> int:
        """Tiles whose scores are in tensor memory."""
        return 1 if self.q_held else S_SLOTS

    @property
    def q_column(self) -> int:
        """First column of the query."""
        return self.s_column + self.s_slots * self.s_columns


def _element_bytes(row: RowFormat) -> int:
    return bytes_of(row.pieces[0].dtype.bits)


def _is_uniform(row: RowFormat) -> bool:
    """Whether all pieces have one dtype."""
    return len({piece.dtype for piece in row.pieces}) == 1
