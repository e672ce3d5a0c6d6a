"""Checks and conversions that `mla_write_cache` and `mla_read_cache` share: a cache's format, scale and tensors."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..identity.dtype import Dtype
from ..identity.row_format import ROWS, RowFormat
from . import checks, examine
from .checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

_MAX_ROWS = 2**31 - 1
_EIGHT_BITS = frozenset(name for name, row in ROWS.items() if row.pieces[0].dtype is Dtype.E4M3)
_SCALED = frozenset(name for name in _EIGHT_BITS if ROWS[name].scales is None)
"""Formats that have one scale for the whole cache."""


def typed(cache: torch.Tensor, format: str) -> torch.Tensor:
    """View a cache of bytes as e4m3 where its format has 8-bit rows; return any other cache as it is."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype is torch.uint8 and format in _EIGHT_BITS else cache


def is_countable(cache: torch.Tensor) -> bool:
    """Whether a cache's rows can be numbered in int32, as kernels number them."""
    return cache.shape[0] * cache.shape[1] <= _MAX_ROWS


def is_usual(format: str, scale: float) -> bool:
    """Whether `checked` would accept these arguments and return them unchanged."""
    return (
        type(format) is str
        and type(scale) is float
        and (scale == 1.0 or (format in _SCALED and SMALLEST_FLOAT32 <= scale <= LARGEST_FLOAT32))
    )


def checked(operator: str, format: str, scale: float) -> tuple[str, float]:
    """Check a cache's format and scale, and return them. Only `_SCALED` ones take a scale other than 1."""
    if not isinstance(format, str) or format not in ROWS:
        raise ArgumentError(f"{operator}: format is {checks.spelled(format)}; accepted: {', '.join(ROWS)}")
    scale = checks.number(operator, "scale", scale)
    if format not in _SCALED and scale != 1.0:
        raise ArgumentError(f"{operator}: scale is {scale}; it must be 1, because a cache of {format} rows has none")
    if not SMALLEST_FLOAT32 <= scale <= LARGEST_FLOAT32:
        raise ArgumentError(
            f"{operator}: scale is {scale}; it must be from {SMALLEST_FLOAT32:.3g} (the smallest normal float32) to "
            f"{LARGEST_FLOAT32:.3g}"
        )
    return format, scale


def row_of(examination: examine.Examination, format: str) -> RowFormat:
    """Return the rows of a format, after checking that rope_cache and scale_cache are given if and only if it has
    them."""
    operator, row = examination.operator.name, ROWS[checked(examination.operator.name, format, 1.0)[0]]
    for name in ("rope_cache", "scale_cache"):
        if row.apart and examination.tensors[name] is None:
            where = "cache, rope_cache and scale_cache"
            raise ArgumentError(f"{operator}: {name} is not given; {format} rows lie in {where}")
        if not row.apart and examination.tensors[name] is not None:
            raise ArgumentError(f"{operator}: {name} is given; {format} rows lie in cache alone")
    return row


def check_size(examination: examine.Examination) -> None:
    """Refuse a cache with more rows than int32 can number."""
    pages, page_size = (examination.sizes[name] for name in ("pages", "page_size"))
    if pages * page_size > _MAX_ROWS:
        raise ArgumentError(
            f"{examination.operator.name}: cache has {pages} pages of {page_size} rows; at most {_MAX_ROWS} rows fit a "
            "cache"
        )
