"""Forms of the Hopper decode: the kernels that a variant's calls choose from, and their sizes. No device code."""

from __future__ import annotations

from tsmla.variant import DecodeVariant

from ...parts.precision import PartialRows
from ..few_rows.geometry import FEW_ROWS, FewRowsGeometry
from .geometry import PAIR, DecodeGeometry

ONE_CTA = "one CTA"
"""Takes any call."""
PAIR_OF_CTAS = "pair of CTAs"
"""Where rows are converted: calls whose CTAs come in pairs, which convert for each other."""
WARP_PRODUCTS = "warp products"
"""Where rows are converted: calls of few query rows, by a kernel of its own, `sm90/few_rows`."""
FLOAT32_PARTIALS = "few rows"
"""Where rows have a scale each, apart: calls of few query rows. They have few bytes of partial results, so these stay
in float32: finding out by how much to lift others takes longer. (The text is in the names of the kernel's entries, by
which records and profiles know them.)"""


def forms_of(variant: DecodeVariant) -> dict[str, DecodeGeometry | FewRowsGeometry]:
    """A variant's forms, each with its sizes."""
    one = DecodeGeometry.of(variant)
    forms: dict[str, DecodeGeometry | FewRowsGeometry] = {ONE_CTA: one}
    if one.converts:
        forms[PAIR_OF_CTAS] = DecodeGeometry.of(variant, PAIR)
        forms[WARP_PRODUCTS] = FewRowsGeometry(one.stored)
    if one.scaled:
        forms[FLOAT32_PARTIALS] = DecodeGeometry.of(variant, float32_partials=True)
    return forms


def form_of_few_rows(variant: DecodeVariant) -> str:
    """What takes calls of up to FEW_ROWS query rows (query tokens x heads), unless they are batch-invariant or their
    requests vary in query tokens."""
    forms = forms_of(variant)
    return next((form for form in (WARP_PRODUCTS, FLOAT32_PARTIALS) if form in forms), ONE_CTA)


def partial_rows_of(variant: DecodeVariant, rows: int) -> PartialRows:
    """What partial results are kept as in such a call of `rows` query rows."""
    forms = forms_of(variant)
    return forms[form_of_few_rows(variant) if rows <= FEW_ROWS else ONE_CTA].partial_rows
