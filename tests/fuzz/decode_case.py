"""Calls of tsmla_decode: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS, RowFormat, latent_row, uniform_row
from tsmla.identity.support import DECODE_OUT_DTYPES, LATENT_DIM, ROPE_DIM
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.operators.decode import PAGE_SIZES, SMALL_PAGE_SIZES
from tsmla.problems.pages import NO_PAGE

from .drawing import EXTREME_VALUES, FEWEST, INT32, SIZES, heads_sinks, magnitude_for, scales, schedules
from .manner import Manner, manners
from .places import Schedule
from .reference_decode import Sight, counted_length, seen_keys
from .scaled_rows import OfRows, Scaling, name_of, scalings

WIDTH = LATENT_DIM + ROPE_DIM
SCORED = ROPE_DIM
"""Last columns of a row, whose numbers decide scores where keys shall differ: its rope piece, if it has one."""
VALUES = ("normal", "growing", "uniform", "one heavy key", "one sign")
"""How scores are distributed; see the same of prefill."""
QUERIES: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {
    "joined": (((0, 1, 2), 0),),
    "joined, with gaps": (((0, 1, 2), 16),),
    "joined, heads first": (((2, 0, 1), 0),),
    "pieces": (((0, 1, 2), 0), ((0, 1, 2), 0)),
    "pieces, one with heads first": (((2, 0, 1), 0), ((0, 1, 2), 128)),
    "pieces, both with gaps": (((0, 1, 2), 16), ((0, 1, 2), 48)),
    "pieces in other orders": (((1, 0, 2), 0), ((2, 1, 0), 16)),
}
"""Strides of the query's tensors, as (batch, token and head from the outermost to the innermost, elements between
rows)."""
LSES: dict[str, tuple[tuple[int, ...], int]] = {
    "contiguous": ((0, 1, 2), 0),
    "heads first": ((2, 0, 1), 0),
    "FlashMLA's": ((0, 2, 1), 0),
    "tokens first, with gaps": ((1, 0, 2), 2),
}
"""How an LSE that is given lies: batch, token and head from the outermost to the innermost, elements between heads."""
_ROWS = (1, 2, 16, 63, 64, 65, 96, 127, 128, 129, 192, 257)
"""Query tokens x heads around the row tiles of all kernels."""


@dataclasses.dataclass(frozen=True, repr=False)
class DecodeCase(OfRows):
    """A call. seq_lens, causal_seqs, visible (local_visible_lens, a row of q_len per request): as they are in memory.

    wide_lengths, wide_causal: int64 ones. width: columns of the page table. shared: leading pages that all requests
    have in common. unused: what entries beyond a request's keys hold; None for random numbers. missing: (request,
    column, value) of entries that name no page of the cache, though keys lie there. more_pages: of the cache, which no
    request has. page_gap, visible_gap, table_gap: extra rows or columns between pages, rows of visible lengths and rows
    of the table. offset: bytes / 16 by which addresses miss multiples of 256. query: one of QUERIES. spare: bytes of
    workspace beyond what is needed. longer: of max_seq_len beyond the longest request. lse_layout: one of LSES, None
    for none. ends_q: cum_seq_lens_q, as they are in memory, None for none; `tokens` are then the query's, q_len is
    max_q_len, and visible is one row of all tokens. wide_q: int64 ones. rows: the name of the cache's rows, where they
    have scales; `scaling` is about these. rope: columns of a row's rope piece; with 0, it has none. apart: rows without
    scales lie in two tensors.
    """

    dtype: str = "bf16"
    rows: str | None = None
    scaling: Scaling = Scaling()
    rope: int = ROPE_DIM
    apart: bool = False
    seq_lens: tuple[int, ...] = (1,)
    q_len: int = 1
    heads: int = 1
    page: int = 64
    width: int = 1
    sight: Sight = Sight()
    causal_seqs: tuple[int, ...] | None = None
    visible: tuple[tuple[int, ...], ...] | None = None
    wide_lengths: bool = False
    wide_causal: bool = False
    shared: int = 0
    unused: int | None = NO_PAGE
    missing: tuple[tuple[int, int, int], ...] = ()
    more_pages: int = 3
    cache_dims: int = 3
    page_gap: int = 0
    visible_gap: int = 0
    table_gap: int = 0
    lse: bool = True
    lse_base: float = 2.0
    lse_layout: str | None = None
    pdl: bool = False
    softmax_scale: float = 0.042
    output_scale: float = 1.0
    values: str = "normal"
    magnitude: float = 1.0
    offset: int = 0
    query: str = "joined"
    out: str = "new"
    workspace: str = "int8"
    spare: int = 0
    longer: int = 0
    min_split_kv: int = 1
    processors: int = 4
    unseen: float = math.nan
    sinks: tuple[float, ...] | None = None
    lse_includes_sink: bool = False
    batch_invariant: bool = False
    ends_q: tuple[int, ...] | None = None
    tokens: int = 0
    wide_q: bool = False
    extreme: bool = False
    seed: int = 0
    schedule: Schedule = Schedule()
    manner: Manner = Manner()

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def lengths(self) -> list[int]:
        """The keys of each request."""
        return [counted_length(length, self.width * self.page) for length in self.seq_lens]

    @property
    def max_seq_len(self) -> int:
        return min(max([1, *self.lengths]) + self.longer, INT32[1])

    @property
    def gathered(self) -> bool:
        """Whether keys are copied one by one."""
        return self.apart or self.page in SMALL_PAGE_SIZES

    @property
    def computed(self) -> list[int]:
        """The query tokens that requests have."""
        return [token for request in range(self.batch) for token in self.query_tokens(request)]

    def query_tokens(self, request: int) -> range:
        """The request's query tokens, counted over all requests."""
        if self.ends_q is None:
            return range(request * self.q_len, (request + 1) * self.q_len)
        first, end = (max(min(max(n, 0), self.tokens) for n in self.ends_q[: request + i]) for i in (1, 2))
        return range(first, min(end, first + self.q_len))

    def seen(self, request: int) -> torch.Tensor:
        """[query tokens, keys]: which of the request's keys each of its query tokens sees."""
        length, tokens = self.lengths[request], self.query_tokens(request)
        bound = min(max((self.causal_seqs or self.seq_lens)[request], 0), INT32[1])
        limits = None if self.visible is None else [limit for row in self.visible for limit in row]
        rows = []
        for number, token in enumerate(tokens):
            visible = length if limits is None else limits[token]
            rows.append(seen_keys(self.sight, length, bound, visible, len(tokens), number))
        return torch.tensor(rows, dtype=torch.bool).reshape(len(tokens), length)

    def variant(self, arch: str) -> DecodeVariant:
        """The kernel that serves the call on this architecture, if there is one."""
        dtype = Dtype(self.dtype)
        row = ROWS[self.rows] if self.rows else row_without_scales(dtype, self.rope)
        lse = self.lse or self.gathered
        return DecodeVariant(Arch(arch), dtype, DECODE_OUT_DTYPES[dtype], lse, row, gathers=self.gathered)


