"""tsmla_decode of caches whose rows have scales, and what it must give, from rows as stored: SnapMLA's, with a scale
for each key, and DeepSeek's 656 bytes, which are attended to as the bf16 rows that `mla_read_cache` makes of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from cache_rows import E4M3, restored, stored
from decode_reference import LATENT, ROPE, WEIGHT_SCALE, Problem, make_problem, run, with_sinks
from tsmla.operators import checks
from tsmla.problems.decode import FEW_ROWS
from tsmla.problems.pages import put_keys
from tsmla.problems.sums import narrow_products, weight_dtype

WHOLE, WHOLE_BYTES = "fp8_ds_mla", 656
"""Rows with scales that lie in one tensor."""
ROW_BYTES = 640
"""Bytes of rows whose latent and rope pieces lie side by side."""
LENGTHS = {
    "one key": [1],
    "around a tile": [63, 64, 65, 127, 128, 129],
    "empty and short": [0, 1, 0, 5, 16, 17, 31, 33],
    "long and short": [16512, 3, 0, 700, 8192],
    "many": [37 * i % 1500 for i in range(70)],
}
"""Keys of requests on a GPU, where long calls are cheap."""


@dataclasses.dataclass
class Stored:
    """Rows [.., 512], [.., 64] and [..] as they are stored: e4m3, bf16 and float32."""

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, power_of_two: bool = True) -> Stored:
        """Make the stored rows of [.., 576] numbers."""
        flat = torch.cat((rows.reshape(-1, LATENT + ROPE), rows.new_zeros(1, LATENT + ROPE)))  # some, in any case
        bytes = stored(flat[:, :LATENT], flat[:, LATENT:], "snapmla", power_of_two=power_of_two)
        outer = rows.shape[:-1]
        return cls(
            bytes["cache"][:-1].view(E4M3).view(*outer, LATENT),
            bytes["rope_cache"][:-1].view(torch.bfloat16).view(*outer, ROPE),
            bytes["scale_cache"][:-1].view(torch.float32).view(outer),
        )

    def times(self, factor: float | torch.Tensor) -> Stored:
        """Rows of other magnitude, with the same numbers."""
        return Stored(self.latent, self.rope, self.scales * factor)

    @property
    def numbers(self) -> torch.Tensor:
        """[.., 576] in float64."""
        return torch.cat((self.latent.double(), self.rope.double()), -1) * self.scales.double()[..., None]

    def __getitem__(self, index: Any) -> Stored:
        return Stored(self.latent[index], self.rope[index], self.scales[index])


@dataclasses.dataclass
class Scaled:
    """A call: `problem` says lengths, pages and what hides keys; queries [batch, q_len, heads] or [tokens, heads], and
    each request's keys, as they are stored; the cache's tensors."""

    problem: Problem
    queries: Stored
    keys: list[Stored]
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        given = (self.queries.latent, self.queries.rope, self.queries.scales)
        return {"query": given, "kv_cache": self.cache, **changes}


def make_scaled(
    seq_lens: list[int],
    q_len: int | Sequence[int],
    heads: int,
    page_size: int = 64,
    *,
    query: torch.Tensor | None = None,
    keys: list[torch.Tensor] | None = None,
    key_factor: float = 1.0,
    query_factor: float = 1.0,
    power_of_two: bool = True,
    side_by_side: bool = False,
    **fields: Any,
) -> Scaled:
    """Random inputs, or given numbers, as `make_problem` places them: what no key holds is NaN, scales, too. The
    scales of keys and queries are multiplied by factors. side_by_side: views of rows of 640 bytes."""
    problem = make_problem(seq_lens, q_len, heads, page_size=page_size, **fields)
    if query is not None:
        problem.query.copy_(query)
    rows = [x.float() for x in problem.rows] if keys is None else keys
    queries = Stored.of(problem.query.float(), power_of_two).times(query_factor)
    kept = [Stored.of(own, power_of_two).times(key_factor) for own in rows]
    cache = cache_of_nan(problem.kv_cache.shape[0], page_size, side_by_side)
    for name, tensor in zip(("latent", "rope", "scales"), cache, strict=True):
        put_keys(tensor, problem.block_tables, [getattr(own, name) for own in kept])
    return Scaled(problem, queries, kept, cache)


def cache_of_nan(
    pages: int, page_size: int, side_by_side: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache full of NaN, scales, too, with gaps between rows and pages. side_by_side: views of rows of 640 bytes."""
    row = ROW_BYTES if side_by_side else LATENT + 16
    pool = torch.full((pages, page_size + 1, row), 0xFF, dtype=torch.uint8, device="cuda")[:, :page_size]
    latent = pool[..., :LATENT].view(E4M3)
    if side_by_side:
        rope = pool[..., LATENT:].view(torch.bfloat16)
    else:
        rope = torch.full((pages, page_size, ROPE + 8), math.nan, device="cuda").bfloat16()[..., :ROPE]
    scales = torch.full((pages, 3 * page_size + 1), math.nan, device="cuda")[:, 1::3]
    return latent, rope, scales


