"""Quantised queries of `tsmla selftest`: a case's rows, the call that a variant serves, and what it must give."""

from __future__ import annotations

import torch

from ..identity.variant import QuantizeQVariant
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.quantize_q import mla_quantize_q
from . import cache
from .cases import QueryCase
from .memory import Memory
from .reference import Judged, compared

_GAP = 32
"""Elements between the rows of strided results."""


def run(variant: QuantizeQVariant, case: QueryCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator so that `variant` serves; results lie in memory of `memory`."""
    outer, gap = (case.batch, case.q_len, case.heads), _GAP if case.strided else 0
    nope, rope = (x.unflatten(0, outer) for x in cache.keys(case, TORCH_DTYPE_OF[variant.dtype]))
    latent_piece, rope_piece = variant.row.pieces
    results = {
        piece.name: memory.allocate((*outer, piece.columns), TORCH_DTYPE_OF[piece.dtype], gap=gap)
        for piece in (latent_piece, rope_piece)
    }
    results["scales"] = memory.allocate(outer, torch.float32, gap=gap)
    mla_quantize_q(
        (nope, rope) if case.strided else torch.cat([nope, rope], -1),
        power_of_two_scales=case.power_of_two,
        nope_out=results["latent"],
        rope_out=results["rope"],
        scale_out=results["scales"],
        enable_pdl=pdl,
    )
    return results


def check(variant: QuantizeQVariant, case: QueryCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the results of `run` with torch: equal bytes, or any NaN for a NaN."""
    expected = cache.stored(case, variant.row, TORCH_DTYPE_OF[variant.dtype])
    return compared(results, {name: x.view(results[name].shape) for name, x in expected.items()})
