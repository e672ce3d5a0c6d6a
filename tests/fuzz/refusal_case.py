"""Calls that operators must refuse: right ones with one argument wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.plan import FEW_ROWS_DEALS, wide_rows
from tsmla.identity.row_format import ROWS, format_of
from tsmla.identity.variant import (
    DecodeVariant,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)

from . import wrong_arguments
from .cache_case import CacheCase
from .decode_case import DecodeCase, rope_of
from .guarded import LAYOUTS
from .mask_case import MaskCase
from .pack_case import PackCase
from .plain import Plain
from .prefill_case import PrefillCase
from .query_case import QueryCase
from .reference_decode import Sight
from .scaled_rows import name_of, scalings


@dataclasses.dataclass(frozen=True, repr=False)
class Refusal(Plain):
    """A call that is right but for one argument, or one of a tuple ("query[1]"). wrong: in what, a key of SPOIL, or
    "value" for one of the argument's wrong values. index: which value or variation. seen: after a right call of the
    kind, which the operator remembers."""

    call: PrefillCase | DecodeCase | PackCase | CacheCase | QueryCase | MaskCase
    argument: str
    wrong: str
    index: int = 0
    seen: bool = False

    def variant(self, arch: str) -> Variant:
        """The kernel that serves the right call."""
        return self.call.variant(arch)

    @property
    def family(self) -> str:
        """The operator's family."""
        return self.variant("sm_90a").family


TABLES = {
    "prefill": wrong_arguments.PREFILL,
    "decode": wrong_arguments.DECODE,
    "pack": wrong_arguments.PACK,
    "write_cache": wrong_arguments.WRITE_CACHE,
    "read_cache": wrong_arguments.READ_CACHE,
    "quantize_q": wrong_arguments.QUANTIZE_Q,
    "key_mask": wrong_arguments.KEY_MASK,
}


_ONE_RANK: dict[type, dict[str, Any]] = {DecodeCase: {"sight": Sight()}}
"""What a call of an operator with sinks must have."""
_PACKED: dict[str, Any] = {"ends_q": (0, 1, 1, 5), "tokens": 6, "q_len": 4, "visible": ((5, 20, 3, 1, 1, 9),)}
"""What makes of a decode one whose requests have query tokens of their own."""


@st.composite
def refusals(draw: Any, variant: Variant, hostile: bool = True) -> Refusal:
    """Any wrong argument of the operator that this kernel belongs to."""
    if isinstance(variant, PrefillVariant):
        call = draw(_prefills(variant))
    elif isinstance(variant, DecodeVariant):
        call = draw(_decodes(variant))
    elif isinstance(variant, PackVariant):
        call = draw(_packs(variant))
    elif isinstance(variant, WriteCacheVariant | ReadCacheVariant):
        call = draw(_caches(variant))
    elif isinstance(variant, KeyMaskVariant):
        call = MaskCase(3, 5, 70, lengths=(1, 2, 5), pdl=draw(st.booleans()))
    else:
        assert isinstance(variant, QuantizeQVariant)
        call = draw(_queries(variant))
    without = set()
    if isinstance(call, PrefillCase):
        without = {name for name, given in (("lse", call.heads_first), ("key_mask", call.mask)) if given is None}
    if isinstance(call, CacheCase):
        without = _not_in(call)
    whole = set()
    if isinstance(call, DecodeCase):
        pieces = _pieces(call)
        whole = {piece.split("[")[0] for piece in pieces}
        without = {name for name in TABLES["decode"] if name.endswith("]")} - pieces
        without |= set() if call.lse_layout else {"lse"}
    argument = draw(st.sampled_from([name for name in TABLES[variant.family] if name not in without]))
    if argument == "sinks":
        call = dataclasses.replace(call, sinks=(0.5,) * call.heads, **_ONE_RANK.get(type(call), {}))
    if argument in ("cum_seq_lens_q", "max_q_len") and isinstance(call, DecodeCase):
        call = dataclasses.replace(call, **_PACKED)
    ways, values, _ = TABLES[variant.family][argument]
    ways = () if argument in whole else ways
    if isinstance(call, CacheCase) and not variant.row.has("rope") and argument == "kv_c":
        # It alone says how many tokens there are: more of them are as right, or slots are too few.
        ways = tuple(way for way in ways if way != "dim 0 +1")
    if isinstance(variant, DecodeVariant) and argument == "workspace_buffer":
        # Of few rows of such a cache less will do than `decode_workspace_size` says, which does not know the cache.
        enough = variant.arch in FEW_ROWS_DEALS and wide_rows(variant.row, variant.gathers)
        ways = tuple(way for way in ways if not (enough and way == "dim 0 -1"))
    wrong = draw(st.sampled_from((*ways, *["value"] * min(3, len(values)))))
    index = draw(st.integers(0, len(values) - 1 if wrong == "value" else 5))
    return Refusal(call, argument, wrong, index, draw(st.booleans()))


