"""What tsmla_decode must compute, in float64, and how close a kernel has to come."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import tsmla
from judgement import assert_right
from plain_sums import in_plain_tensors
from tsmla.operators import checks
from tsmla.problems.pages import page_tables, put_keys
from tsmla.problems.reference import Attended, Tolerance
from tsmla.problems.sums import narrow_products, weight_dtype

LATENT, ROPE = 512, 64
WEIGHT_SCALE = 256.0
"""With 8-bit inputs, weights of at most 1 are rounded times this, so that the small ones are not lost."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """The scalars that decide which keys a query token sees, as tsmla_decode takes them."""

    causal: bool = True
    window_left: int = -1
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def position(self, key: int) -> int:
        """The global position of a key of this rank's cache."""
        block, within = divmod(key, self.cp_interleave)
        return (block * self.cp_world + self.cp_rank) * self.cp_interleave + within

    def keys(self, seq_len: int, causal_seq: int, visible: int, q_len: int, token: int) -> range:
        """The keys that query token `token` sees, by asking each key."""
        bound = causal_seq - (q_len - 1 - token if self.causal else 0)
        lowest = 0 if self.window_left < 0 else bound - 1 - self.window_left
        seen = [key for key in range(min(seq_len, visible)) if lowest <= self.position(key) < bound]
        keys = range(seen[0], seen[-1] + 1) if seen else range(0)
        assert len(keys) == len(seen)
        return keys


SHAPES = {
    "around a tile": ([127, 128, 129], 1, 16, Sight(), 64),
    "short": ([0, 1, 2, 63, 64, 65], 1, 6, Sight(), 16),
    "fewer keys than query tokens": ([0, 1, 3, 200], 4, 12, Sight(), 32),
    "two row tiles of 64": ([200, 70], 5, 24, Sight(), 128),
    "a row tile and a row": ([300], 1, 129, Sight(), 64),
    "full": ([70, 0, 130], 3, 16, Sight(causal=False), 64),
    "window": ([400, 30], 4, 8, Sight(window_left=70), 64),
    "window of one": ([140], 2, 8, Sight(window_left=0), 32),
    "one long request": ([1500], 1, 16, Sight(), 64),
    "long and short": ([1100, 3, 0, 300], 2, 32, Sight(), 64),
}
"""Keys of each request, query tokens, heads, what is seen and page size: of decodes that take a moment to emulate."""


