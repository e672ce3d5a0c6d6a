"""Rows with scales in decode's cases: what a case says of them, how they are drawn, and what their tensors hold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from tsmla.identity.row_format import ROWS, RowFormat, format_of
from tsmla.identity.support import DECODE_OUT_DTYPES
from tsmla.identity.variant import Dtype
from tsmla.operators.checks import TORCH_DTYPE_OF

from .plain import Plain
from .reference_cache import E4M3

LATENT = 512
FACTORS = ("equal", "powers of two", "an outlier", "spread", "far apart")
"""How keys differ in size: not at all, all scales being powers of two or none; one of 64 is 20 times as large as
others; by up to 1e5; by up to 2^96, which with all else stays below the 2^100 of the contract. No scale is
subnormal."""
PLACES = ("contiguous", "gaps", "side by side")
"""How the rows of three tensors lie: each without gaps, with them, or latent and rope piece in rows of 640 bytes."""
QUERY_SCALES = ("contiguous", "gaps", "heads first", "one for all heads")

_UNFIT = (math.nan, math.inf, -math.inf, -1.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Scaling(Plain):
    """factors: one of FACTORS. exponent: log2 of what keys are multiplied by and query rows divided by. special:
    (request, key, scale) of keys whose scale is replaced. as_bytes: elements of 8 bits are given as uint8. Where rows
    lie in three tensors: quantised: the query comes with scales, which lie in one of QUERY_SCALES; places: see PLACES.
    """

    factors: str = "equal"
    exponent: int = 0
    special: tuple[tuple[int, int, float], ...] = ()
    as_bytes: bool = False
    quantised: bool = True
    query_scales: str = "contiguous"
    places: str = "contiguous"


class OfRows(Plain):
    """A decode's case: what follows from `dtype`, from `rows`, the format of rows that have scales, and from `rope`,
    columns of their rope piece."""

    dtype: str
    rows: str | None
    scaling: Scaling
    rope: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPE_OF[Dtype(self.dtype)]

    @property
    def written(self) -> torch.dtype:
        """The output's dtype."""
        return TORCH_DTYPE_OF[DECODE_OUT_DTYPES[Dtype(self.dtype)]]

    @property
    def columns(self) -> int:
        """Columns of a row of the query."""
        return LATENT + self.rope

    @property
    def rows_apart(self) -> bool:
        """Whether the cache has three tensors."""
        return self.rows is not None and ROWS[self.rows].apart

    @property
    def quantises(self) -> bool:
        """Whether the query is bf16 and the cache needs one with scales."""
        return self.rows_apart and not self.scaling.quantised


def name_of(row: RowFormat) -> str | None:
    """What a case calls rows with scales; None for others, which are those of the query's dtype."""
    return format_of(row) if row.scales else None


@st.composite
def scalings(draw: Any, row: RowFormat, hostile: bool = True) -> Scaling:
    """Factors that become scales of a cache's rows; hostile: some keys' scales are 0 or, where that is not a factor
    like any other, no positive number."""
    if row.scales is None:
        return Scaling()
    factors = draw(st.sampled_from(FACTORS))
    exponent = draw(st.sampled_from((0, 30) if factors == "far apart" else (0, 0, 0, -60, -30, 30, 60)))
    unlike = _UNFIT if row.apart else (-(2.0 ** (exponent - 8)),)  # of a usual size, else scores are beyond float32's
    scale = st.sampled_from((0.0, 2.0 ** (exponent - 40), *unlike))
    key = st.sampled_from((0, 1, 2, 63, 64, 127, 128, 300))
    special = st.lists(st.tuples(st.integers(0, 4), key, scale), max_size=3)
    return Scaling(
        factors=factors,
        exponent=exponent,
        special=tuple(draw(special)) if hostile and draw(st.integers(0, 3)) == 3 else (),
        as_bytes=draw(st.booleans()),
        quantised=draw(st.sampled_from((True, True, False))) if row.apart else True,
        query_scales=draw(st.sampled_from(QUERY_SCALES)) if row.apart else "contiguous",
        places=draw(st.sampled_from(PLACES)) if row.apart else "contiguous",
    )


def sizes(scaling: Scaling, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Factors of rows, as `factors` says."""
    if scaling.factors == "an outlier":
        chosen = torch.randint(64, shape, generator=generator) == 0
        return torch.where(chosen, 20.0, 1.0)
    if scaling.factors == "spread":
        return 10 ** (-5 * torch.rand(shape, generator=generator))
    if scaling.factors == "far apart":
        return torch.exp2(-torch.randint(97, shape, generator=generator).float())
    return torch.ones(shape)


def stored(format: str, numbers: torch.Tensor, sizes: torch.Tensor, rounded: bool) -> dict[str, torch.Tensor]:
    """Rows [..., 576] of float32 numbers times sizes [...], near enough, as each of the cache's tensors has them.
    What is not finite makes its row's scales so."""
    row = ROWS[format]
    latent = numbers[..., :LATENT].unflatten(-1, (row.scales_per_row, -1))
    scales = latent.abs().amax(-1) / 448
    scales = torch.where(scales == 0, 1.0, scales)
    if rounded:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (latent / scales[..., None]).to(E4M3).flatten(-2)
    rope, grown = numbers[..., LATENT:], scales * sizes[..., None]
    if row.apart:
        return {"cache": codes, "rope_cache": (rope / scales).bfloat16(), "scale_cache": grown[..., 0]}
    pieces = codes, grown, (rope * sizes[..., None]).bfloat16()
    return {"cache": torch.cat([piece.view(torch.uint8) for piece in pieces], -1)}


def replace_scale(format: str, rows: dict[str, torch.Tensor], place: tuple[int, int], scale: float) -> None:
    """Another scale for the key at a place of a cache: of the four that a row may hold, for all."""
    row = ROWS[format]
    if row.apart:
        rows["scale_cache"][place] = scale
    else:
        start = row.scales_offset
        assert start is not None
        rows["cache"][place][start : start + 4 * row.scales_per_row].view(torch.float32).fill_(scale)


def bytes_of(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor as bytes [..., bytes of a row]."""
    whole = {name: x[..., None] if name == "scale_cache" else x for name, x in rows.items()}
    return {name: x.contiguous().view(torch.uint8) for name, x in whole.items()}