@st.composite
def _prefills(draw: Any, variant: PrefillVariant) -> PrefillCase:
    return PrefillCase(
        dtype=str(variant.dtype),
        out_dtype=str(variant.out_dtype),
        d_qk=variant.d_qk,
        heads_kv=2,
        group=draw(st.sampled_from((1, 2))),
        ends_q=(0, 3, 5),
        ends_kv=(0, 3, 7),
        tokens_q=5,
        tokens_kv=7,
        causal=draw(st.booleans()) if variant.masked else variant.causal,
        lse=variant.lse,
        mask="random" if variant.masked else None,
        pdl=draw(st.booleans()),
        layouts=(draw(st.sampled_from(LAYOUTS)), *draw(st.sampled_from((("slices",) * 2, ("contiguous",) * 2)))),
        out="contiguous",
        heads_first=draw(st.booleans()) if variant.lse else None,
    )


@st.composite
def _decodes(draw: Any, variant: DecodeVariant) -> DecodeCase:
    return DecodeCase(
        dtype=str(variant.dtype),
        rows=name_of(variant.row),
        rope=rope_of(variant.row),
        scaling=draw(scalings(variant.row, hostile=False)),
        query=draw(st.sampled_from(("joined", "pieces"))),
        seq_lens=(5, 20, 1),
        q_len=2,
        heads=draw(st.sampled_from((2, 3))),
        page=draw(st.sampled_from((16, 64))),
        width=4,
        sight=draw(st.sampled_from((Sight(), Sight(cp_world=2, cp_rank=1)))),
        causal_seqs=(10, 40, 2),
        visible=((5, 5), (20, 3), (1, 1)),
        wide_lengths=draw(st.booleans()),
        wide_causal=draw(st.booleans()),
        lse=variant.lse,
        lse_layout="contiguous" if variant.lse else None,
        pdl=draw(st.booleans()),
        out="given",
        workspace=draw(st.sampled_from(("int8", "uint8"))),
    )


def _pieces(call: DecodeCase) -> set[str]:
    """Names of arguments that are elements of tuples."""
    queries = 3 if call.rows_apart and not call.quantises else 2 if call.query == "pieces" and call.rope else 0
    counts = {"query": queries, "kv_cache": 3 if call.rows_apart else 0}
    return {f"{name}[{index}]" for name, count in counts.items() for index in range(count)}


@st.composite
def _packs(draw: Any, variant: PackVariant) -> PackCase:
    return PackCase(
        dtype=str(variant.dtype),
        fp8=str(variant.out_dtype),
        tokens=3,
        heads=2,
        layouts=(*draw(st.sampled_from((("slices",) * 2, ("contiguous",) * 2))), "contiguous", "contiguous"),
        rope=(draw(st.sampled_from((2, 3))), "contiguous"),
        pdl=draw(st.booleans()),
        dims=(variant.d_nope, variant.d_rope, variant.d_v),
    )


@st.composite
def _caches(draw: Any, variant: WriteCacheVariant | ReadCacheVariant) -> CacheCase:
    return CacheCase(
        variant.family,
        format_of(variant.row),
        str(variant.dtype),
        slots=(3, 0, -1, 7),
        pages=3,
        page=5,
        narrow=draw(st.booleans()),
        as_bytes=draw(st.booleans()),
        requests=draw(st.sampled_from(((), (2, 0, 3)))) if isinstance(variant, ReadCacheVariant) else (),
        turn=draw(st.sampled_from(("neighbours", "halves"))) if variant.row.has("rope") else "",
        float32_table=draw(st.booleans()),
        pdl=draw(st.booleans()),
    )


def _not_in(call: CacheCase) -> set[str]:
    """Arguments that this call of the operator does not have."""
    row = ROWS[call.format]
    without = set() if row.apart else {"rope_cache", "scale_cache"}
    if row.scales is None:
        without.add("power_of_two_scales")
    if not row.has("rope"):
        without |= {"k_pe", "positions", "cos_sin_cache", "rope_interleaved"}
    return without | ({"indices"} if call.requests else {"block_tables", "cum_seq_lens", "seq_starts"})


@st.composite
def _queries(draw: Any, variant: QuantizeQVariant) -> QueryCase:
    return QueryCase(
        3,
        2,
        2,
        packed=draw(st.booleans()),
        layouts=draw(st.sampled_from((("contiguous",), ("gaps",)))),
        outs=("contiguous",) * 3,
        rounded=draw(st.booleans()),
        pdl=draw(st.booleans()),
    )