@dataclasses.dataclass
class Problem:
    """One call's inputs; `rows` are each request's keys in order, which the cache holds in pages. With cum_q, requests
    have query tokens of a pack, `spans` of [tokens, heads, 576], and max_q_len at most."""

    query: torch.Tensor
    rows: list[torch.Tensor]
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: list[int]
    causal_seqs: list[int] | None = None
    visible: torch.Tensor | None = None
    sight: Sight = Sight()
    softmax_scale: float = (LATENT + ROPE) ** -0.5
    output_scale: float = 1.0
    sinks: torch.Tensor | None = None
    lse_includes_sink: bool = False
    cum_q: list[int] | None = None
    max_q_len: int | None = None

    @property
    def spans(self) -> list[range]:
        """The query tokens of each request: those of the pack that lie behind all before, at most max_q_len; without a
        pack, counted in all requests'."""
        if self.cum_q is None:
            batch, q_len, *_ = self.query.shape
            return [range(b * q_len, (b + 1) * q_len) for b in range(batch)]
        ends = [min(max(n, 0), len(self.query)) for n in self.cum_q]
        ends = list(itertools.accumulate(ends, max))
        return [range(a, min(b, a + self.most)) for a, b in itertools.pairwise(ends)]

    @property
    def most(self) -> int:
        """Query tokens of a request."""
        if self.cum_q is None:
            return self.query.shape[1]
        return self.max_q_len or max(1, *(b - a for a, b in itertools.pairwise(self.cum_q)))

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.query.dtype.itemsize == 1 else self.query.dtype

    def keys(self, request: int, token: int) -> range:
        length = self.seq_lens[request]
        bound = length if self.causal_seqs is None else self.causal_seqs[request]
        span = self.spans[request]
        visible = length if self.visible is None else int(self.visible.flatten()[span[token]])
        return self.sight.keys(length, bound, visible, len(span), token)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of tsmla_decode, with a workspace of just what the call needs full of NaN."""

        def lengths(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        heads, longest = self.query.shape[-2], changes.get("max_seq_len", max(*self.seq_lens, 1))
        most, varies = changes.get("max_q_len", self.most), self.cum_q is not None
        needed = tsmla.decode_workspace_size(len(self.seq_lens), most, heads, longest, varies=varies)
        packed: dict[str, Any] = {}
        if self.cum_q is not None:
            packed = {"cum_seq_lens_q": lengths(self.cum_q), "max_q_len": self.most}
            if changes.get("return_lse", True):
                packed["lse"] = torch.full(self.query.shape[:-1], math.nan, device="cuda")
        return {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": workspace(needed),
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": self.query.shape[-1] - LATENT,
            "block_tables": self.block_tables,
            "seq_lens": lengths(self.seq_lens),
            "max_seq_len": longest,
            "softmax_scale": self.softmax_scale,
            "output_scale": self.output_scale,
            "out": torch.full((*self.query.shape[:-1], LATENT), math.nan, dtype=self.out_dtype, device="cuda"),
            "causal_mask": self.sight.causal,
            "window_left": self.sight.window_left,
            "causal_seqs": None if self.causal_seqs is None else lengths(self.causal_seqs),
            "cp_world": self.sight.cp_world,
            "cp_rank": self.sight.cp_rank,
            "cp_interleave_size": self.sight.cp_interleave,
            "local_visible_lens": self.visible,
            "return_lse": True,
            "sinks": self.sinks,
            "lse_includes_sink": self.lse_includes_sink,
            **packed,
            **changes,
        }


def workspace(size: int) -> torch.Tensor:
    """A workspace of so many bytes, every word NaN as a float and absurdly large as an integer."""
    return torch.full((-(-size // 4),), math.nan, device="cuda").view(torch.int8)


def callers_workspace(heads: int, q_len: int) -> torch.Tensor:
    """What callers allocate who do not ask for the size: enough for any number of requests."""
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return workspace(4 * processors * heads * max(8, q_len) * (LATENT + 1))


def make_problem(
    seq_lens: list[int],
    q_len: int | Sequence[int],
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    *,
    magnitude: float = 1.0,
    extra_columns: int = 3,
    rows: list[torch.Tensor] | None = None,
    rope: int = ROPE,
    **fields: Any,
) -> Problem:
    """Random inputs, or given `rows`, with so many `rope` columns, in permuted pages. Unused pages, what follows the
    last key in its page, and the gaps between pages are NaN; unused page-table entries name no page. With a list q_len,
    requests have so many query tokens in a pack, behind whose last there is one more, NaN."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").mul_(magnitude).to(dtype)

    if rows is None:
        rows = [random(length, LATENT + rope) for length in seq_lens]
    tables, pages = page_tables(seq_lens, page_size, spare_pages=3, spare_columns=extra_columns)
    # Pages lie a row apart, as slices of a larger cache would.
    pool = torch.full((pages, page_size + 1, LATENT + rope), math.nan, device="cuda").to(dtype)
    cache = pool[:, :page_size]
    put_keys(cache, tables, rows)
    if isinstance(q_len, int):
        query = random(len(seq_lens), q_len, heads, LATENT + rope)
    else:
        cum_q = list(itertools.accumulate(q_len, initial=0))
        query = random(cum_q[-1] + 1, heads, LATENT + rope)
        query[-1] = torch.full(query.shape[1:], math.nan, device="cuda").to(dtype)
        fields = {"cum_q": cum_q, **fields}
    return Problem(query, rows, cache, tables.to("cuda"), seq_lens, **fields)


@in_plain_tensors
def attend(problem: Problem, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, base-2 LSE) in float64; `compute` is where products are rounded to: torch.float64 for the reference, the
    input dtype for what plain PyTorch in that dtype would give (for 8 bits, with weights rounded as kernels do). Scores
    are what the GPU's tensor cores leave of them, where that is less than floats do."""
    *outer, heads, _ = problem.query.shape
    query = problem.query.flatten(0, -3)
    eight_bits = compute.itemsize == 1
    rounded = torch.float64 if eight_bits else compute
    kept = weight_dtype(checks.arch_of(query.device), problem.query.dtype)
    outputs = torch.zeros(len(query), heads, LATENT, dtype=torch.float64, device=problem.query.device)
    lses = torch.full((len(query), heads), -math.inf, dtype=torch.float64, device=problem.query.device)
    for request, span in enumerate(problem.spans):
        for token, place in enumerate(span):
            keys = problem.keys(request, token)
            if not keys:
                continue
            k = problem.rows[request][keys.start : keys.stop]
            products = narrow_products(query[place], k)
            q, k = query[place].to(rounded), k.to(rounded)
            scores = ((q @ k.T).double() if products is None else products) * problem.softmax_scale
            lse = scores.logsumexp(-1)
            if eight_bits:
                highest = scores.amax(-1, keepdim=True)
                scaled = (scores - highest).exp() * WEIGHT_SCALE
                weights = scaled.to(kept).double() / WEIGHT_SCALE
                weights *= (highest - lse[:, None]).exp()
            else:
                weights = (scores - lse[:, None]).exp().to(compute)
            outputs[place] = (weights @ k[:, :LATENT]).double() * problem.output_scale
            lses[place] = lse / math.log(2)
    return with_sinks(problem, outputs.unflatten(0, outer), lses.unflatten(0, outer))


