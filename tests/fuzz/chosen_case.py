"""Calls of tsmla_decode and tsmla_sparse_prefill whose query tokens choose their keys: what determines one, and how
they are drawn."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.support import DECODE_OUT_DTYPES, ROPE_DIM
from tsmla.identity.variant import DecodeVariant, Dtype

from .decode_case import QUERIES, VALUES, WIDTH, in_one_or_two, rope_of, row_without_scales
from .drawing import INT32, SIZES, heads_sinks, scales, schedules
from .manner import Manner, manners
from .places import Schedule
from .scaled_rows import OfRows, Scaling, name_of, scalings

LSES: dict[str, tuple[tuple[int, ...], int]] = {
    "contiguous": ((0, 1), 0),
    "heads first": ((1, 0), 0),
    "gaps": ((0, 1), 2),
}
"""How an LSE that is given lies: token and head from the outermost to the innermost, elements between heads."""


@dataclasses.dataclass(frozen=True, repr=False)
class ChosenCase(OfRows):
    """A call. shape: of the query tokens, [batch, q_len] or [tokens]. outside: of 16 random indices, so many name no
    key. front: so many of each list's first name none. distinct: keys are among so many first ones of the cache; among
    all with 0. strays: (token, column, value) of indices, any int32. lengths: topk_length, as it is in memory, of each
    token, or of each request where `by_request`; None: not given. wide_lengths: int64 ones. apart: the cache is two
    tensors. page_gap, list_gap: extra rows between pages, and columns between lists. prefill: the call is one of
    tsmla_sparse_prefill, of rows where pages have one key. Other fields are those of `DecodeCase`.
    """

    dtype: str = "bf16"
    rows: str | None = None
    scaling: Scaling = Scaling()
    shape: tuple[int, ...] = (1, 1)
    heads: int = 1
    pages: int = 3
    page: int = 64
    rope: int = ROPE_DIM
    apart: bool = False
    top_k: int = 1
    outside: int = 0
    front: int = 0
    distinct: int = 0
    strays: tuple[tuple[int, int, int], ...] = ()
    lengths: tuple[int, ...] | None = None
    by_request: bool = False
    wide_lengths: bool = False
    cache_dims: int = 3
    page_gap: int = 0
    list_gap: int = 0
    prefill: bool = False
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
    processors: int = 4
    unseen: float = math.nan
    sinks: tuple[float, ...] | None = None
    lse_includes_sink: bool = False
    batch_invariant: bool = False
    seed: int = 0
    schedule: Schedule = Schedule()
    manner: Manner = Manner()

    @property
    def tokens(self) -> int:
        return math.prod(self.shape)

    @property
    def slots(self) -> int:
        return self.pages * self.page

    def counted(self, token: int) -> int:
        """How many of the token's indices count."""
        if self.lengths is None:
            return self.top_k
        return min(max(self.lengths[token // self.shape[-1] if self.by_request else token], 0), self.top_k)

    def variant(self, arch: str) -> DecodeVariant:
        """The kernel that serves the call on this architecture, if there is one."""
        dtype = Dtype(self.dtype)
        row = ROWS[self.rows] if self.rows else row_without_scales(dtype, self.rope)
        return DecodeVariant(Arch(arch), dtype, DECODE_OUT_DTYPES[dtype], lse=True, row=row, gathers=True)


@st.composite
def chosen_cases(draw: Any, variant: DecodeVariant, hostile: bool = True) -> ChosenCase:
    """Any call of chosen keys that the contract allows and this kernel serves. hostile: lengths may be any integers."""
    heads = draw(st.one_of(st.sampled_from((1, 2, 8, 16, 63, 64, 65, 128, 129)), st.integers(1, 140)))
    schedule = draw(schedules())
    # Where warps take turns after each instruction, those that poll run as often as others: a list of 400 keys is not
    # done after 60 million instructions (not known whether it would be).
    most = max(1, (4000 if schedule.quantum != 1 else 200) // -(-heads // 64))
    shape = draw(
        st.sampled_from(
            ((1, 1), (2, 1), (1, 3), (3, 2), (5, 1), (1,), (4,), (40,), (67,), (33, 2), (0,), (0, 2), (3, 0))
        )
    )
    tokens = math.prod(shape)
    top_k = min(
        draw(st.one_of(st.sampled_from((*SIZES, 0, 1)), st.integers(0, 300), st.just(1500))), most // max(tokens, 1)
    )
    page = draw(st.sampled_from((1, 2, 4, 16, 61, 64, 69, 128, 576)))
    pages = draw(st.sampled_from((1, 3, 1 + 700 // page, 0)))
    lengths, by_request, wide = None, len(shape) == 2 and draw(st.booleans()), draw(st.booleans())
    if draw(st.integers(0, 2)):
        count = shape[0] if by_request else tokens
        ends = (-(2**63), 2**63 - 1) if wide else INT32
        length = st.one_of(st.sampled_from((0, 1, 63, 64, 65, top_k, top_k + 1)), st.integers(0, top_k))
        length = st.one_of(length, st.sampled_from((*ends, -1)), st.integers(*ends)) if hostile else length
        lengths = tuple(draw(st.lists(length, min_size=count, max_size=count)))
    index = st.one_of(
        st.sampled_from((*INT32, -1, pages * page, pages * page + 1)), st.integers(*INT32), st.integers(0, 80)
    )
    stray = st.tuples(st.integers(0, max(tokens - 1, 0)), st.integers(0, max(top_k - 1, 0)), index)
    return ChosenCase(
        **draw(heads_sinks(heads)),
        dtype=str(variant.dtype),
        rows=name_of(variant.row),
        scaling=draw(scalings(variant.row, hostile)),
        shape=shape,
        heads=heads,
        pages=pages,
        page=page,
        rope=rope_of(variant.row),
        apart=in_one_or_two(variant.row) and draw(st.booleans()),
        top_k=top_k,
        outside=draw(st.sampled_from((0, 0, 1, 5, 15, 16))),
        front=draw(st.sampled_from((0, 0, 0, 1, 64, 130))),
        distinct=draw(st.sampled_from((0, 0, 0, 1, 5))),
        strays=tuple(draw(st.lists(stray, max_size=3))) if tokens * top_k else (),
        lengths=lengths,
        by_request=by_request,
        wide_lengths=wide,
        cache_dims=3 if variant.row.apart else draw(st.sampled_from((3, 4))),
        page_gap=draw(st.sampled_from((0, 0, 1, 5))),
        list_gap=draw(st.sampled_from((0, 0, 1, 3))),
        prefill=len(shape) == 1 and draw(st.booleans()),
        lse=draw(st.booleans()),
        lse_base=draw(st.sampled_from((2.0, 2.0, math.e))),
        lse_layout=draw(st.sampled_from((None, *LSES))),
        pdl=draw(st.booleans()),
        **draw(scales(WIDTH)),
        values=draw(st.sampled_from(VALUES)),
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.1, 2.0, 6.0))),
        offset=draw(st.sampled_from((0, 0, 1, 3, 8))),
        query=draw(st.sampled_from(("joined", *QUERIES))),
        out=draw(st.sampled_from(("new", "given"))),
        workspace=draw(st.sampled_from(("int8", "uint8"))),
        spare=draw(st.sampled_from((0, 0, 1, 4096))),
        processors=draw(st.sampled_from((2, 3, 4, 4, 7, 16, 132))),
        unseen=draw(st.sampled_from((math.nan, math.inf, -math.inf))),
        batch_invariant=draw(st.sampled_from((False, False, True))),
        seed=draw(st.integers(0, 2**31 - 1)),
        schedule=schedule,
        manner=draw(manners()),
    )
