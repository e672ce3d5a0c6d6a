"""How the combine spreads rows over warps and CTAs. Pure Python."""

from __future__ import annotations

import dataclasses

from .partial_rows import LIFTED_COLUMNS, PartialRows

WARPS = 8
LANE_WORDS = 32
"""32-bit words that a lane has on their way at a time."""
FEW_PARTIALS = 4
"""With up to this many partials, a warp has a row to itself; with more, warps share the partials and the columns."""
FEW_FOR_CHUNKS = 8
"""With 5 to this many partials, a warp may take one chunk of a row, what it loads of one partial at once, and read that
chunk of all partials together; warps share nothing."""
LSE_EACH = 2
"""LSE that a lane reads together to find the highest of a row whose partials warps share: with two, a warp reads those
of 64 partials at once. One is enough where warps take chunks (`in_chunks`)."""
MANY_PARTIALS = 2**31 - 1
"""No bound: the share of a warp that takes turns with others holds for any number of partials."""
H200_SMS = 132
"""SMs of an H200. The grid counts on this many on Blackwell, too, whose GPUs have more."""
CTAS = 3 * H200_SMS
"""CTAs to spread the rows of all records over."""
CTAS_IN_CHUNKS = 2 * H200_SMS
"""CTAs to spread the rows over where warps may have chunks of rows: a call on half of the SMs leaves room for this many
on the others."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What a warp takes of a row: `chunks` chunks of its columns, `together` partials at a time. The row has no more
    partials than `most`; a lane reads the LSE of `lse_each` of them together to find the highest."""

    chunks: int
    together: int
    most: int
    lse_each: int = 1

    @property
    def in_one_turn(self) -> bool:
        """Whether all partials are on their way at once: lanes then have the LSE of all."""
        return self.most <= self.together


@dataclasses.dataclass(frozen=True)
class CombinePlan:
    """How rows are spread over warps and CTAs.

    kept: the form in which partial rows are kept. columns: of a row. in_chunks: whether a row of up to `FEW_FOR_CHUNKS`
    partials may be divided into chunks, each combined by one warp. crowd: a row's columns are cut into slices, one for
    each CTA, as long as there are no more than so many CTAs an SM."""

    kept: PartialRows
    columns: int
    in_chunks: bool
    crowd: int

    @property
    def vector(self) -> int:
        """Columns of one load: 16 bytes."""
        return 128 // self.kept.dtype.width

    @property
    def chunk(self) -> int:
        """Columns that a warp loads of one partial at once."""
        return 32 * self.vector

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.columns // self.chunk

    @property
    def ctas(self) -> int:
        """CTAs to spread the rows over."""
        return CTAS_IN_CHUNKS if self.in_chunks else CTAS

    @property
    def whole_row(self) -> Share:
        """The share of a warp that has a row to itself."""
        return self._share(self.chunks, FEW_PARTIALS)

    @property
    def one_chunk(self) -> Share:
        """The share of a warp that has a chunk to itself."""
        return self._share(1, FEW_FOR_CHUNKS)

    @property
    def in_turns(self) -> Share:
        """The share of a warp that adds up a chunk of some partials, as others do of the others."""
        return self._share(1, MANY_PARTIALS, 1 if self.in_chunks else LSE_EACH)

    def _share(self, chunks: int, most: int, lse_each: int = 1) -> Share:
        together = LANE_WORDS * 32 // self.kept.dtype.width // (chunks * self.vector)
        assert self.kept.lifted is None or 2 * chunks * together <= 32 == 2 * self.block_lanes, self
        return Share(chunks, together, most, lse_each)

    @property
    def few(self) -> int:
        """Most partials that a row may have so that no warp needs another's sums to combine it."""
        return FEW_FOR_CHUNKS if self.in_chunks else FEW_PARTIALS

    @property
    def block_lanes(self) -> int:
        """Lanes that hold a block of LIFTED_COLUMNS columns. Where rows are lifted, each block has a factor."""
        return LIFTED_COLUMNS // self.vector

    @property
    def alike(self) -> bool:
        """Whether all blocks that one lane holds columns of share a factor."""
        return self.kept.lifted is not None and self.kept.lifted.value[1] == 0
