"""The float64 reference of attention, and how close a kernel has to come.

A kernel is compared with two computations in torch: one in float64, and a plain one that rounds as the kernel's dtype
makes everyone round. It may be twice as far from the former as the latter is, plus a rounding step of its output: in
each element, and in the root of the mean square of each row. (A row over many keys has small outputs, of which the
bound of an element, a step of 1, says little.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .kept import kept
from .memory import bits

LARGEST_ERROR = 1e6
"""The largest error that is told, as a fraction of what is allowed. Larger ones, and NaN, are told as this."""
_SINKS = (0.5, -math.inf, 4.0, -2.0, 30.0)


class Attended(NamedTuple):
    """Output, and log-sum-exp in the operator's unit."""

    out: torch.Tensor
    lse: torch.Tensor


class Tolerance(NamedTuple):
    """Tolerances of an operator.

    rmse: relative RMSE allowed.
    rmse_of_plain: relative RMSE allowed in addition, for each that plain torch has.
    lse: absolute and relative error allowed.
    """

    rmse: float
    rmse_of_plain: float
    lse: tuple[float, float]


class Judged(NamedTuple):
    """The verdict on a call. error: the largest, as a fraction of what is allowed. problems: a sentence for each."""

    error: float
    problems: list[str]


def compared(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Judged:
    """Compare results of which every bit is known: equal bits, or any NaN for a NaN. The error is the number of
    others."""
    problems, wrong = [], 0
    for name, want in expected.items():
        got = results[name]
        both_nan = want.float().isnan() & got.float().isnan()
        differing = int(((bits(got) != bits(want)) & ~both_nan).sum())
        if differing:
            problems.append(f"{differing} of {got.numel()} elements of {name} differ from torch's")
        wrong += differing
    return Judged(float(wrong), problems)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    compute: torch.dtype,
    weight_scale: float = 1.0,
    products: torch.Tensor | None = None,
    weight_dtype: torch.dtype = torch.float8_e4m3fn,
) -> Attended:
    """Return attention of rows q [rows, d] to keys k [keys, d] with values v [keys, d_v], in float64; LSE natural,
    [rows].

    seen [rows, keys]: which keys a row sees.
    compute: what products are rounded to; float64 rounds nothing.
    weight_scale: with an 8-bit `compute`, weights of at most 1 are multiplied by it and rounded to `weight_dtype`.
    products: of q and k [rows, keys], where tensor cores lose so much of them that results are judged by what is left
        (`narrow_products`).
    """
    if not k.shape[0]:
        return Attended(
            torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64, device=q.device),
            torch.full((q.shape[0],), -math.inf, dtype=torch.float64, device=q.device),
        )
    eight_bits = compute.itemsize == 1
    exact = torch.float64 if eight_bits else compute
    if products is None:
        products = (q.to(exact) @ k.to(exact).T).double()
    scores = (products * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[:, None]).exp()
    if eight_bits:
        top = weights.amax(-1, keepdim=True).clamp_min(1e-300)
        weights = (weights / top * weight_scale).to(weight_dtype).double() / weight_scale * top
    return Attended((weights.to(exact) @ v.to(exact)).double(), lse)


@kept("prefill", "masked", "decode", "gathered")
def sinks_of(heads: int) -> torch.Tensor:
    """Make sinks [heads] float32: some leave nearly everything, some nearly nothing, and some do nothing."""
    return torch.tensor([_SINKS[head % len(_SINKS)] for head in range(heads)], device="cuda")


def with_sinks(attended: Attended, sinks: torch.Tensor, in_lse: bool) -> Attended:
    """Return what rows [.., heads, d] become when each head has one more key with the score `sinks` and the value 0."""
    lse = torch.logaddexp(attended.lse, sinks.double())
    share = (attended.lse - lse.nan_to_num(0.0, neginf=0.0)).exp()
    return Attended(attended.out * share[..., None], lse if in_lse else attended.lse)


def judge(
    got: Attended,
    exact: Attended,
    plain: Attended,
    tolerance: Tolerance,
    *,
    factor: float = 1.0,
    has_lse: bool = True,
) -> Judged:
    """Compare a kernel's results with the two computations.

    factor: of the output.
    has_lse: without it, `got.lse` is not looked at.
    """
    problems = []
    out, finfo = got.out.double(), torch.finfo(got.out.dtype)
    error, plain_error, norms = out - exact.out, plain.out - exact.out, exact.out.norm(dim=-1)
    allowed = 2 * _largest(plain_error) + finfo.eps * exact.out.abs().clamp_min(abs(factor))
    least = finfo.smallest_normal * finfo.eps * math.sqrt(out.shape[-1])
    of_row = 2 * (plain_error.norm(dim=-1) + tolerance.rmse * norms) + least
    size = float(norms.norm().clamp_min(1e-30))
    rmse_allowed = tolerance.rmse + tolerance.rmse_of_plain * float(plain_error.norm()) / size
    errors = {
        "the output": error / allowed,
        "a row's RMSE": error.norm(dim=-1) / of_row,
        "the output's relative RMSE": error.norm() / size / rmse_allowed,
    }
    if (out[norms == 0] != 0).any():
        problems.append("a row that sees no key does not give 0")
    if has_lse:
        lse, empty = got.lse.double(), exact.lse == -math.inf
        if not torch.equal(lse == -math.inf, empty):
            problems.append("LSE is not -inf for a row that sees no key, or is for another")
        absolute, relative = tolerance.lse
        off = (lse - exact.lse) / (absolute + relative * exact.lse.abs())
        errors["LSE"] = torch.where(empty, 0.0, off)
    problems += [
        f"{name} is off by {_largest(each):.3g} times what is allowed{_place_of(each)}"
        for name, each in errors.items()
        if _largest(each) > 1
    ]
    return Judged(max(map(_largest, errors.values())), problems)


def _largest(errors: torch.Tensor) -> float:
    """Return the largest magnitude: LARGEST_ERROR for NaN or more, 0 where there are no errors."""
    return float(errors.abs().nan_to_num(LARGEST_ERROR).max().clamp_max(LARGEST_ERROR)) if errors.numel() else 0.0


def _place_of(errors: torch.Tensor) -> str:
    """Return ", at [row, head, ...]" of the largest magnitude or the first NaN; nothing where there is one number."""
    if not errors.dim():
        return ""
    worst = errors.abs().nan_to_num(math.inf).argmax()
    return f", at {[int(index) for index in torch.unravel_index(worst, errors.shape)]}"
