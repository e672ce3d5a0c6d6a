"""Prefill calls of `tsmla selftest`: a case's inputs, the call that a variant serves, and what it must give."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..identity.key_mask import MASK_BITS, words_for
from ..identity.support import NOPE_DIMS
from ..identity.variant import Dtype, PrefillVariant
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.prefill import tsmla_prefill
from .cases import MaskedCase, PrefillCase
from .kept import kept
from .memory import Memory, is_poison, surrounded
from .reference import Attended, Judged, Tolerance, attend, judge, sinks_of, with_sinks
from .sums import narrow_products, weight_dtype

_SLACK = 3
"""Rows behind the last sequence, at least: NaN in inputs, to stay untouched in results."""
_PADDED_ENTRIES = 2
"""Sequences of no tokens at the end of a batch, as captured graphs have them."""
_BLOCK = 64
"""Neighbouring keys of which a query with a mask sees some, or none."""
_GAP = 16
"""Elements between the rows of a strided query or output."""
_LSE = (1e-5, 2e-6)


_LEAST_VALUE = 0.5
"""The least of values of one sign."""


class _Problem(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    ends_q: torch.Tensor
    ends_kv: torch.Tensor
    scale: float


def run(variant: PrefillVariant, case: PrefillCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator so that `variant` serves; results lie in memory of `memory`."""
    given = _problem(case, variant.dtype, variant.d_qk, variant.d_v)
    k_scale, v_scale, output_scale = case.factors
    out_dtype = TORCH_DTYPE_OF[variant.out_dtype]
    results = {
        "out": memory.allocate((*given.query.shape[:2], variant.d_v), out_dtype, gap=_GAP if case.strided else 0)
    }
    if variant.lse:
        results["lse"] = memory.allocate(given.query.shape[:2], torch.float32)
    earlier = None
    if case.merges and variant.lse:
        for name, value in _earlier(case, variant.out_dtype, variant.d_v)._asdict().items():
            results[name][: value.shape[0]] = value
        earlier = results["out"], results["lse"]
    pieces = case.pieces and NOPE_DIMS[variant.d_qk] < variant.d_qk
    query, key = (_pieces(given.query), _shared_rope(given.key)) if pieces else (given.query, given.key)
    tsmla_prefill(
        query,
        key,
        given.value,
        None,
        given.ends_kv,
        max(case.lengths_kv),
        given.ends_kv.numel() - 1,
        given.scale,
        _causal(variant, case),
        False,
        given.ends_q,
        max(case.lengths_q),
        pdl,
        None if earlier else results["out"],
        k_scale,
        v_scale,
        output_scale,
        out_dtype,
        sinks=sinks_of(case.heads[0]) if case.sinks else None,
        lse_includes_sink=case.lse_includes_sink,
        lse=None if earlier else results.get("lse"),
        merge_into=earlier,
        key_mask=_words(case) if isinstance(case, MaskedCase) else None,
    )
    return results


