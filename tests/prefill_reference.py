"""What tsmla_prefill must compute, in float64, and how close a kernel has to come."""

from __future__ import annotations

import dataclasses
import math

import torch
from judgement import assert_right
from plain_sums import in_plain_tensors
from tsmla.operators import checks
from tsmla.problems.prefill import rmse_of_rounding
from tsmla.problems.reference import Attended, Tolerance
from tsmla.problems.sums import narrow_products, weight_dtype


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """What prefill writes for inputs of `dtype` unless asked for something else."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


@dataclasses.dataclass
class Problem:
    """One call's inputs: ragged packs with NaN in every row that belongs to no sequence. seen: by a key mask, [tokens,
    keys of the longest sequence]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    lengths_q: list[int]
    lengths_kv: list[int]
    softmax_scale: float
    sinks: torch.Tensor | None = None
    lse_includes_sink: bool = False
    seen: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Query rows that belong to a sequence."""
        return sum(self.lengths_q)


def make_problem(
    lengths_q: list[int],
    lengths_kv: list[int],
    heads_q: int,
    heads_kv: int,
    d_qk: int,
    d_v: int,
    dtype: torch.dtype,
    device: str,
    *,
    magnitude: float = 1.0,
    slack: int = 0,
    slack_kv: int | None = None,
    padded_entries: int = 0,
    strided: bool = False,
) -> Problem:
    """Random inputs of the given lengths. `slack` NaN rows follow the last sequence, `slack_kv` that of the keys where
    they are other ones; `padded_entries` repeats end the cumulative lengths; `strided` makes key and value slices of
    one tensor, as the up-projection gives them."""
    slack_kv = slack if slack_kv is None else slack_kv

    def pack(rows, heads, dim, slack=slack_kv):
        tensor = torch.empty(rows + slack, heads, dim, device=device, dtype=dtype)
        tensor[:rows] = torch.randn(rows, heads, dim, device=device).mul_(magnitude).to(dtype)
        tensor[rows:] = math.nan
        return tensor

    def ends(lengths):
        total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch.cat([total, total[-1:].expand(padded_entries)]).to(device)

    query = pack(sum(lengths_q), heads_q, d_qk, slack)
    if strided:
        both = pack(sum(lengths_kv), heads_kv, d_qk + d_v)
        key, value = both[..., :d_qk], both[..., d_qk:]
    else:
        key, value = pack(sum(lengths_kv), heads_kv, d_qk), pack(sum(lengths_kv), heads_kv, d_v)
    return Problem(query, key, value, ends(lengths_q), ends(lengths_kv), lengths_q, lengths_kv, d_qk**-0.5)


@in_plain_tensors
def attend(problem: Problem, causal: bool, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, natural-log LSE) of the rows in sequences, in float64; `compute` is where products are rounded to:
    torch.float64 for the reference, the input dtype for what plain PyTorch in that dtype would give.

    PyTorch multiplies no 8-bit tensors like these; for them, the probabilities, relative to the row's largest, are
    rounded to what kernels make of them. Scores are what the GPU's tensor cores leave of them, where that is less than
    floats do.
    """
    eight_bits = compute.itemsize == 1
    if eight_bits:
        rounded, compute = weight_dtype(checks.arch_of(problem.query.device), compute), torch.float32
    group = problem.query.shape[1] // problem.key.shape[1]
    outputs, lses = [], []
    q_start = kv_start = 0
    for len_q, len_kv in zip(problem.lengths_q, problem.lengths_kv, strict=True):
        q = problem.query[q_start : q_start + len_q]
        k = problem.key[kv_start : kv_start + len_kv].repeat_interleave(group, 1)
        v = problem.value[kv_start : kv_start + len_kv].to(compute).repeat_interleave(group, 1)
        q_start, kv_start = q_start + len_q, kv_start + len_kv
        products = [narrow_products(q[:, head], k[:, head]) for head in range(q.shape[1])]
        if any(own is None for own in products):
            scores = torch.einsum("qhd,khd->hqk", q.to(compute), k.to(compute)).double() * problem.softmax_scale
        else:
            scores = torch.stack(products) * problem.softmax_scale
        if causal:
            column = torch.arange(len_kv, device=q.device)
            row = torch.arange(len_q, device=q.device)[:, None]
            scores.masked_fill_(column > row + len_kv - len_q, -math.inf)
        if problem.seen is not None:
            own = problem.seen[q_start - len_q : q_start, :len_kv].to(scores.device)
            scores.masked_fill_(~own, -math.inf)
        if len_kv == 0:
            lse = scores.new_full(scores.shape[:2], -math.inf)
        else:
            lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        if eight_bits and len_kv:
            top = weights.amax(-1, keepdim=True).clamp_min(1e-300)
            weights = (weights / top).to(rounded).double() * top
        outputs.append(torch.einsum("hqk,khd->qhd", weights.to(compute), v).double())
        lses.append(lse.T)
    out, lse = torch.cat(outputs), torch.cat(lses)
    if problem.sinks is None:
        return out, lse
    sinks = problem.sinks.double()
    out *= torch.sigmoid(torch.where(lse == -math.inf, 0.0, lse - sinks))[..., None]
    return out, torch.logaddexp(lse, sinks) if problem.lse_includes_sink else lse


@in_plain_tensors
def judge(problem: Problem, causal: bool, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Assert that a kernel's result is right, as far as `assert_right` asks, and rows beyond the sequences are
    untouched NaN."""
    exact, plain = (Attended(*attend(problem, causal, dtype)) for dtype in (torch.float64, problem.query.dtype))
    tokens = problem.tokens
    assert out[tokens:].isnan().all(), "rows that belong to no sequence were written"
    assert lse is None or lse[tokens:].isnan().all(), "LSE rows that belong to no sequence were written"
    rmse = rmse_of_rounding(weight_dtype(checks.arch_of(problem.query.device), problem.query.dtype), out.dtype)
    tolerance = Tolerance(rmse, 0.0, (1e-5, 2e-6))
    assert_right(out[:tokens], None if lse is None else lse[:tokens], exact, plain, tolerance)
