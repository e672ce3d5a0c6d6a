"""Which of a model's decodes are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...identity.arch import Arch
from ...identity.dtype import Dtype
from ...identity.row_format import RowFormat
from ...identity.support import DECODE_OUT_DTYPES, why_unsupported
from ...identity.variant import DecodeVariant
from .heads import name_of

DTYPES = [torch.float16, torch.bfloat16]
"""Dtypes of models."""


class Kinds(NamedTuple):
    """What a decode reads and writes: dtypes of its query and output, and the cache's rows."""

    query: Dtype
    out: Dtype
    row: RowFormat


def kinds_of(query: Dtype | None, row: RowFormat | None) -> Kinds | None:
    """Return what a decode with this query and these rows reads and writes; None where there is none of either."""
    return None if query is None or row is None else Kinds(query, DECODE_OUT_DTYPES[query], row)


def why_no_model(dtype: torch.dtype) -> str | None:
    """Return a sentence that says which dtypes of models are served; None for one of them."""
    if dtype in DTYPES:
        return None
    return f"tsmla serves models in {' and '.join(map(name_of, DTYPES))}, not in {name_of(dtype)}"


def why_not_from_8_bits(dtype: torch.dtype, cache: str) -> str | None:
    """Return a sentence that says which models have a cache of 8 bits, called `cache`; None for one of them."""
    if dtype is torch.bfloat16:
        return None
    return f"tsmla decodes an {cache} cache into bfloat16 (--dtype bfloat16), and the model is in {name_of(dtype)}"


def no_kernel(arch: Arch | None, kinds: Kinds | None, gathers: bool, cache: str, columns: int) -> Iterator[str]:
    """Yield why the kernel that a layer needs does not exist.

    gathers: keys are read one by one. cache, columns: what errors call the cache, and elements of its rows.
    """
    if kinds is None:
        yield f"tsmla has no {cache} cache with rows of {columns} elements"
    elif arch is not None and (
        reason := why_unsupported(DecodeVariant(arch, kinds.query, kinds.out, True, kinds.row, gathers))
    ):
        yield f"tsmla's {reason}"
