"""Decodes of a query whose parts an engine has apart, for `bench_decode`, whose own call has it joined:

    P=benchmarks.query_pieces
    python -m benchmarks decode --against pieces=$P:pieces copied=$P:copied contiguous=$P:contiguous

The latent part is a view of [heads, tokens, 512], as the product with W_UK gives it, and the rope part a slice of
[tokens, heads, 192], as the projection does (vLLM). `pieces` decodes them as they are, `copied` joins them first, in
the same graph. `contiguous` is `pieces` with both parts without gaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .bench_decode import LATENT, ROPE, Case


def pieces(case: Case) -> Callable[[], torch.Tensor]:
    return dataclasses.replace(case, query=_as_engines_have_them(case)).ours()


def copied(case: Case) -> Callable[[], torch.Tensor]:
    parts, joined = _as_engines_have_them(case), torch.empty_like(case.whole_query)
    decode = dataclasses.replace(case, query=joined).ours()

    def launch() -> torch.Tensor:
        torch.cat(parts, -1, out=joined)
        return decode()

    return launch


def contiguous(case: Case) -> Callable[[], torch.Tensor]:
    latent, rope = (part.contiguous() for part in case.whole_query.split((LATENT, ROPE), -1))
    return dataclasses.replace(case, query=(latent, rope)).ours()


def _as_engines_have_them(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    requests, q_len, heads, _ = case.whole_query.shape
    latent, rope = case.whole_query.flatten(0, 1).split((LATENT, ROPE), -1)
    product = latent.transpose(0, 1).contiguous()
    projection = torch.zeros(requests * q_len, heads, 192, device="cuda").to(rope.dtype)
    projection[..., -ROPE:] = rope
    shape = (requests, q_len)
    return product.transpose(0, 1).unflatten(0, shape), projection[..., -ROPE:].unflatten(0, shape)
