"""variant -> sizes of the Hopper decode. Pure Python; every budget is asserted here."""

from __future__ import annotations

import dataclasses

from tsmla.identity.arch import Arch
from tsmla.identity.dtype import bytes_of
from tsmla.identity.row_format import SCALE_BYTES, RowFormat, multiplied_row
from tsmla.identity.variant import DecodeVariant, Dtype

from ....decode.partial_rows import LIFTED_COLUMNS, Lifted, PartialRows
from ....limits import SHARED_BYTES_PER_CTA, TILE_ALIGNMENT, WARPGROUP
from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.keys.source import BOX_KEYS
from ....parts.precision import NUMERIC, Probabilities
from ....parts.query import QueryTileLayout

TILE_KV = 64
"""Keys of a tile."""
GROUP_ROWS = 8
"""Rows of a swizzle pattern."""
PATTERN_COLUMNS = 64
"""Columns of a swizzle pattern: 128 bytes of 16-bit elements, 64 of 8-bit ones (576 is no multiple of 128)."""
FOLDED_WORDS = 3
"""Numbers that a key's scale is folded to (`parts/keys/scales.Folded`)."""
REFERENCES_AT, ANCHORS_AT, THERE_AT = 576, 832, 848
"""Bytes, behind the barriers, where the references of the rows lie, the anchors of tasks (`parts/keys/scales`), and
which keys of each stage are there, where keys are gathered."""
STAGED_HALF = 512
"""Bytes that a warp stages of eight rows of the result: 16 a lane."""
STAGED_HALF_STRIDE = WARPGROUP // 32 * STAGED_HALF
LOAD_WARPS = (0, 3)
"""Warps that load, each every other latent strip: strips become free by twos, and a warp takes 350 clk for each."""
PAIR = 2
"""CTAs that convert for each other, where row tiles of a request come by twos."""
CONVERTERS = len(LOAD_WARPS)
"""Warpgroups that convert, where rows are converted: each the strips of one loading warp."""
OUTPUTS = 2
"""Accumulators of one warpgroup's half of the output."""
TURNED_OUTPUTS = 4
"""Accumulators of one warpgroup's half of the output where value products are turned, each of TURNED_DIMS dims."""
TURNED_DIMS = 64
WARP_DIMS = 16
"""Dims of an accumulator that a warp has."""
WEIGHT_STAGES = 4
"""Tiles of probabilities that lie in shared memory where value products are turned."""
STAGED_ROWS = 8
"""Rows of the result that a warp stages at a time where value products are turned: a lane has two columns of eight."""


