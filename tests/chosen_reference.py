"""Calls of tsmla_decode whose query tokens choose their keys, and the same attention as requests of one token each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import tsmla
from decode_reference import LATENT, ROPE, Problem, Sight, judge, workspace
from decode_rows import Scaled, Stored, cache_of_nan, judge_scaled
from tsmla.identity.row_format import ROWS
from tsmla.problems.lists import named_slots, random_lists, union_of
from tsmla.problems.rows import numbers_in, stored_as


@dataclasses.dataclass
class Chosen:
    """One call. `alone` is the same attention over each token's own rows, which `judge` knows how to compute; where
    rows have a scale each, `scaled` is, which `judge_scaled` knows."""

    alone: Problem
    kv_cache: torch.Tensor | tuple[torch.Tensor, ...]
    query: torch.Tensor | tuple[torch.Tensor, ...]
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    scaled: Scaled | None = None

    def judge(self, out: torch.Tensor, lse: torch.Tensor, batch_invariant: bool = False) -> None:
        """Judge what the operator gave."""
        tokens = len(self.alone.query)
        results = out.view(tokens, 1, *out.shape[-2:]), lse.view(tokens, 1, -1)
        if self.scaled is None:
            judge(self.alone, *results)
        else:
            judge_scaled(self.scaled, *results, batch_invariant)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        tokens, _, heads, _ = self.alone.query.shape
        shape = (*self.indices.shape[:-1], heads)
        needed = tsmla.decode_workspace_size(tokens, 1, heads, max(1, self.indices.shape[-1]))
        return {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": workspace(needed),
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": self.alone.query.shape[-1] - LATENT,
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
    power_of_two: bool = True,
    key_factor: float = 1.0,
    query_factor: float = 1.0,
    **fields: Any,
) -> Chosen:
    """Random lists of slots for query tokens of this shape, of which a share is outside of the cache; rows that nobody
    chooses, and the gaps between pages, are NaN.

    row: the format of the cache's rows, if they are not of `dtype`.
    rope: columns of the rope piece, of rows of `dtype`.
    lengths: of each token's list; without, lists count whole.
    power_of_two, key_factor, query_factor: of scales that lie apart; see `make_scaled`.
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
    if row is not None and not ROWS[row].apart:
        cache = stored_as(ROWS[row], pool)[:, :page_size]
        numbers = numbers_in(ROWS[row], cache)
    found = [own.to("cuda") for own in named]
    rows = [numbers[own // page_size, own % page_size] for own in found]
    query = torch.randn(tokens, 1, heads, LATENT + rope, device="cuda").to(dtype)
    alone = Problem(
        query, rows, cache, indices, [len(own) for own in rows], sight=Sight(causal=False), **fields
    )  # fmt: skip
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda").view(shape)
    lists = indices.to(torch.int32).to("cuda").view(*shape, top_k)
    if row is not None and ROWS[row].apart:
        kept = Stored.of(pool[:, :page_size].float(), power_of_two).times(key_factor)
        cache = cache_of_nan(pages, page_size)
        used = used.to("cuda")
        for name, tensor in zip(("latent", "rope", "scales"), cache, strict=True):
            tensor[used // page_size, used % page_size] = getattr(kept, name)[used // page_size, used % page_size]
        queries = Stored.of(query.float(), power_of_two).times(query_factor)
        scaled = Scaled(alone, queries, [kept[own // page_size, own % page_size] for own in found], cache)
        pieces = tuple(x.view(*shape, *x.shape[2:]) for x in (queries.latent, queries.rope, queries.scales))
        return Chosen(alone, cache, pieces, lists, given, scaled)
    return Chosen(alone, cache, query.view(*shape, heads, -1), lists, given)


def check_chosen(chosen: Chosen, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the operator and judge what it gives."""
    arguments = chosen.arguments(**changes)
    out, lse = tsmla.tsmla_decode(**arguments)
    torch.cuda.synchronize()
    assert out.shape == arguments["out"].shape and lse.shape == arguments["lse"].shape
    chosen.judge(out, lse, changes.get("batch_invariant", False))
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
