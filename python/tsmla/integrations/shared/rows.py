"""Rows of caches that engines name by a dtype alone: every element of it, and no scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...identity.dtype import Dtype
from ...identity.row_format import ROWS, RowFormat


def _plain(row: RowFormat) -> bool:
    """Whether a row is of one dtype, without scales, so that engines' names of dtypes do for it."""
    return row.scales is None and len({piece.dtype for piece in row.pieces}) == 1


SHAPES = {row.columns: row for row in ROWS.values() if _plain(row)}
"""Elements of a cache row, latent and rope -> a row that has so many."""


def plain_row(dtype: Dtype, columns: int) -> RowFormat | None:
    """Return the row of so many elements of a dtype; None where there is none."""
    return next((row for row in ROWS.values() if _plain(row) and row.dtype is dtype and row.columns == columns), None)


def shapes_in_words() -> str:
    """Return all shapes of rows, as sentences of refusal list them."""
    return listed(
        f"{row.columns} ({' and '.join(f'{piece.columns} {piece.name}' for piece in row.pieces)})"
        for row in SHAPES.values()
    )


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