def rounds(arch: str, query_rows: int) -> bool:
    """Whether keys of 656 bytes are rounded to bf16 before they are multiplied, in a batch of so many query rows (query
    tokens x heads) a request. The kernel of few does not: `tsmla_decode`."""
    return not (arch == "sm_90a" and query_rows <= FEW_ROWS)


def as_bf16(arch: str, query_rows: int) -> dict[str, bool]:
    """What a call of rows that are rounded is given so that bf16 rows give its very bits: on Blackwell, few query rows
    of bf16 go to pairs of CTAs, those of 656 bytes to single ones, but with `batch_invariant`, which is for pairs."""
    return {"batch_invariant": True} if arch != "sm_90a" and query_rows <= 64 else {}


def make_whole(
    seq_lens: list[int],
    q_len: int | Sequence[int],
    heads: int,
    page_size: int = 64,
    *,
    keys: list[torch.Tensor] | None = None,
    power_of_two: bool = False,
    rounded: bool = True,
    **fields: Any,
) -> Problem:
    """A problem whose cache holds DeepSeek's rows of random or given numbers, NaN wherever no key is, and whose `rows`
    are the numbers that these are read as: `rounded` to bf16 or, as the kernel for few query rows has them, not."""
    problem = make_problem(seq_lens, q_len, heads, page_size=page_size, **fields)
    plain = problem.kv_cache
    pool = torch.full((len(plain), page_size + 1, WHOLE_BYTES), 0xFF, dtype=torch.uint8, device="cuda")
    problem.kv_cache = pool[:, :page_size]
    for request, numbers in enumerate(problem.rows if keys is None else keys):
        if not len(numbers):
            continue
        numbers = numbers.bfloat16()
        bytes = stored(numbers[:, :LATENT], numbers[:, LATENT:], WHOLE, power_of_two=power_of_two)
        problem.rows[request] = restored(bytes, WHOLE, torch.bfloat16 if rounded else torch.float32)
        put_keys(problem.kv_cache, problem.block_tables[request : request + 1], [bytes["cache"]])
    return problem


def as_plain(problem: Problem) -> torch.Tensor:
    """The bf16 cache that holds a problem's rows in the same pages."""
    pages, page_size = problem.kv_cache.shape[:2]
    cache = torch.full((pages, page_size, LATENT + ROPE), math.nan, device="cuda").bfloat16()
    put_keys(cache, problem.block_tables, problem.rows)
    return cache


def attend_stored(scaled: Scaled, how: str, batch_invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, base-2 LSE) in float64, of keys and queries as they are stored. how: "exact"; "folded", with weights
    that hold the scale of their key beside the largest of their row, rounded as kernels do; "cast", with e4m3 of weight
    times scale as it is, which loses what kernels must not lose. Scores are what the GPU's tensor cores leave of them,
    where a kernel multiplies e4m3: not that of few query rows, which takes no `batch_invariant` calls."""
    problem = scaled.problem
    *outer, heads, _ = problem.query.shape
    queries = scaled.queries
    latent, rope = queries.latent.reshape(-1, heads, LATENT), queries.rope.reshape(-1, heads, ROPE)
    factors = queries.scales.reshape(-1, heads)
    outputs = torch.zeros(len(latent), heads, LATENT, dtype=torch.float64, device=latent.device)
    lses = torch.full((len(latent), heads), -math.inf, dtype=torch.float64, device=latent.device)
    few = problem.cum_q is None and problem.most * heads <= FEW_ROWS and not batch_invariant
    for request, span in enumerate(problem.spans):
        for token, place in enumerate(span):
            seen = problem.keys(request, token)
            if not seen:
                continue
            own = scaled.keys[request][seen.start : seen.stop]
            c, s = own.latent.double(), own.scales.double()
            pieces = (latent[place], rope[place], factors[place]), (own.latent, own.rope, own.scales)
            products = None if few else narrow_products(*pieces)
            if products is None:
                products = latent[place].double() @ c.T + rope[place].double() @ own.rope.double().T
                products = products * factors[place].double()[:, None] * s
            scores = products * problem.softmax_scale
            lse = scores.logsumexp(-1)
            if how == "exact":
                weights = (scores - lse[:, None]).exp() * s
            elif how == "folded":
                shares = scores + s.log()
                highest = shares.amax(-1, keepdim=True)
                kept = weight_dtype(checks.arch_of(latent.device), E4M3)
                rounded = ((shares - highest).exp() * WEIGHT_SCALE).to(kept).double() / WEIGHT_SCALE
                weights = rounded * (highest - lse[:, None]).exp()
            else:
                highest = scores.amax(-1, keepdim=True)
                weights = ((scores - highest).exp() * s).to(E4M3).double() * (highest - lse[:, None]).exp()
            outputs[place] = weights @ c * problem.output_scale
            lses[place] = lse / math.log(2)
    return with_sinks(problem, outputs.unflatten(0, outer), lses.unflatten(0, outer))


def check_scaled(scaled: Scaled, **changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator and judge what it gives: rows no further from float64 than twice what PyTorch with rounded
    weights is, plus rounding of the output."""
    out, lse = run(scaled.problem, **scaled.arguments(**changes))
    judge_scaled(scaled, out, lse, changes.get("batch_invariant", False))
    return out, lse