def row_without_scales(dtype: Dtype, rope: int) -> RowFormat:
    """The row of one dtype that has so many columns in its rope piece, or none."""
    return uniform_row(dtype) if rope else latent_row(dtype)


def rope_of(row: RowFormat) -> int:
    """Columns of a row's rope piece."""
    return row.columns - LATENT_DIM


def in_one_or_two(row: RowFormat) -> bool:
    """Whether a cache of such rows may have one tensor or two, where rows are copied one by one."""
    return row.has("rope") and row.scales is None


@st.composite
def decode_cases(draw: Any, variant: DecodeVariant, hostile: bool = True) -> DecodeCase:
    """Any call that the contract allows and this kernel serves. hostile: device tensors may hold any values."""
    fields = draw(_fields(variant, hostile))
    rows = fields["q_len"] * fields["heads"]
    seq_lens = draw(_lengths(rows))
    if draw(st.integers(0, 15)) == 15:
        seq_lens = (0,) * len(seq_lens)
    if variant.gathers:
        fields["apart"] = in_one_or_two(variant.row) and draw(st.booleans())
    sizes = SMALL_PAGE_SIZES if variant.gathers else ()
    page = draw(st.sampled_from((*sizes, *PAGE_SIZES) if fields.get("apart") else sizes or PAGE_SIZES))
    width = -(-max((0, *seq_lens)) // page) + draw(st.sampled_from((0, 0, 1, 7)))
    sight = draw(_sights())
    if sight.cp_world > 1:
        fields.pop("sinks", None)
    causal_seqs = None
    if sight.cp_world > 1 or draw(st.integers(0, 4)) == 4:
        causal_seqs = tuple(max(0, length * sight.cp_world + draw(st.integers(-3, 3))) for length in seq_lens)
    packed = draw(_packs(seq_lens, fields)) if draw(st.integers(0, 2)) == 2 else {}
    fields |= packed
    visible = None
    if packed and draw(st.integers(0, 3)) == 3:
        count = fields["tokens"]
        visible = (tuple(draw(st.lists(st.integers(0, max((0, *seq_lens)) + 2), min_size=count, max_size=count))),)
    elif not packed and draw(st.integers(0, 3)) == 3:
        token = st.lists(st.integers(0, max((0, *seq_lens)) + 2), min_size=fields["q_len"], max_size=fields["q_len"])
        visible = tuple(tuple(draw(token)) for _ in seq_lens)
    missing = ()
    if hostile and seq_lens and draw(st.integers(0, 3)) == 3:
        seq_lens = draw(_any(seq_lens, fields["wide_lengths"]))
        causal_seqs = causal_seqs and draw(_any(causal_seqs, fields["wide_causal"]))
        visible = visible and tuple(row and draw(_any(row, False)) for row in visible)
        if packed:
            fields["ends_q"] = draw(_any(fields["ends_q"], fields["wide_q"]))
        entry = st.tuples(
            st.integers(0, len(seq_lens) - 1),
            st.integers(0, max(width, 1) - 1),
            st.one_of(st.sampled_from((*INT32, -1, NO_PAGE)), st.integers(0, 80), st.integers(80, INT32[1])),
        )
        missing = tuple(draw(st.lists(entry, max_size=2 if width else 0)))
    return DecodeCase(
        **fields,
        seq_lens=seq_lens,
        page=page,
        width=width,
        sight=sight,
        causal_seqs=causal_seqs,
        visible=visible,
        missing=missing,
        more_pages=draw(st.sampled_from((3, 3, 0))),
        shared=draw(st.sampled_from((0, 0, 0, 1, 2))),
        unused=draw(st.sampled_from((NO_PAGE, -1, None))),
        longer=draw(st.sampled_from((0, 0, 1, 5000, INT32[1]))),
        **draw(scales(WIDTH)),
        values=draw(st.sampled_from(VALUES)),
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.1, 2.0, 6.0))),
    )