def with_sinks(problem: Problem, outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a problem's sinks make of its outputs and base-2 LSEs without them, in float64."""
    if problem.sinks is None:
        return outputs, lses
    sinks = problem.sinks.double().to(outputs.device)
    natural = lses * math.log(2)
    outputs = outputs * torch.sigmoid(torch.where(natural == -math.inf, 0.0, natural - sinks))[..., None]
    return outputs, torch.logaddexp(natural, sinks) / math.log(2) if problem.lse_includes_sink else lses


def run(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator into NaN-filled outputs; (out, LSE or None)."""
    arguments = problem.arguments(**changes)
    result = tsmla.tsmla_decode(**arguments)
    torch.cuda.synchronize()
    return result if arguments["return_lse"] else (result, None)


def check(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator and judge what it gives."""
    out, lse = run(problem, **changes)
    judge(problem, out, lse)
    return out, lse


def check_other_words(problem: Problem) -> None:
    """Assert that 4-D caches, int64 lengths, uint8 workspaces, a natural LSE and results that the operator allocates
    change nothing."""
    out, lse = check(problem)
    assert lse is not None
    lengths = problem.arguments()["seq_lens"].long()
    again, natural = run(
        problem,
        kv_cache=torch.empty_like(problem.kv_cache).copy_(problem.kv_cache)[:, None],
        seq_lens=lengths,
        causal_seqs=lengths,
        workspace_buffer=callers_workspace(problem.query.shape[-2], problem.most).view(torch.uint8),
        out=None,
        lse_base=math.e,
    )
    assert torch.equal(again, out)
    assert natural is not None and torch.allclose(natural, lse * math.log(2), rtol=1e-6)


@in_plain_tensors
def judge(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Assert that a kernel's result is right, as far as `assert_right` asks, and rows of no request are untouched
    NaN."""
    exact, plain = (Attended(*attend(problem, dtype)) for dtype in (torch.float64, problem.query.dtype))
    if problem.cum_q is not None:
        spoken_for = {token for span in problem.spans for token in span}
        mine = torch.tensor(sorted(spoken_for), dtype=torch.int64)
        others = torch.tensor([token for token in range(len(out)) if token not in spoken_for], dtype=torch.int64)
        assert out.cpu()[others].isnan().all(), "rows of no request must be left unwritten"
        assert lse is None or lse.cpu()[others].isnan().all(), "LSEs of no request must be left unwritten"
        out, lse = out[mine], None if lse is None else lse[mine]
        exact, plain = (Attended(*(each[mine] for each in result)) for result in (exact, plain))
        if not len(mine):
            return
    tolerance = Tolerance(torch.finfo(out.dtype).eps, 1.5, (2e-5, 3e-6))
    assert_right(out, lse, exact, plain, tolerance, problem.output_scale)


def sharded(problem: Problem, world: int, interleave: int) -> list[Problem]:
    """A call as each of `world` context-parallel ranks sees it, each with its own keys in its own pages."""
    shards = []
    page_size = problem.kv_cache.shape[-2]
    for rank in range(world):
        sight = dataclasses.replace(problem.sight, cp_world=world, cp_rank=rank, cp_interleave=interleave)
        own = [[key for key in range(length) if key // interleave % world == rank] for length in problem.seq_lens]
        rows = [whole[keys] for whole, keys in zip(problem.rows, own, strict=True)]
        shard = make_problem(
            [len(keys) for keys in own],
            1,
            1,
            problem.query.dtype,
            page_size,
            rows=rows,
            rope=problem.query.shape[-1] - LATENT,
            causal_seqs=problem.seq_lens,
            sight=sight,
            softmax_scale=problem.softmax_scale,
            output_scale=problem.output_scale,
        )
        shards.append(dataclasses.replace(shard, query=problem.query))
    return shards


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What ranks that exchange (out, base-2 LSE) make of them, in float64."""
    outs, lses = (torch.stack([part[i].double() for part in parts]) for i in range(2))
    weights = torch.softmax(lses * math.log(2), 0).nan_to_num(0.0)
    return (weights[..., None] * outs).sum(0), (lses * math.log(2)).logsumexp(0) / math.log(2)