def check(variant: PrefillVariant, case: PrefillCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the results of `run` with float64."""
    weights = weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype])
    over_its_keys = _expected(case, variant.dtype, variant.d_qk, variant.d_v, _causal(variant, case), weights)
    exact, plain = (_whole(variant, case, result) for result in over_its_keys)
    tokens = sum(case.lengths_q)
    out, lse = results["out"], results.get("lse", exact.lse)
    step = rmse_of_rounding(weights, out.dtype)
    judged = judge(
        Attended(out[:tokens], lse[:tokens]),
        exact,
        plain,
        Tolerance(step, 0.0, _LSE),
        factor=case.factors[1] * case.factors[2],
        has_lse=variant.lse,
    )
    for name, result in results.items():
        if not is_poison(result[tokens:]).all():
            judged.problems.append(f"{name} has rows that belong to no sequence and were written")
    return judged


def rmse_of_rounding(weights: torch.dtype, out: torch.dtype) -> float:
    """Return the relative RMSE that rounding explains: a step of the output; with weights of e4m3, a quarter of a step
    of these (half a step at most, 0.29 in the mean square, of weights that average 1.4 times the smallest of their
    binade)."""
    return torch.finfo(weights).eps / 4 if weights.itemsize == 1 else torch.finfo(out).eps


def _causal(variant: PrefillVariant, case: PrefillCase) -> bool:
    return case.causal if isinstance(case, MaskedCase) else variant.causal


@kept("prefill", "masked")
def _seen(case: MaskedCase) -> torch.Tensor:
    """Return which keys each query sees by the case's mask, [tokens, keys of the longest sequence]."""
    tokens, keys = sum(case.lengths_q), max(case.lengths_kv)
    blocks = torch.rand(tokens, -(-keys // _BLOCK), device="cuda").repeat_interleave(_BLOCK, 1)[:, :keys]
    seen = torch.rand(tokens, keys, device="cuda") < case.seen
    return seen if case.seen == 1.0 else seen & (blocks < 0.5)


@kept("prefill", "masked")
def _words(case: MaskedCase) -> torch.Tensor:
    """Return the mask's words. Bits that stand for no key of a query's are set."""
    seen = _seen(case)
    columns = (words_for(seen.shape[1]) + 1) * MASK_BITS
    bits = torch.ones(seen.shape[0] + _SLACK, columns, dtype=torch.bool, device="cuda")
    for rows, keys in zip(_rows(case.lengths_q), case.lengths_kv, strict=True):
        bits[rows, :keys] = seen[rows, :keys]
    return mask_words(bits)


def mask_words(bits: torch.Tensor) -> torch.Tensor:
    """Return the words of a key mask with these bits, [tokens, words x MASK_BITS] of bool."""
    words = (bits.unflatten(1, (-1, MASK_BITS)).long() << torch.arange(MASK_BITS, device=bits.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def _rows(lengths: tuple[int, ...]) -> list[slice]:
    ends = [0, *itertools.accumulate(lengths)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


@kept("prefill", "masked")
def _problem(case: PrefillCase, dtype: Dtype, d_qk: int, d_v: int) -> _Problem:
    heads_q, heads_kv = case.heads
    tokens_q, tokens_kv = sum(case.lengths_q), sum(case.lengths_kv)
    rows_kv = tokens_kv + case.unused_keys
    if case.strided:
        query = _poison(tokens_q, heads_q, d_qk + _GAP, dtype)[..., :d_qk]
        key, value = _poison(rows_kv, heads_kv, d_qk + d_v, dtype).split([d_qk, d_v], -1)
    else:
        query = _poison(tokens_q, heads_q, d_qk, dtype)
        key, value = _poison(rows_kv, heads_kv, d_qk, dtype), _poison(rows_kv, heads_kv, d_v, dtype)
    for tensor, tokens in ((query, tokens_q), (key, tokens_kv), (value, tokens_kv)):
        owned = tensor[:tokens]
        owned.copy_((torch.randn(owned.shape, device="cuda") * case.magnitude).to(owned.dtype))
    if case.one_sign:
        query[:tokens_q] = 0
        value[:tokens_kv] = (value[:tokens_kv].float().abs() + _LEAST_VALUE).to(value.dtype)
    if case.pieces:
        key[..., NOPE_DIMS[d_qk] :] = key[:, :1, NOPE_DIMS[d_qk] :]
    # The scores' factor is the usual one, whatever k_scale is.
    return _Problem(query, key, value, _ends(case.lengths_q), _ends(case.lengths_kv), d_qk**-0.5 / case.factors[0])


def _pieces(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d_nope = NOPE_DIMS[rows.shape[-1]]
    return rows[..., :d_nope], rows[..., d_nope:]


def _shared_rope(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nope, rope = _pieces(key)
    return nope, rope[:, 0]


@kept("prefill", "masked")
def _earlier(case: PrefillCase, out_dtype: Dtype, d_v: int) -> Attended:
    """Return what an earlier call may have left. Some rows, which see keys now, have no earlier result: an LSE of -inf
    beside NaN."""
    rows = sum(case.lengths_q), case.heads[0]
    out = torch.randn(*rows, d_v, device="cuda").to(TORCH_DTYPE_OF[out_dtype])
    lse = torch.randn(rows, device="cuda") * 3
    out[: case.lengths_q[0] : 3] = math.nan
    lse[: case.lengths_q[0] : 3] = -math.inf
    return Attended(out, lse)


def _whole(variant: PrefillVariant, case: PrefillCase, now: Attended) -> Attended:
    """Return what a call leaves that computes `now` over its own keys. Sinks count once, in the row over all keys."""
    if case.merges and variant.lse:
        now = _merged(_earlier(case, variant.out_dtype, variant.d_v), now)
    return with_sinks(now, sinks_of(case.heads[0]), case.lse_includes_sink) if case.sinks else now


def _merged(earlier: Attended, now: Attended) -> Attended:
    """Return the result over the keys of both."""
    lse = torch.logaddexp(earlier.lse.double(), now.lse)
    shares = ((one.lse.double() - lse.nan_to_num(0.0, neginf=0.0)).exp()[..., None] for one in (earlier, now))
    kept, added = (share * one.out.double().nan_to_num(0.0) for share, one in zip(shares, (earlier, now), strict=True))
    return Attended(kept + added, lse)


def _poison(tokens: int, heads: int, width: int, dtype: Dtype) -> torch.Tensor:
    return surrounded((tokens + _SLACK, heads, width), TORCH_DTYPE_OF[dtype])


def _ends(lengths: tuple[int, ...]) -> torch.Tensor:
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor([*ends, *ends[-1:] * _PADDED_ENTRIES], dtype=torch.int32, device="cuda")


@kept("prefill", "masked")
def _expected(
    case: PrefillCase, dtype: Dtype, d_qk: int, d_v: int, causal: bool, weights: torch.dtype
) -> tuple[Attended, Attended]:
    """Return what rows in sequences must give, over the call's own keys and without sinks: in float64 and in plain
    torch, which rounds weights to `weights` where inputs have 8 bits."""
    given = _problem(case, dtype, d_qk, d_v)
    factor = case.factors[1] * case.factors[2]
    both = []
    for compute in (torch.float64, TORCH_DTYPE_OF[dtype]):
        parts = []
        sequences = [
            tensor[: sum(lengths)].split(lengths)
            for tensor, lengths in (
                (given.query, case.lengths_q),
                (given.key, case.lengths_kv),
                (given.value, case.lengths_kv),
            )
        ]
        for q, k, v, rows in zip(*sequences, _rows(case.lengths_q), strict=True):
            masked = _seen(case)[rows, : k.shape[0]] if isinstance(case, MaskedCase) else None
            parts.append(_sequence(q, k, v, causal, masked, given.scale * case.factors[0], compute, weights))
        outs, lses = zip(*parts, strict=True)
        both.append(Attended(torch.cat(outs) * factor, torch.cat(lses)))
    return both[0], both[1]


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, masked: torch.Tensor | None, scale: float,
    compute: torch.dtype, weights: torch.dtype,
) -> Attended:  # fmt: skip
    """Return attention of one sequence, [tokens, heads, ...]. masked: which keys each query sees by a mask. Query heads
    of one key head are rows that see the same keys."""
    group = q.shape[1] // k.shape[1]
    last = torch.arange(q.shape[0], device="cuda") + (k.shape[0] - q.shape[0] if causal else k.shape[0])
    seen = torch.arange(k.shape[0], device="cuda") <= last[:, None]
    seen = (seen if masked is None else seen & masked).repeat_interleave(group, 0)
    heads = []
    for head in range(k.shape[1]):
        rows = q[:, head * group : (head + 1) * group].flatten(0, 1)
        products = narrow_products(rows, k[:, head])
        one = attend(rows, k[:, head], v[:, head], seen, scale, compute, products=products, weight_dtype=weights)
        heads.append(Attended(one.out.unflatten(0, (q.shape[0], group)), one.lse.unflatten(0, (q.shape[0], group))))
    return Attended(torch.cat([head.out for head in heads], 1), torch.cat([head.lse for head in heads], 1))