@st.composite
def decode_extremes(draw: Any, variant: DecodeVariant, hostile: bool = True) -> DecodeCase:
    """Calls whose scores are as large, or whose scales are as small, as numbers allow."""
    fields = draw(_fields(variant, hostile=False))
    seq_lens = tuple(draw(st.lists(st.integers(1, 300), min_size=1, max_size=2)))
    scale, magnitude = draw(magnitude_for(Dtype.BF16 if variant.row.scales else variant.dtype, WIDTH))
    factors = fields["scaling"].factors
    fields["scaling"] = dataclasses.replace(
        fields["scaling"], exponent=0, factors="spread" if factors == "far apart" else factors
    )
    return DecodeCase(
        **fields,
        seq_lens=seq_lens,
        width=5,
        softmax_scale=scale,
        magnitude=magnitude,
        extreme=True,
        values=draw(st.sampled_from(EXTREME_VALUES)),
    )


@st.composite
def _fields(draw: Any, variant: DecodeVariant, hostile: bool) -> dict[str, Any]:
    """Everything but lengths, what is seen, and numbers."""
    rows = draw(st.one_of(st.sampled_from(_ROWS), st.integers(1, 140)))
    q_len = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4, 7, 16, rows) if n <= rows and n <= 70]))
    heads = max(1, rows // q_len)
    lse = variant.lse and (not variant.gathers or draw(st.booleans()))
    return {
        **draw(heads_sinks(heads)),
        "dtype": str(variant.dtype),
        "rows": name_of(variant.row),
        "rope": rope_of(variant.row),
        "scaling": draw(scalings(variant.row, hostile)),
        "q_len": q_len,
        "heads": heads,
        "lse": lse,
        "pdl": draw(st.booleans()),
        "lse_base": draw(st.sampled_from((2.0, 2.0, math.e))),
        "lse_layout": draw(st.sampled_from((None, *LSES))) if lse else None,
        "wide_lengths": draw(st.booleans()),
        "wide_causal": draw(st.booleans()),
        "cache_dims": 3 if variant.row.apart else draw(st.sampled_from((3, 4))),
        "page_gap": draw(st.sampled_from((0, 0, 1, 5))),
        "visible_gap": draw(st.sampled_from((0, 0, 1))),
        "table_gap": draw(st.sampled_from((0, 0, 1, 3))),
        "offset": draw(st.sampled_from((0, 0, 1, 3, 8))),
        "query": draw(st.sampled_from(("joined", *QUERIES))),
        "out": draw(st.sampled_from(("new", "given"))),
        "workspace": draw(st.sampled_from(("int8", "uint8"))),
        "spare": draw(st.sampled_from((0, 0, 1, 4096))),
        "min_split_kv": draw(st.sampled_from((1, 1, 256))),
        "batch_invariant": draw(st.sampled_from((False, False, True))),
        "processors": draw(st.sampled_from((2, 3, 4, 4, 7, 16, 132))),
        "unseen": draw(st.sampled_from((math.nan, math.inf, -math.inf))),
        "seed": draw(st.integers(0, 2**31 - 1)),
        "schedule": draw(schedules()),
        "manner": draw(manners()),
    }


@st.composite
def _lengths(draw: Any, rows: int) -> tuple[int, ...]:
    """Keys of each request: a few of any number, or many short ones, within what takes a second to emulate."""
    if rows <= 64 and draw(st.integers(0, 4)) == 4:
        return tuple(draw(st.lists(st.sampled_from((0, 1, 5, 16, 17, 60, 65)), min_size=1, max_size=40)))
    size = st.one_of(st.sampled_from(SIZES), st.integers(0, 40), st.integers(0, 1500))
    left = 4000 // -(-rows // 64)
    lengths: list[int] = []
    for length in draw(st.lists(size, min_size=draw(FEWEST), max_size=5)):
        lengths.append(min(length, left))
        left -= lengths[-1]
    return tuple(lengths)


@st.composite
def _packs(draw: Any, seq_lens: tuple[int, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """Query tokens of each request: a few, none or many, within what takes a second to emulate."""
    left = 300 // fields["heads"] + len(seq_lens)
    counts = []
    for _ in seq_lens:
        counts.append(min(draw(st.one_of(st.sampled_from((0, 1, 1, 2, 5, 17, 64, 130)), st.integers(0, 20))), left))
        left -= counts[-1]
    ends = tuple(itertools.accumulate(counts, initial=draw(st.sampled_from((0, 0, 0, 2)))))
    most = max((1, *counts))
    return {
        "ends_q": ends,
        "tokens": ends[-1] + draw(st.sampled_from((0, 0, 1, 9))),
        "q_len": draw(st.sampled_from((most, most, most + 1, max(1, most - 1), most + 40))),
        "wide_q": draw(st.booleans()),
    }


@st.composite
def _sights(draw: Any) -> Sight:
    world = draw(st.sampled_from((1, 1, 1, 2, 3, 8)))
    return Sight(
        causal=draw(st.sampled_from((True, True, False))),
        window_left=draw(st.sampled_from((-1, -1, -1, 0, 1, 63, 70, 300, INT32[1]))),
        cp_world=world,
        cp_rank=draw(st.integers(0, world - 1)),
        cp_interleave=draw(st.sampled_from((1, 1, 3, 16, 64, INT32[1] // world))),
    )


@st.composite
def _any(draw: Any, lengths: tuple[int, ...], wide: bool) -> tuple[int, ...]:
    """Lengths with some replaced by any value of their integers."""
    ends = (-(2**63), 2**63 - 1) if wide else INT32
    anything = st.one_of(st.sampled_from((*ends, *INT32, -1, 5000)), st.integers(*ends), st.integers(-10, 1600))
    changed = list(lengths)
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(lengths) - 1), anything), min_size=1, max_size=3)):
        changed[place] = value
    return tuple(changed)
