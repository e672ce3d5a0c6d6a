"""Forms of the Hopper decode: the kernels that a variant's calls choose from, and their sizes. No device code."""

from __future__ import annotations

from tsmla.identity.variant import DecodeVariant, Dtype

from ...decode.partial_rows import PartialRows
from .row16.geometry import FEW_ROWS, FewRowsGeometry
from .row64.geometry import PAIR, DecodeGeometry

ONE_CTA = "one CTA"
"""The form that takes any call."""
PAIR_OF_CTAS = "pair of CTAs"
"""The form, where rows are converted, for calls whose CTAs come in pairs, which convert for each other."""
WARP_PRODUCTS = "warp products"
"""The form, where rows have scales or bf16 ones are gathered, for calls of few query rows: a kernel of its own,
`row16`."""


def forms_of(variant: DecodeVariant) -> dict[str, DecodeGeometry | FewRowsGeometry]:
    """A variant's forms, each with its sizes."""
    one = DecodeGeometry.of(variant)
    forms: dict[str, DecodeGeometry | FewRowsGeometry] = {ONE_CTA: one}
    if one.converts:
        forms[PAIR_OF_CTAS] = DecodeGeometry.of(variant, PAIR)
    if one.converts or one.scaled or (one.gathers and variant.dtype is Dtype.BF16):
        forms[WARP_PRODUCTS] = FewRowsGeometry(one.stored, one.gathers)
    return forms


def form_of_few_rows(variant: DecodeVariant) -> str:
    """The form that takes calls of up to FEW_ROWS query rows (query tokens x heads), unless they are batch-invariant or
    their requests vary in query tokens, or rows without scales have too few tiles for it (`entry`)."""
    return WARP_PRODUCTS if WARP_PRODUCTS in forms_of(variant) else ONE_CTA


def partial_rows_of(variant: DecodeVariant, rows: int) -> PartialRows:
    """The form in which such a call of `rows` query rows keeps partial results."""
    forms = forms_of(variant)
    return forms[form_of_few_rows(variant) if rows <= FEW_ROWS else ONE_CTA].partial_rows