@dataclasses.dataclass(frozen=True)
class DecodeGeometry:
    """Sizes of the sm_90a decode: a CTA holds 64 query rows, output columns split over two warpgroups.

    A cache row is loaded in *strips*: the latent piece in equal ones, and the rope piece, if there is one, which comes
    with the last of these. Scores start with the first strip that is there. In 16-bit caches, a strip is free again as
    soon as the warpgroup that holds its output has multiplied it.

    In 8-bit caches, value products are turned (`turns`): dims x keys times keys x rows, in float16, with values as the
    operand in registers; a strip is free again when it has been scored and the warpgroup that has its dims has loaded
    it. (Products of 8 bits would be added in 13 bits, too few for all keys of a segment.)

    Rows with one scale for each key lie apart: an 8-bit latent piece, a rope piece of 16 bits, and scales. The warp
    that cleans brings what scores and sums need of each key's scale, in a ring of its own.

    Rows with scales of parts of them are `stored` in 8 bits and multiplied as rows of the query's dtype (`row`). Warps
    convert them in the place where copies have put them: the 8-bit columns of a strip fill the second half of what
    these take as 16-bit ones, and the scales of the keys lie in the first half of the first strip of each warpgroup
    that converts. A rope piece is copied to where it is multiplied.

    A pair of CTAs (`ctas`) has two row tiles that need the same keys: each converts half of the keys of a tile, which
    come through registers, and copies the result to the other. Rope pieces are loaded by either.

    Where keys are gathered one by one (`gathers`), the warp that cleans hands every strip over, and tells which keys of
    the tile are there."""

    tile_q: int
    tile_kv: int
    stages: int
    scale_stages: int
    row: RowFormat
    stored: RowFormat
    ctas: int = 1
    gathers: bool = False

    @classmethod
    def of(cls, variant: DecodeVariant, ctas: int = 1) -> DecodeGeometry:
        assert variant.arch is Arch.SM90A, variant
        row = multiplied_row(variant.row, variant.dtype)
        stages, scale_stages = (3, 4) if row.apart else ({16: 2, 8: 4}[row.piece("latent").dtype.bits], 0)
        geometry = cls(64, TILE_KV, stages, scale_stages, row, variant.row, ctas, variant.gathers)
        geometry.check()
        return geometry

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the latent pieces of query and cache rows."""
        return bytes_of(self.row.piece("latent").dtype.bits)

    @property
    def scaled(self) -> bool:
        """Whether rows as they are multiplied have scales."""
        return self.scale_stages > 0

    @property
    def converts(self) -> bool:
        """Whether rows are converted: multiplied as another format than `stored`."""
        return self.stored != self.row

    @property
    def turns(self) -> bool:
        """Whether value products are turned: values, widened to float16, are the operand in registers."""
        return self.element_bytes == 1

    @property
    def probabilities(self) -> Probabilities:
        """How probabilities enter the value product."""
        return Probabilities.of(self.row.piece("latent").dtype, self.turns)

    @property
    def helpers_gather(self) -> bool:
        """Whether a helping warpgroup gathers rows; where helpers score or convert, loading warps do."""
        return self.gathers and not (self.turns or self.converts)

    @property
    def d_qk(self) -> int:
        return self.row.columns

    @property
    def d_half(self) -> int:
        """Output columns of one warpgroup."""
        return self.row.value_columns // 2

    @property
    def value_columns(self) -> int:
        """Columns of one accumulator of the output."""
        return self.d_half // OUTPUTS

    @property
    def d_strip(self) -> int:
        """Columns of a latent strip: what is free together."""
        return self.d_half if self.turns else self.value_columns

    @property
    def latent_strips(self) -> int:
        return self.row.value_columns // self.d_strip

    def places(self, mine: int) -> tuple[int, ...]:
        """Output column blocks of warpgroup `mine`, `value_columns` each: every other one, so that strips are freed in
        the order in which they come."""
        return tuple(mine + 2 * i for i in range(OUTPUTS))

    def loaded_strips(self, loader: int) -> tuple[int, ...]:
        """Strips whose edges a loading warp fills: every other one. The rope columns come with the last of all; in a
        pair, they are all that is loaded."""
        strips = range(loader, self.latent_strips, len(LOAD_WARPS))
        return tuple(strip for strip in strips if self.copied_with(strip))

    @property
    def strips(self) -> tuple[int, ...]:
        """Cache columns of the strips that are loaded."""
        return (self.d_strip,) * self.latent_strips + tuple(piece.columns for piece in self.row.pieces[1:])

    @property
    def first_columns(self) -> tuple[int, ...]:
        """First column of each strip in a row."""
        return tuple(sum(self.strips[:i]) for i in range(len(self.strips)))

    @property
    def query_tile(self) -> QueryTileLayout:
        return QueryTileLayout(self.row, self.tile_q, PATTERN_COLUMNS * self.element_bytes)

    @property
    def q_bytes(self) -> int:
        return self.query_tile.bytes

    @property
    def strip_bytes(self) -> tuple[int, ...]:
        """Bytes of one stage of each strip."""
        return tuple(
            bytes_of(dtype.bits, self.tile_kv * columns)
            for columns, dtype in zip(self.strips, self.strip_dtypes, strict=True)
        )

    @property
    def strip_dtypes(self) -> tuple[Dtype, ...]:
        latent, *others = (piece.dtype for piece in self.row.pieces)
        return (*[latent] * self.latent_strips, *others)

    @property
    def behind_latent(self) -> tuple[int, ...]:
        """Numbers of the strips behind the latent ones: the rope piece's, if there is one."""
        return tuple(range(self.latent_strips, len(self.strips)))

    @property
    def ready_bytes(self) -> tuple[int, ...]:
        """Bytes of the strips that are multiplied together: the last latent strip has the rope columns with it."""
        last = self.latent_strips - 1
        return (*self.strip_bytes[:last], sum(self.strip_bytes[last:]))

    @property
    def edge_bytes(self) -> tuple[int, ...]:
        """Bytes that are awaited together, for each edge: `ready_bytes`; where rows are converted in place, what is
        copied of these, and with the first strip of each converting warpgroup the scales, too."""
        if not self.converts or self.ctas > 1:
            return self.ready_bytes
        sizes = [self.tile_kv * self.d_strip] * self.latent_strips
        for converter in range(CONVERTERS):
            sizes[self.converted_strip(converter, 0)] += self.tile_kv * self.scales_bytes
        sizes[-1] += self.strip_bytes[-1]
        return tuple(sizes)

    @property
    def converted_strips(self) -> int:
        """Strips of a tile that each converting warpgroup converts."""
        return self.latent_strips // CONVERTERS

    def converted_strip(self, converter, place):
        """Latent strip that a converting warpgroup converts after `place` others of a tile: those of a loading warp, in
        its order. Both arguments may be known only when the kernel runs."""
        return converter + place * CONVERTERS

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales that are stored in a row."""
        return self.stored.scales_per_row * SCALE_BYTES

    @property
    def own_keys(self) -> int:
        """Keys of a tile that a CTA converts: all, or in a pair its half."""
        return self.tile_kv // self.ctas

    @property
    def stored_at(self) -> int:
        """Offset of a strip's stored keys from the place where the strip is multiplied; their scales lie at the start
        of that place."""
        return self.tile_kv * self.d_strip * (self.element_bytes - 1)

    def copied_with(self, strip: int) -> tuple[int, ...]:
        """Numbers of the boxes that come with a latent strip: its own; the rope columns', behind all latent ones, with
        the last; and those of scales in rows, behind that one, with the first strip of each converting warpgroup. In a
        pair, only rope columns are copied, or nothing where keys are gathered."""
        rope = self.behind_latent if strip + 1 == self.latent_strips else ()
        if self.ctas > 1:
            return () if self.gathers else rope
        scales = (self.latent_strips + 1 + strip,) if strip < CONVERTERS and self.converts else ()
        return (strip, *rope, *scales)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of all that the attending warpgroups exchange: `exchanged_bytes`; row sums of both, for two segments;
        the first and the last key that a row sees, for either."""
        return self.exchanged_bytes + self.tile_q * (4 * 4 + 4 * 4) + self.told_bytes

    @property
    def told_bytes(self) -> int:
        """Bytes of what warpgroups tell each other of rows where value products are turned: by how much outputs are
        rescaled before each tile that has probabilities, and whether they are; what ends rows, for two segments."""
        return WEIGHT_STAGES * (self.tile_q + WARPGROUP // 32) * 4 + 2 * self.tile_q * 4 if self.turns else 0

    @property
    def partial_rows(self) -> PartialRows:
        """The form in which partial rows are kept: in 16 bits where these hold what is kept; lifted where values may be
        of any magnitude. float16 values are kept in float32: their outputs would be rounded twice to the same bits."""
        if self.turns:
            kept = PartialRows.of(self.row.piece("latent").dtype)
            return dataclasses.replace(kept, lifted=Lifted.WHOLE_ROW) if self.scaled else kept
        if self.row.piece("latent").dtype is Dtype.FP16:
            return PartialRows()
        return PartialRows(NUMERIC[Dtype.FP16], in_quads=True, lifted=Lifted.EVEN_AND_ODD)

    @property
    def probabilities_bytes(self) -> int:
        """Bytes of one tile's probabilities."""
        return self.tile_q * self.tile_kv * bytes_of(self.probabilities.dtype.bits)

    @property
    def staged_bytes(self) -> int:
        """Bytes of rows that all warps stage at a time where value products are turned."""
        return 2 * (WARPGROUP // 32) * STAGED_ROWS * TURNED_DIMS * 2

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of one tile's probabilities, in register order: STAGED_HALF_STRIDE bytes hold 16 of every thread, and
        lie in the order of threads. At the end of a segment the warps stage results there, in the places of their own
        threads and of their counterparts' (`exchanging/finish.py`)."""
        if self.turns:
            return WEIGHT_STAGES * self.probabilities_bytes + self.staged_bytes
        return max(self.probabilities_bytes, 4 * STAGED_HALF_STRIDE)

    @property
    def folded_bytes(self) -> int:
        """Bytes of what a tile's keys' scales are folded to."""
        return self.tile_kv * FOLDED_WORDS * 4

    @property
    def shared_bytes(self) -> int:
        tiles = self.q_bytes + self.stages * sum(self.strip_bytes)
        return BARRIER_BYTES + tiles + self.exchange_bytes + self.scale_stages * self.folded_bytes

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers an attending thread holds: output, scores, own and received probabilities. Where rows are
        converted, it has received ones only when it has no own ones (`attend`)."""
        if self.turns:  # outputs and operands of values
            return self.d_half // 2 + self.tile_kv // 2
        probabilities = 1 if self.converts else 2
        floats = self.tile_q * (self.d_half + self.tile_kv)
        return (4 * floats + probabilities * self.probabilities_bytes) // (4 * WARPGROUP)

    def check(self) -> None:
        lifted = self.partial_rows.lifted
        if lifted and not self.turns:  # a warpgroup has what is lifted together
            assert self.value_columns == LIFTED_COLUMNS, self
            for mine in range(2):
                assert {lifted.of(place) for place in self.places(mine)} == {mine}, self
        assert [piece.name for piece in self.row.pieces] in (["latent"], ["latent", "rope"]), self
        scales = self.row.scales
        if self.converts:
            pieces = [(piece.name, piece.columns) for piece in self.stored.pieces]
            assert pieces == [(piece.name, piece.columns) for piece in self.row.pieces] and self.element_bytes > 1, self
            assert self.stored.piece("latent").dtype is Dtype.E4M3, self
            assert self.stored.piece("rope").dtype is self.row.piece("rope").dtype, self
            assert self.stored.scales and self.stored.scales.columns == self.d_strip == 128, self
            assert self.tile_kv * self.scales_bytes <= self.stored_at, self
        if self.ctas > 1:
            assert self.ctas == PAIR and self.converts and self.own_keys % BOX_KEYS == 0, self
            assert self.latent_strips % 2 == 0, self
        if self.scaled:
            assert scales and scales.whole_row and not scales.in_row and self.element_bytes == 1, self
        else:
            assert scales is None and self.row.dtype.bits == 8 * self.element_bytes, self
        for first, columns in zip(self.first_columns, self.strips, strict=True):
            assert columns % PATTERN_COLUMNS == 0 and first % columns == 0, f"{columns} columns from {first} on: {self}"
        assert sum(self.strips) == self.d_qk and 2 * self.d_half == self.row.value_columns, self
        assert self.tile_q == 64 and self.tile_kv % BOX_KEYS == 0, self
        for size in (self.q_bytes, *self.strip_bytes):
            assert size % TILE_ALIGNMENT == 0, self
        assert self.shared_bytes <= SHARED_BYTES_PER_CTA, f"{self.shared_bytes} bytes of shared memory: {self}"
