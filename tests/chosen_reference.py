"""Calls of tsmla_decode whose query tokens choose their keys, and the same attention as requests of one token each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import tsmla
from decode_reference import LATENT, ROPE, Problem, Sight, judge, workspace
from tsmla.identity.row_format import ROWS
from tsmla.problems.lists import named_slots, random_lists, union_of
from tsmla.problems.rows import numbers_in, stored_as


@dataclasses.dataclass
class Chosen:
    """One call. `alone` is the same attention over each token's own rows, which `judge` knows how to compute."""

    alone: Problem
    kv_cache: torch.Tensor
    query: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None

    def arguments(self, **changes: Any) -> dict[str, Any]:
        tokens, _, heads, _ = self.alone.query.shape
        shape = self.query.shape[:-1]
        needed = tsmla.decode_workspace_size(tokens, 1, heads, max(1, self.indices.shape[-1]))
        return {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": workspace(needed),
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": self.query.shape[-1] - LATENT,
            "block_tables": None,
            "seq_lens": None,
            "max_seq_len": None,
            "softmax_scale": self.alone.softmax_scale,
            "output_scale": self.alone.output_scale,
            "out": torch.full((*shape, LATENT), math.nan, dtype=self.alone.out_dtype, device="cuda"),
            "lse": torch.full(shape, math.nan, device="cuda"),
            "return_lse": True,
            "sinks": self.alone.sinks,
            "lse_includes_sink": self.alone.lse_includes_sink,
            "indices": self.indices,
            "topk_length": self.topk_length,
            **changes,
        }


def make_chosen(
    shape: tuple[int, ...],
    heads: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    row: str | None = None,
    pages: int = 12,
    page_size: int = 64,
    page_gap: int = 1,
    outside: float = 0.2,
    lengths: list[int] | None = None,
    indices: torch.Tensor | None = None,
    rope: int = ROPE,
    **fields: Any,
) -> Chosen:
    """Random lists of slots for query tokens of this shape, of which a share is outside of the cache; rows that nobody
    chooses, and the gaps between pages, are NaN.

    row: the format of the cache's rows, if they are not of `dtype`.
    rope: columns of the rope piece, of rows of `dtype`.
    lengths: of each token's list; without, lists count whole.
    """
    tokens = math.prod(shape)
    if indices is None:
        indices = random_lists(tokens, top_k, (pages, page_size), outside=outside)
    named = named_slots(indices, pages * page_size, lengths)
    pool = torch.full((pages, page_size + page_gap, LATENT + rope), math.nan).to(dtype)
    used = union_of(named)
    pool[used // page_size, used % page_size] = torch.randn(len(used), LATENT + rope).to(dtype)
    pool = pool.to("cuda")
    cache = numbers = pool[:, :page_size]
    if row is not None:
        cache = stored_as(ROWS[row], pool)[:, :page_size]
        numbers = numbers_in(ROWS[row], cache)
    rows = [numbers[found // page_size, found % page_size] for found in (own.to("cuda") for own in named)]
    query = torch.randn(tokens, 1, heads, LATENT + rope, device="cuda").to(dtype)
    alone = Problem(
        query, rows, cache, indices, [len(own) for own in rows], sight=Sight(causal=False), **fields
    )  # fmt: skip
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda").view(shape)
    return Chosen(
        alone, cache, query.view(*shape, heads, -1), indices.to(torch.int32).to("cuda").view(*shape, top_k), given
    )  # fmt: skip


def check_chosen(chosen: Chosen, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the operator and judge what it gives."""
    arguments = chosen.arguments(**changes)
    out, lse = tsmla.tsmla_decode(**arguments)
    torch.cuda.synchronize()
    assert out.shape == arguments["out"].shape and lse.shape == arguments["lse"].shape
    tokens = len(chosen.alone.query)
    judge(chosen.alone, out.view(tokens, 1, *out.shape[-2:]), lse.view(tokens, 1, -1))
    return out, lse


def in_two_tensors(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rope pieces of a cache [pages, page_size, 576] in tensors of their own, with gaps of NaN of
    different sizes between rows and pages."""
    pages, page_size, _ = cache.shape
    found = []
    for piece, gap, page_gap in ((cache[..., :LATENT], 32, 2), (cache[..., LATENT:], 16, 0)):
        room = torch.full((pages, page_size + page_gap, piece.shape[-1] + gap), math.nan).to(cache.dtype).to("cuda")
        found.append(room[:, :page_size, : piece.shape[-1]])
        found[-1].copy_(piece)
    return found[0], found[1]
