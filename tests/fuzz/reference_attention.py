"""Attention rows in float64, with what rounding may make of them, and the judgement of a kernel's results.

What a kernel may lose is bounded from how it must work, not from how one does: products of inputs are added in float32,
or as tensor cores add them (`tsmla.problems.sums`); probabilities relative to some reference enter the product with the
values in the inputs' precision (e4m3 where these have 8 bits; float16 in Hopper's prefill, and with scales), and the
output is rounded once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from tsmla.identity.arch import Arch
from tsmla.identity.support import LATENT_DIM
from tsmla.problems.sums import products, sums_of

_SCORES = 2.0**-22
"""What a score may be off, relative to the sum of its products' magnitudes: float32, added in any order."""
_LOGARITHM = 2.0**-21
"""What an exponent may be off, relative to the logarithm that is added to it: twice what the instruction may."""

LEAST = 2.0**-126
"""Weights and factors below float32's normal numbers are zeros: `ex2.approx.ftz` has no others."""
_KEPT_IN_16_BITS = 2.0**-23
"""What partial results may be off that are kept in float16, relative to the largest of their row, which is 1/4 at least
there: numbers below 2**-14 have steps of 2**-24."""

_FAR = 30
"""e ** -30 of the largest weight is nothing beside it, whatever the number of keys in a case."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """How results are rounded. probability: the largest relative error of a rounded probability. underflow: the largest
    error of one that is too small for its format, relative to the row's largest. out: dtype of the output. kept: the
    largest error of partial results, relative to the largest of a row."""

    probability: float
    underflow: float
    out: torch.dtype
    kept: float


def precision(dtype: torch.dtype, out_dtype: torch.dtype, kept_in_16_bits: bool = False) -> Precision:
    """The precision of kernels that multiply weights of `dtype`, or of e4m3 where it has 8 bits. kept_in_16_bits:
    partial results are, where keys are split."""
    kept = _KEPT_IN_16_BITS if kept_in_16_bits else 0.0
    if dtype.itemsize == 1:
        return Precision(2.0**-4, 2.0**-14, out_dtype, kept)
    underflow = 2.0**-24 if dtype == torch.float16 else LEAST
    return Precision(torch.finfo(dtype).eps / 2, underflow, out_dtype, kept)


@dataclasses.dataclass(frozen=True)
class Cores:
    """Tensor cores that make scores, of a real GPU or emulated with their sums. dtype: of the columns that they
    multiply, but for rope columns of rows that are stored divided by their scales, which are bf16. query_scales [rows]:
    of such queries."""

    arch: Arch
    dtype: torch.dtype
    query_scales: torch.Tensor | None = None

    @property
    def narrow(self) -> bool:
        """Whether scores are judged by what these cores leave of them: a loss on top would hide faults."""
        return sums_of(self.arch, self.dtype).narrow

    def products(self, q: torch.Tensor, k: torch.Tensor, key_scales: torch.Tensor | None) -> torch.Tensor:
        """What q [rows, d] times the transpose of k [keys, d], numbers in float64, is to them."""
        if self.query_scales is None or key_scales is None:
            return products(q.to(self.dtype), k.to(self.dtype), self.arch)
        return products(self._stored(q, self.query_scales), self._stored(k, key_scales), self.arch)

    def _stored(self, rows: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows in pieces. A quotient is exact: numbers are what is stored, times the scale, in float64."""
        divided = rows / scales.double()[:, None]
        return divided[:, :LATENT_DIM].to(self.dtype), divided[:, LATENT_DIM:].bfloat16(), scales