def judge_scaled(scaled: Scaled, out: torch.Tensor, lse: torch.Tensor | None, batch_invariant: bool = False) -> None:
    exact, exact_lse = attend_stored(scaled, "exact", batch_invariant)
    plain, _ = attend_stored(scaled, "folded", batch_invariant)
    spoken_for = sorted({token for span in scaled.problem.spans for token in span})
    heads = out.shape[-2]
    got, exact, plain = (x.double().reshape(-1, heads, LATENT)[spoken_for].flatten(0, 1) for x in (out, exact, plain))
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} outputs are not finite"
    size = exact.norm(dim=-1)
    assert (got[size == 0] == 0).all(), "a row without keys must give 0"
    kept = size > 0
    off, plain_off = ((x - exact)[kept].norm(dim=-1) / size[kept] for x in (got, plain))
    allowed = 2 * plain_off.max() + torch.finfo(out.dtype).eps if kept.any() else 0.0
    assert (off <= allowed).all(), (
        f"a row is off by {off.max():.2e} of its norm; rounded weights: {plain_off.max():.2e}"
    )
    if lse is not None:
        got_lse, exact_lse = (x.double().reshape(-1, heads)[spoken_for] for x in (lse, exact_lse))
        finite = exact_lse.isfinite()
        assert torch.equal(got_lse.where(~finite, 0), exact_lse.where(~finite, 0)), "a row without keys: -inf"
        bound = 2e-5 + 3e-6 * exact_lse[finite].abs()
        error = (got_lse - exact_lse)[finite].abs()
        assert (error <= bound).all(), f"LSE (base 2) is off by {error.max():.2e}"


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference by that of the exact one, all rows together."""
    return float((got.double() - exact).norm() / exact.norm())


def keys_with_outliers(seq_lens: list[int], case: str) -> list[torch.Tensor]:
    """Keys [keys, 576] as models have them: scales from 1e-5 to 1; one token 20 times as large as others; rope parts
    100 times as large as the rest."""
    found = []
    for length in seq_lens:
        rows = torch.randn(length, LATENT + ROPE, device="cuda")
        if case == "scales from 1e-5 to 1":
            rows *= 448 / 4 * 10 ** torch.empty(length, 1, device="cuda").uniform_(-5, 0)
        elif case == "a token 20 times as large":
            rows[length // 2, :LATENT] *= 20
        elif case == "rope 100 times as large":
            rows[:, LATENT:] *= 100
        found.append(rows)
    return found


OUTLIERS = ("scales from 1e-5 to 1", "a token 20 times as large", "rope 100 times as large")
MOST_OFF = 0.03
"""Relative error of an output, against float64 on the same stored rows: what e4m3 weights make of it at most."""


def outlier_call(case: str, seq_lens: list[int], heads: int, **fields: Any) -> Scaled:
    """Scores of a few units, whatever keys have."""
    keys = keys_with_outliers(seq_lens, case)
    largest = max(float(own.norm(dim=-1).max()) for own in keys)
    return make_scaled(seq_lens, 1, heads, keys=keys, softmax_scale=8 / largest, **fields)
