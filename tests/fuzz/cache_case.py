"""Calls of mla_write_cache and mla_read_cache: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS, format_of
from tsmla.identity.variant import Dtype, ReadCacheVariant, WriteCacheVariant

from .drawing import schedules
from .manner import Manner, manners
from .places import Schedule
from .plain import Plain

VALUES = ("any bits", "spread", "one outlier", "tiny", "zeros")
TURNS = ("", "neighbours", "halves")
"""Not at all, or in which pairs."""
POSITIONS = 11
"""Positions that a table of cosines and sines has."""


@dataclasses.dataclass(frozen=True, repr=False)
class CacheCase(Plain):
    """Keys that are written and read back, of which `family` is under test. slots: of each token, any integers, those
    that the cache has all different. narrow: they have 32 bits. offset: elements by which these, and other integers,
    lie behind an aligned address. row_gap, page_gap: of caches, in 16 bytes. rounded: scales of rows are powers of two.
    requests: rows of each, told by page tables, when they are read; () for slots. turn: how rope parts are rotated when
    they are written, one of TURNS; by a table of float32, or of the keys' dtype.
    """

    family: str = "write_cache"
    format: str = "bf16"
    dtype: str = "bf16"
    slots: tuple[int, ...] = (0,)
    pages: int = 1
    page: int = 1
    narrow: bool = False
    row_gap: int = 0
    page_gap: int = 0
    as_bytes: bool = False
    scale: float = 1.0
    rounded: bool = True
    values: str = "any bits"
    requests: tuple[int, ...] = ()
    turn: str = ""
    float32_table: bool = False
    pdl: bool = False
    seed: int = 0
    schedule: Schedule = Schedule()
    offset: int = 0
    manner: Manner = Manner()

    def variant(self, arch: str) -> WriteCacheVariant | ReadCacheVariant:
        """The kernel that is under test on this architecture."""
        kind = WriteCacheVariant if self.family == "write_cache" else ReadCacheVariant
        return kind(Arch(arch), Dtype(self.dtype), ROWS[self.format])


@st.composite
def cache_cases(draw: Any, variant: WriteCacheVariant | ReadCacheVariant, hostile: bool = True) -> CacheCase:
    """Any call that the contract allows and this kernel serves."""
    format = format_of(variant.row)
    pages, page = draw(st.integers(1, 12)), draw(st.sampled_from((1, 2, 5, 16, 64)))
    count = pages * page
    narrow = draw(st.booleans())
    own = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=40))
    if hostile:
        low, high = (-(2**31), 2**31 - 1) if narrow else (-(2**63), 2**63 - 1)
        nowhere = st.one_of(st.sampled_from((-1, count, low, high)), st.integers(low, high))
        own += [slot for slot in draw(st.lists(nowhere, max_size=5)) if not 0 <= slot < count]
    requests = draw(st.lists(st.integers(0, 9), max_size=6)) if variant.family == "read_cache" else []
    scale = draw(st.floats(2.0**-126, 2.0**127, width=32)) if format.endswith("e4m3") else 1.0
    return CacheCase(
        variant.family,
        format,
        str(variant.dtype),
        tuple(draw(st.permutations(own))),
        pages,
        page,
        narrow,
        draw(st.sampled_from((0, 0, 1, 3))),
        draw(st.sampled_from((0, 0, 1, 5))),
        draw(st.booleans()),
        scale,
        draw(st.booleans()),
        draw(st.sampled_from(VALUES)),
        tuple(requests),
        draw(st.sampled_from(TURNS)) if variant.row.has("rope") else "",
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**31 - 1)),
        draw(schedules()),
        draw(st.sampled_from((0, 0, 1, 3))),
        draw(manners()),
    )