@dataclasses.dataclass
class Rows:
    """What rows of attention must be, in float64, before the output's factor. LSEs are natural logarithms.

    mass: sum of weight x |value|. walk: square root of the sum of their squares, which is how far off the output is for
    each unit of random error in the weights. weakest: root of the sum of squared values, times the largest weight.
    lost: what a score may be off, at most. largest: score by magnitude. exponents: what logarithms of keys' scales add
    to scores, by magnitude. low, high: the range of the values of keys that may have the largest score, for what
    float32 makes of scores. shrunk: outputs by magnitude before a sink took its share of them; 0 where none did.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    walk: torch.Tensor
    weakest: torch.Tensor
    lost: torch.Tensor
    largest: torch.Tensor
    exponents: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    shrunk: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of the parts, of which there is at least one, one after the other."""
        fields = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(torch.cat, fields))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    cores: Cores | None = None,
    scales: torch.Tensor | None = None,
) -> Rows:
    """q [rows, d], k [keys, d], v [keys, d_v]; seen [rows, keys] says which keys a row sees. Keys that no row sees do
    not matter, NaN or not. cores: that make the scores; None for sums in float32. scales [keys]: of keys that are
    stored divided by them, whose probabilities a kernel rounds times their scales; positive if seen.

    Sums of 16 bits lose little, which is known from the case's numbers for one order of columns and allowed in any.
    """
    anyone = seen.any(0)
    q, k, v, seen = q.double(), k[anyone].double(), v[anyone].double(), seen[:, anyone]
    scales = None if scales is None else scales.double()[anyone]
    rows, dims = len(q), v.shape[1]
    if not seen.shape[1]:
        nothing, none = torch.zeros(rows, dims, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
        return Rows(nothing, none - math.inf, nothing, nothing, nothing, none, none, none, *[nothing] * 3)
    exact = q @ k.T
    lost = _SCORES * (q.abs() @ k.abs().T)
    if cores is not None:
        made = cores.products(q, k, scales)
        if cores.narrow:
            exact = made
        else:
            lost = lost.maximum((made - exact).abs())
    scores = (exact * scale).masked_fill(~seen, -math.inf)
    lost = (lost * scale).masked_fill(~seen, 0).amax(-1)
    top = scores.amax(-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[:, None]).exp()
    largest = scores.masked_fill(~seen, 0).abs().amax(-1)
    near = seen & (scores >= (top - _FAR - 4 * (lost + 2.0**-22 * largest))[:, None])
    low, high = _end(v, near, torch.amin, math.inf), _end(v, near, torch.amax, -math.inf)
    scales = torch.ones(len(v), dtype=torch.float64) if scales is None else scales
    weakest = (weights * scales).amax(-1, keepdim=True) * (seen.double() @ (v / scales[:, None]).square()).sqrt()
    ends = scales.min().log(), scales.max().log()
    most = max(ends[1] - ends[0], *map(abs, ends))  # relative to another key's, or to 1
    exponents = torch.full((rows,), float(most), dtype=torch.float64)
    walk = (weights.square() @ v.square()).sqrt()
    out, mass = weights @ v, weights @ v.abs()
    return Rows(out, lse, mass, walk, weakest, lost, largest, exponents, low, high, torch.zeros_like(out))


def with_sinks(rows: Rows, sinks: torch.Tensor | None, in_lse: bool) -> Rows:
    """The rows when each has a sink [rows], natural and scaled, that `in_lse` says whether the LSE counts."""
    if sinks is None:
        return rows
    sinks = sinks.double()
    share = torch.sigmoid(torch.where(rows.lse == -math.inf, 0.0, rows.lse - sinks))[:, None]
    return dataclasses.replace(
        rows,
        out=rows.out * share,
        lse=torch.logaddexp(rows.lse, sinks) if in_lse else rows.lse,
        mass=rows.mass * share,
        walk=rows.walk * share,
        weakest=rows.weakest * share,
        shrunk=torch.where(share == 1, 0.0, rows.out.abs()),
        # The share is anything where scores are not told apart.
        low=rows.low.clamp_max(0) * (sinks > -math.inf)[:, None] + rows.low * (sinks == -math.inf)[:, None],
        high=rows.high.clamp_min(0) * (sinks > -math.inf)[:, None] + rows.high * (sinks == -math.inf)[:, None],
    )


def _end(values: torch.Tensor, among: torch.Tensor, pick: Callable[..., torch.Tensor], other: float) -> torch.Tensor:
    """The least or the largest of values [keys, dims] for each row of among [rows, keys]; 0 for a row without any."""
    ends = pick(torch.where(among[..., None], values, other), 1)
    return torch.where(among.any(1)[:, None], ends, 0.0)


def tells_apart(expected: Rows) -> bool:
    """Whether scores are so small that float32 tells their weights apart: `judge` is for such, `judge_extreme` for
    others."""
    return not len(expected.lost) or float(_drift(expected).max()) < 1


def _drift(expected: Rows) -> torch.Tensor:
    """[rows, 1]: by how much the exponent of a weight may be off."""
    lost = expected.lost + 2.0**-23 * expected.largest + _LOGARITHM * expected.exponents
    return 2 * lost[:, None]


def judge(expected: Rows, out: torch.Tensor, lse: torch.Tensor | None, factor: float, given: Precision) -> None:
    """Assert that outputs [rows, d_v] and natural LSEs [rows] are right: each element within the worst that rounding
    can do, each row and all rows together within what it does to random values, so that zeros fail.

    factor: what the output was multiplied by before it was rounded. An LSE is within 1e-5 and what its scores lose.
    """
    empty, got = _without_keys(expected, out, lse, factor)
    size = abs(factor)
    exact = expected.out * factor
    error = (got - exact).abs()
    drift = _drift(expected)
    finfo = torch.finfo(given.out)
    last = finfo.eps / 2 * exact.abs() + finfo.smallest_normal * finfo.eps
    # A share below LEAST is 0. A row's sum of weights, and so its factor's inverse, may be 2**22 and more: the factor
    # times the share has steps of 2**-149.
    coarse = LEAST * (1 + size) * expected.shrunk
    lost = (given.probability + drift) * expected.mass
    faint = given.underflow * expected.weakest + given.kept * expected.weakest.amax(-1, keepdim=True)
    _within(error, size * (lost + 6 * faint) + coarse + last * 1.01, got, exact, "element")
    # Random errors of weights are as often too high as too low, but an error common to a row's scales its output.
    spread = (expected.out.square() + expected.walk.square()).sqrt()
    row_bound = size * ((given.probability + drift) * spread + 2 * faint).norm(dim=-1)
    row_bound += coarse.norm(dim=-1) + last.norm(dim=-1)
    _within(error.norm(dim=-1), row_bound, got.norm(dim=-1), exact.norm(dim=-1), "row")
    several = expected.walk.norm(dim=-1) < 0.999 * expected.mass.norm(dim=-1)
    certainty = min(1.0, 0.42 * (1 + 4 / math.sqrt(max(1, int(several.sum())))))
    total = size * ((certainty * given.probability + drift) * spread + 2 * faint).norm() + coarse.norm() + last.norm()
    _within(error.norm(), total, got.norm(), exact.norm(), "whole output")
    if lse is not None:
        off = (lse.double() - expected.lse)[~empty].abs()
        bound = 1e-5 + 2e-6 * expected.lse[~empty].abs() + expected.lost[~empty]
        bound += _LOGARITHM * expected.exponents[~empty]
        _within(off, bound, lse[~empty], expected.lse[~empty], "LSE")


def judge_extreme(expected: Rows, out: torch.Tensor, lse: torch.Tensor | None, factor: float, given: Precision) -> None:
    """Assert what remains true where scores are too large for float32 to tell them apart: nothing is NaN, an output
    lies between the values of keys that may have the largest score, and the LSE is within 1e-6 of the largest score, or
    of the sink where it is all there is, and what the score loses."""
    empty, got = _without_keys(expected, out, lse, factor)
    ends = torch.stack([expected.low * factor, expected.high * factor])
    finfo = torch.finfo(given.out)
    slack = 2 * given.probability * ends.abs().amax(0) + finfo.eps * ends.abs().amax(0) + finfo.smallest_normal
    slack += 32 * math.exp(-_FAR) * expected.weakest * abs(factor)  # of the keys that do not count, hundreds at most
    slack += given.kept * expected.weakest.amax(-1, keepdim=True) * abs(factor)
    # Where the logarithm of a key's scale is added to a score of base 2, the sum is rounded; so is a row's reference.
    rounded = 2 * 2.0**-24 * math.log2(math.e) * expected.largest * (expected.exponents > 0)
    slack += (torch.exp2(rounded) - 1)[:, None] * ends.abs().amax(0)
    outside = torch.maximum(ends.amin(0) - got, got - ends.amax(0)).clamp_min(0)
    _within(outside, slack, got, ends[0], "distance to the values of keys that may count, of element")
    if lse is not None:
        off = (lse.double() - expected.lse)[~empty].abs()
        size = expected.largest.maximum(expected.lse.abs())[~empty]
        bound = 1e-5 + 1e-6 * size + expected.lost[~empty]
        bound += _LOGARITHM * expected.exponents[~empty]
        _within(off, bound, lse[~empty], expected.lse[~empty], "LSE")


def _without_keys(
    expected: Rows, out: torch.Tensor, lse: torch.Tensor | None, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows see no key, and the output in float64, after what must hold of any."""
    got = out.double()
    inside = (expected.out * factor).abs() < torch.finfo(out.dtype).max
    assert inside.all(), f"the case is wrong: {int((~inside).sum())} of its exact outputs are beyond {out.dtype}"
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} outputs are not finite"
    empty = expected.lse == -math.inf
    assert (got[empty] == 0).all(), "a row that sees no key must give 0"
    if factor == 0:
        assert (got == 0).all(), "an output times 0 must be 0"
    if lse is not None:
        assert not lse.isnan().any(), f"{int(lse.isnan().sum())} of {lse.numel()} LSEs are NaN"
        wrong = (lse == -math.inf) != empty
        assert not wrong.any(), f"LSE is -inf, or is not, at row {int(wrong.nonzero()[0])}: -inf means no key"
        assert (lse[~empty] < math.inf).all(), "LSE is inf"
    return empty, got


def _within(error: torch.Tensor, bound: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    excess = (error - bound).reshape(-1)
    if not len(excess) or bool((excess <= 0).all()):
        return
    at = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)) if error.dim() else ()
    raise AssertionError(
        f"{what} {place or ''} is {float(got.reshape(-1)[at]):.6g} instead of {float(exact.reshape(-1)[at]):.6g}: off "
        f"by {float(error.reshape(-1)[at]):.3g}, allowed {float(bound.reshape(-1)[at]):.3g}; "
        f"{int((excess > 0).sum())} of {len(excess)} are off"
    )
