"""Calls of tsmla_prefill: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.support import NOPE_DIMS, PREFILL_DIMS, prefill_out_dtype
from tsmla.identity.variant import Dtype, PrefillVariant
from tsmla.operators import checks
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

from .drawing import EXTREME_VALUES, FEWEST, SIZES, heads_sinks, hostile_ends, magnitude_for, scales, schedules
from .guarded import LAYOUTS
from .manner import Manner, manners
from .places import Schedule
from .plain import Plain
from .reference_prefill import Span, key_spans, query_spans

VALUES = ("normal", "growing", "uniform", "one heavy key", "one sign")
"""How scores are distributed: at random; larger and larger along the keys, so that row maxima grow; all the same; one
key of each sequence with most of the weight; all the same with values of one sign, the first one large, beside which a
sum that keeps few bits loses the others."""
MASKS = ("random", "dense", "sparse", "blocks", "one", "all", "none")
"""Which bits of a key mask are set: half, nearly all, few, all or none of 64 neighbours, one of a row, all, none."""
_LONG_BATCH = 3
"""Sequences, at most, of packs of more than LONG_KEYS rows for each, which kernels of Hopper's take for long sequences:
tens of MB."""


@dataclasses.dataclass(frozen=True, repr=False)
class PrefillCase(Plain):
    """A call. ends_q, ends_kv: cum_seq_lens, as they are in memory; ends_q None passes no cum_seq_lens_q. tokens_q,
    tokens_kv: rows of the packs. layouts: of query, key, value and out, each one of LAYOUTS; key and value may also be
    "slices" of one tensor, or "expanded" from one head. rope_layouts: of the ropes of query and key, one of LAYOUTS
    each (key's also "flat", without a dimension of heads), where these are given in pieces, whose other layouts are
    then of the first; None where they are joined. heads_first: how an LSE that is given lies. merges: also called
    again, to continue from an earlier result. processors: SMs of the GPU, where it is emulated; with few, CTAs of some
    kernels take several query tiles. offset: bytes / 16 by which addresses miss multiples of 256;
    the cumulative lengths miss those of 16. out: "new", or given with its layout. extreme: scores reach beyond what
    float32 tells apart, and the judgement is another one. mask: of MASKS, None without a key mask. mask_words: words
    that its rows have beyond those of the longest sequence, or fewer. mask_gap: words between its rows.
    """

    dtype: str = "bf16"
    out_dtype: str | None = None
    d_qk: int = 192
    heads_kv: int = 1
    group: int = 1
    ends_q: tuple[int, ...] | None = None
    ends_kv: tuple[int, ...] = (0, 1)
    tokens_q: int = 1
    tokens_kv: int = 1
    causal: bool = True
    lse: bool = True
    pdl: bool = False
    softmax_scale: float = 0.072
    k_scale: float = 1.0
    v_scale: float = 1.0
    output_scale: float = 1.0
    values: str = "normal"
    magnitude: float = 1.0
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    offset: int = 0
    out: str = "new"
    unseen: float = math.nan
    sinks: tuple[float, ...] | None = None
    lse_includes_sink: bool = False
    extreme: bool = False
    rope_layouts: tuple[str | None, str | None] = (None, None)
    heads_first: bool | None = None
    merges: bool = False
    processors: int = Arch.SM90A.sms
    seed: int = 0
    lse_base: float = math.e
    schedule: Schedule = Schedule()
    manner: Manner = Manner()
    mask: str | None = None
    mask_words: int = 0
    mask_gap: int = 0

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def d_v(self) -> int:
        return dict(PREFILL_DIMS)[self.d_qk]

    @property
    def d_nope(self) -> int:
        """Columns of a query or key in front of the rope, if there is one."""
        return NOPE_DIMS[self.d_qk]

    @property
    def batch(self) -> int:
        return len(self.ends_kv) - 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPE_OF[Dtype(self.dtype)]

    @property
    def written(self) -> torch.dtype:
        """The output's dtype."""
        return TORCH_DTYPE_OF[Dtype(self.out_dtype) if self.out_dtype else prefill_out_dtype(Dtype(self.dtype))]

    def spans(self) -> list[tuple[Span, Span]]:
        """Each sequence's queries and keys."""
        queries = query_spans(self.ends_kv if self.ends_q is None else self.ends_q, self.tokens_q)
        return list(zip(queries, key_spans(self.ends_kv, self.tokens_kv), strict=True))

    def mask_bits(self) -> torch.Tensor:
        """The bits of the key mask, [tokens_q, bits], those that stand for no key among them."""
        words = max(0, -(-max((len(keys) for _, keys in self.spans()), default=0) // 32) + self.mask_words)
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = self.tokens_q, 32 * words
        if self.mask == "blocks":
            blocks = torch.rand(self.tokens_q, -(-words // 2), generator=generator) < 0.3
            return blocks.repeat_interleave(64, 1)[:, : shape[1]]
        if self.mask == "one":
            return torch.arange(shape[1]) == torch.randint(0, max(1, shape[1]), (shape[0], 1), generator=generator)
        share = {"random": 0.5, "dense": 0.999, "sparse": 0.004, "all": 1.1, "none": -1.0}[str(self.mask)]
        return torch.rand(shape, generator=generator) < share

    def variant(self, arch: str) -> PrefillVariant:
        """The kernel that serves the call on this architecture, if there is one."""
        dtypes = Dtype(self.dtype), checks.dtype_of(self.written)
        kind = (self.causal, self.lse) if self.mask is None else (False, True, True)
        return PrefillVariant(Arch(arch), *dtypes, self.d_qk, self.d_v, *kind)


@st.composite
def prefill_cases(draw: Any, variant: PrefillVariant, hostile: bool = True) -> PrefillCase:
    """Any call that the contract allows and this kernel serves. hostile: device tensors may hold any values."""
    fields = draw(_fields(variant))
    lengths = draw(_lengths(fields["heads_kv"] * fields["group"]))
    padded = draw(st.sampled_from((0, 0, 1, 5)))
    slack_q, slack_kv = draw(st.sampled_from((0, 0, 1, 70))), draw(st.sampled_from((0, 0, 1, 70)))
    batch = len(lengths) + padded
    if _may_be_long(variant) and batch <= _LONG_BATCH and draw(st.integers(0, 2)) == 2:
        slack_kv = LONG_KEYS * batch + 1
    shared = draw(st.integers(0, 3)) == 3
    if shared:
        lengths = [(kv, kv) for _, kv in lengths]
    sides = ([pair[side] for pair in lengths] for side in (0, 1))
    ends_q, ends_kv = (tuple(itertools.accumulate((0, *side, *[0] * padded))) for side in sides)
    tokens_q, tokens_kv = ends_q[-1] + slack_q, ends_kv[-1] + slack_kv
    if hostile and draw(st.integers(0, 3)) == 3:
        ends_q, ends_kv = draw(hostile_ends(ends_q, tokens_q)), draw(hostile_ends(ends_kv, tokens_kv))
    factors = draw(scales(variant.d_qk))
    v_scales = (1.0, 1.0, 4.0, -0.7, 1e-4)
    if variant.out_dtype == Dtype.FP16 and factors["output_scale"] > 1:
        v_scales = (1.0, -0.7)  # the largest values, of one sign, times both factors are to be numbers of float16
    return PrefillCase(
        **fields,
        ends_q=None if shared else ends_q,
        ends_kv=ends_kv,
        tokens_q=tokens_q,
        tokens_kv=tokens_kv,
        **factors,
        k_scale=draw(st.sampled_from((1.0, 1.0, 0.375, 3.0))),
        v_scale=draw(st.sampled_from(v_scales)),
        values=draw(st.sampled_from(VALUES)),
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.1, 3.0))),
    )


@st.composite
def prefill_extremes(draw: Any, variant: PrefillVariant, hostile: bool = True) -> PrefillCase:
    """Calls whose scores are as large, or whose scales are as small, as numbers allow."""
    len_q, len_kv = draw(st.integers(1, 140)), draw(st.integers(1, 300))
    scale, magnitude = draw(magnitude_for(variant.dtype, variant.d_qk))
    return PrefillCase(
        **draw(_fields(variant)),
        ends_q=(0, len_q),
        ends_kv=(0, len_kv),
        tokens_q=len_q,
        tokens_kv=len_kv,
        softmax_scale=scale,
        magnitude=magnitude,
        extreme=True,
        values=draw(st.sampled_from(EXTREME_VALUES)),
    )


@st.composite
def _fields(draw: Any, variant: PrefillVariant) -> dict[str, Any]:
    """Everything but lengths and numbers."""
    asked = (str(variant.out_dtype), None) if variant.out_dtype == prefill_out_dtype(variant.dtype) else ()
    layout = st.sampled_from(LAYOUTS)
    heads_kv = draw(st.sampled_from((1, 1, 2, 3)))
    both = draw(st.sampled_from(("slices", "slices", "expanded", None)))
    group = draw(st.sampled_from((1, 1, 2, 3, 4) if heads_kv == 1 else (1, 2)))
    lse = draw(st.booleans()) if variant.masked else variant.lse
    return {
        **draw(heads_sinks(heads_kv * group)),
        "dtype": str(variant.dtype),
        "out_dtype": draw(st.sampled_from(asked or (str(variant.out_dtype),))),
        "d_qk": variant.d_qk,
        "heads_kv": heads_kv,
        "group": group,
        "causal": draw(st.booleans()) if variant.masked else variant.causal,
        "lse": lse,
        "pdl": draw(st.booleans()),
        "layouts": (draw(layout), both or draw(layout), both or draw(layout)),
        "rope_layouts": _ropes(draw, variant),
        "heads_first": draw(st.sampled_from((None, False, True))) if lse else None,
        "merges": lse and draw(st.integers(0, 2)) == 2,
        "processors": draw(st.sampled_from((1, 1, 2, 132))),
        "offset": draw(st.sampled_from((0, 0, 1, 3, 8))),
        "out": draw(st.sampled_from(("new", *LAYOUTS))),
        "unseen": draw(st.sampled_from((math.nan, math.inf, -math.inf))),
        "seed": draw(st.integers(0, 2**31 - 1)),
        "lse_base": draw(st.sampled_from((math.e, math.e, 2.0))),
        "schedule": draw(schedules()),
        "manner": draw(manners()),
        **(_mask(draw) if variant.masked else {}),
    }


def _mask(draw: Any) -> dict[str, Any]:
    return {
        "mask": draw(st.sampled_from(MASKS)),
        "mask_words": draw(st.sampled_from((0, 0, 0, 1, 3, -1, -9))),
        "mask_gap": draw(st.sampled_from((0, 0, 1, 70))),
    }


def _may_be_long(variant: PrefillVariant) -> bool:
    return variant.arch is Arch.SM90A and variant.dtype.bits == 16 and variant.d_v <= 128 and not variant.masked


def _ropes(draw: Any, variant: PrefillVariant) -> tuple[str | None, str | None]:
    if variant.d_qk == NOPE_DIMS[variant.d_qk]:
        return None, None
    return draw(st.sampled_from((None, *LAYOUTS))), draw(st.sampled_from((None, "flat", *LAYOUTS)))


@st.composite
def _lengths(draw: Any, heads: int) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence: a few of any size, or many small ones; emulated within a second."""
    if draw(st.integers(0, 4)) == 4:
        small = st.sampled_from((0, 0, 1, 2, 3, 7, 16))
        return draw(st.lists(st.tuples(small, small), min_size=1, max_size=40))
    size = st.one_of(st.sampled_from(SIZES), st.integers(0, 40), st.integers(0, 520))
    work = 24
    lengths: list[tuple[int, int]] = []
    for len_q, len_kv in draw(st.lists(st.tuples(size, size), min_size=draw(FEWEST), max_size=5)):
        tiles = (1 + len_q // 128) * (1 + len_kv // 128) * heads
        if tiles <= work:
            lengths.append((len_q, len_kv))
            work -= tiles
    return lengths
