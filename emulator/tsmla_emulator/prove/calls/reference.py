"""What attention must give, in float64, and how far a call's results are from it."""

from __future__ import annotations

import math

import torch
from tsmla.identity.arch import Arch
from tsmla.problems.sums import Factors, products

from ...run.host.tensor import in_plain_tensors

SINKS = (-1.0, 12.0)
"""Least and largest sink: below and above the LSE of most rows."""
_OF_A_ROW = 4
"""How many times as far off as all rows together one row may be: few keys' roundings do not even out."""


@in_plain_tensors
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int = 2**31,
    limits: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
    made: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural-log LSE of one sequence in float64; a row without keys gives 0 and -inf.

    window: how many keys before its own a causal query sees at most.
    limits: how many of the first keys each query sees at most.
    bits: those of a key mask, [queries, keys or more].
    made: products of queries and keys that tensor cores make, where these lose so much that results are judged by them.
    """
    q, k, v = q.double().unflatten(1, (k.shape[1], -1)), k.double(), v.double()
    scores = (torch.einsum("qhgd,khd->hgqk", q, k) if made is None else made) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = scores.masked_fill(~seen.triu(len(k) - len(q) - window), -math.inf)
    if limits is not None:
        hidden = torch.arange(len(k)) >= limits[:, None]
        scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    if bits is not None:
        scores = scores.masked_fill(~bits[:, : len(k)].to(scores.device), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2), lse.flatten(0, 1).T


@in_plain_tensors
def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count one more key for each head, whose value is 0."""
    share = torch.sigmoid(torch.where(lse == -math.inf, 0.0, lse - sinks.double()))
    return out * share[..., None], torch.logaddexp(lse, sinks.double())


@in_plain_tensors
def merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural-log LSE over the keys of both results."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [out * (own - lse).exp().nan_to_num(0.0)[..., None] for out, own in (one, other)]
    return parts[0] + parts[1], lse


def summed_as_hardware(arch: Arch, query: Factors, keys: Factors) -> torch.Tensor:
    """Return products of queries [queries, heads, d] and keys [keys, d], of which all heads see the same, as tensor
    cores sum them: [1, heads, queries, keys]."""
    whole = isinstance(query, torch.Tensor)
    pieces = [query] if isinstance(query, torch.Tensor) else [*query]
    rows = [piece.flatten(0, 1) for piece in pieces]
    made = products(rows[0] if whole else tuple(rows), keys, arch)
    return made.unflatten(0, pieces[0].shape[:2]).transpose(0, 1)[None]


@in_plain_tensors
def judged(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: torch.Tensor,
    expected_lse: torch.Tensor,
    step: float,
    dtype: torch.dtype,
) -> tuple[str, str | None]:
    """Return how far results are from float64, in words, and what is wrong if that is more than a relative RMSE of
    `step`, _OF_A_ROW times that in a row, or 1e-5 of an LSE.

    dtype: of queries and keys. Products of float16 numbers have 22 bits, so that each of a score's additions rounds: an
        LSE of such may be off by a millionth of itself more.
    """
    rmse = float((out.double() - expected).norm() / expected.norm())
    problems = [] if rmse <= step else [f"relative RMSE {rmse:.1e} is above {step:.1e}"]
    measured = f"relative RMSE {rmse:.1e}"
    of_rows = (out.double() - expected).norm(dim=-1) / (expected.norm(dim=-1) + torch.finfo(out.dtype).tiny)
    if not (of_rows <= _OF_A_ROW * step).all():
        problems.append(f"relative RMSE of a row {of_rows.max():.1e} is above {_OF_A_ROW * step:.1e}")
    if lse is not None:
        some = expected_lse.isfinite()
        off = (lse.double() - expected_lse)[some].abs()
        more = 1e-6 * expected_lse[some].abs() if dtype == torch.float16 else 0.0
        measured += f", LSE off by {off.max():.1e}"
        if not (off <= 1e-5 + more).all() or not torch.equal(lse.double()[~some], expected_lse[~some]):
            problems.append(f"LSE is off by {off.max():.1e}, or rows without keys do not give -inf")
    return measured, "; ".join(problems) or None
