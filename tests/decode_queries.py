"""Queries of tsmla_decode as engines have them: in pieces, and with strides of any order."""

from __future__ import annotations

import math

import torch

LAYOUTS = {
    "joined, with gaps": (((0, 1, 2), 16),),
    "joined, heads first": (((2, 0, 1), 0),),
    "pieces": (((0, 1, 2), 0), ((0, 1, 2), 0)),
    "latent heads first, rope a slice": (((2, 0, 1), 0), ((0, 1, 2), 128)),
    "rope heads first": (((0, 1, 2), 0), ((2, 0, 1), 0)),
    "other orders": (((1, 0, 2), 16), ((2, 1, 0), 48)),
}
"""Strides of the query's tensors, as (batch, token and head from the outermost to the innermost, elements between
rows)."""
WIDTHS = (512, 64)


def laid_out(query: torch.Tensor, name: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """A joined query, or its pieces, in one of LAYOUTS. All around them is NaN."""
    layouts = LAYOUTS[name]
    found = []
    for piece, (order, gap) in zip(query.split(WIDTHS, -1) if len(layouts) > 1 else (query,), layouts, strict=True):
        shape = [piece.shape[dim] for dim in order]
        around = torch.full((shape[0], shape[1] + 1, shape[2], piece.shape[-1] + gap), math.nan, device=query.device)
        first = gap // 32 * 16
        inner = around.to(query.dtype)[:, : shape[1], :, first : first + piece.shape[-1]]
        found.append(inner.permute(*(order.index(dim) for dim in range(3)), 3).copy_(piece))
    return tuple(found) if len(found) > 1 else found[0]
