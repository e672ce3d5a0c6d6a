"""Attention in float64, and how far results are from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .control import Values

LOG2_E = 1.4426950408889634
FAINT = 128
"""How many first keys of each sequence are a twentieth as large as the others: row maxima grow until every kernel
rescales."""


def packed(
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    heads: int,
    dtype: torch.dtype,
    dims: tuple[int, int] = (192, 128),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make query [sum(q), heads, d], key [sum(k), heads, d] and value [sum(k), heads, dv] of sequences, on the GPU.
    dims: d, of query and key, and dv, of value."""
    query = 4 * torch.randn(sum(lengths_q), heads, dims[0], device="cuda")
    key = torch.randn(sum(lengths_kv), heads, dims[0], device="cuda")
    value = torch.randn(sum(lengths_kv), heads, dims[1], device="cuda")
    for of_one in key.split(list(lengths_kv)):
        of_one[:FAINT] *= 0.05
    return query.to(dtype), key.to(dtype), value.to(dtype)


def batched(
    sequences: int, queries: int, keys: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make standard normal query, key and value [sequences, tokens, heads, dim] on the GPU. dims: of query, of
    value."""
    sizes = (queries, dims[0]), (keys, dims[0]), (keys, dims[1])
    query, key, value = (torch.randn(sequences, tokens, heads, dim, device="cuda").to(dtype) for tokens, dim in sizes)
    return query, key, value


def choosing(
    tokens: int, heads: int, keys: int, top_k: int, width: int = 576, unused: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Make bf16 query [tokens, heads, width] and rows [keys, width], whose first 512 columns are values, and lists of
    rows [tokens, top_k], int32, all on the GPU; and return them with what each token's attention is.

    unused: the distance between entries of a list that are no row's; 0: there are none.
    """
    rows = torch.randn(keys, width, device="cuda")
    rows[:FAINT] *= 0.05
    query = (4 * torch.randn(tokens, heads, width, device="cuda")).bfloat16()
    lists = torch.stack([torch.randperm(keys)[:top_k].sort().values for _ in range(tokens)])
    if unused:
        lists[:, ::unused] = keys
    expected = []
    for asked, chosen in zip(query.cpu().split(1), lists, strict=True):
        seen = rows.bfloat16().cpu()[chosen[chosen < keys]][:, None]
        expected.append(attention(asked, seen, seen[..., :512], width**-0.5, causal=False))
    return query, rows.bfloat16(), lists.int().to("cuda"), expected


def to_choose(tokens: int, heads: int, keys: int, width: int = 576) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make bf16 query [tokens, heads, width], few rows [4096, width], and lists of `keys` of these, at random, on the
    GPU: where rows lie does not matter to modelled time."""
    query = torch.randn(tokens, heads, width, device="cuda").bfloat16()
    rows = torch.randn(4096, width, device="cuda").bfloat16()
    return query, rows, torch.randint(len(rows), (tokens, keys), dtype=torch.int32).to("cuda")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of one sequence: out [q, heads, dv] and the natural LSE [q, heads], both float64.

    query [q, heads, d], key [k, heads, d] and value [k, heads, dv], on a CPU; or with one head of key and value for
        all.
    causal: the last query sees the last key.

    Rows without keys are 0 and -inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    scores = torch.einsum("qhd,khd->qhk", query, key.expand(-1, query.shape[1], -1)) * scale
    if causal:
        hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(1 + len(key) - len(query))
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num()
    return torch.einsum("qhk,khd->qhd", weights, value.expand(-1, query.shape[1], -1)), lse


def compared(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: Iterable[tuple[torch.Tensor, torch.Tensor]],
    base: float = 1.0,
) -> Values:
    """Compare results [rows, heads, dv] and, if given, [rows, heads] with those of the sequences in order.

    base: LOG2_E where the LSE is of base 2, whose difference is then given in natural units.
    """
    outs, lses = (torch.cat(parts) for parts in zip(*expected, strict=True))
    got = out.cpu().double()
    finite = bool(got.isfinite().all()) and bool((got != 0).any())
    relative = float((got - outs).norm() / outs.norm()) if finite else float("inf")
    off = None if lse is None else float((lse.cpu().double() / base - lses).abs().max())
    return Values(relative, off)


def ends(lengths: Sequence[int]) -> torch.Tensor:
    """Return where sequences of these lengths begin and end, int32, on the GPU."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
