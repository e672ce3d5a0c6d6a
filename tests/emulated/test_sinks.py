"""Attention sinks of both operators in emulation: against float64, at their limits, and as a key without a value."""

from __future__ import annotations

import dataclasses
import math

import decode_reference as decode
import prefill_reference as prefill
import pytest
import torch
import tsmla
from decode_reference import Sight
from emulated_archs import KERNELS, SMS
from tsmla.errors import ArgumentError
from tsmla.operators.checks import TORCH_DTYPES
from unwatched import unwatched

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]
DTYPES = list(TORCH_DTYPES)
SINKS = (0.5, -math.inf, 4.0, math.inf, -2.0, -1e30)
NOTHING, EVERYTHING = SINKS.index(-math.inf), SINKS.index(math.inf)

DECODES = {
    "split and whole requests": ([1500, 0, 65], 2, 6, Sight()),
    "window and more tokens than keys": ([200, 2], 4, 6, Sight(window_left=70)),
    "several row tiles": ([150], 3, 48, Sight(causal=False)),
}
PREFILLS = {
    "empty sequences": ([1, 0, 130, 5], [1, 77, 0, 300]),
    "more queries than keys": ([150, 1], [77, 1]),
}


def sinks_of(heads: int) -> torch.Tensor:
    return torch.tensor((SINKS * heads)[:heads], device="cuda")


def run_prefill(problem: prefill.Problem, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*problem.query.shape[:2], problem.value.shape[2])
    dtype = prefill.out_dtype(problem.query.dtype)
    return tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        max(problem.lengths_kv),
        len(problem.lengths_kv),
        problem.softmax_scale,
        causal,
        True,
        problem.cum_seq_lens_q,
        sinks=problem.sinks,
        out=torch.full(shape, math.nan, dtype=dtype, device="cuda"),
        lse_includes_sink=problem.lse_includes_sink,
    )


def check_both(gpu, problem, run, judge) -> None:
    """Check one problem without sinks, with sinks, and with sinks that the LSE counts."""
    heads = problem.query.shape[-2]
    with unwatched(gpu):
        plain = run(problem)
    problem.sinks = sinks_of(heads)
    out, lse = run(problem)
    judge(problem, out, lse)
    assert same_bytes(lse, plain[1]), "the LSE is without sinks"
    assert same_bytes(out[..., NOTHING, :], plain[0][..., NOTHING, :])
    given = ~out.isnan()  # rows of no sequence are left as they were
    assert (out[..., EVERYTHING, :][given[..., EVERYTHING, :]] == 0).all()
    counting = dataclasses.replace(problem, lse_includes_sink=True)
    again, counted = run(counting)
    judge(counting, again, counted)
    assert same_bytes(again, out) and same_bytes(counted[..., NOTHING], lse[..., NOTHING])
    for none in (torch.full((heads,), -math.inf, device="cuda"), None):
        with unwatched(gpu):
            results = run(dataclasses.replace(counting, sinks=none))
        for result, want in zip(results, plain, strict=True):
            assert same_bytes(result, want)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
def test_decode(gpu, case):
    seq_lens, q_len, heads, sight = case
    problem = decode.make_problem(seq_lens, q_len, heads, sight=sight, output_scale=0.5)
    check_both(gpu, problem, decode.run, decode.judge)


def test_decode_split_over_pairs(gpu):
    """More than 64 query rows, and keys enough to be split where pairs of CTAs share a row tile."""
    decode.check(decode.make_problem([3000, 5], 1, 66, sinks=sinks_of(66), lse_includes_sink=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_dtypes(gpu, dtype):
    problem = decode.make_problem([200, 1, 0], 2, 6, dtype)
    problem.sinks = sinks_of(6)
    decode.check(problem)
    decode.check(dataclasses.replace(problem, lse_includes_sink=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", PREFILLS.values(), ids=PREFILLS.keys())
def test_prefill(gpu, lengths, causal):
    problem = prefill.make_problem(*lengths, 4, 2, 192, 128, torch.bfloat16, "cuda", slack=3)
    check_both(gpu, problem, lambda p: run_prefill(p, causal), lambda p, *got: prefill.judge(p, causal, *got))


@pytest.mark.parametrize(
    ("dtype", "dim"), [*((dtype, 128) for dtype in DTYPES), (torch.bfloat16, 256), (torch.float8_e4m3fn, 256)], ids=str
)
def test_prefill_dtypes(gpu, dtype, dim):
    problem = prefill.make_problem([130, 3], [200, 1], 3, 1, dim, dim, dtype, "cuda")
    problem.sinks = sinks_of(3)
    prefill.judge(problem, True, *run_prefill(problem, True))
    counting = dataclasses.replace(problem, lse_includes_sink=True)
    prefill.judge(counting, True, *run_prefill(counting, True))


def test_decode_sinks_are_a_key_without_a_value(gpu):
    """The first key, which all tokens see, has the scaled score 1 for every head."""
    scale, heads = 1 / 24, 5
    rows = torch.randn(301, 576, device="cuda").to(torch.bfloat16)
    rows[:, 575] = 0.0
    rows[0] = 0.0
    rows[0, 575] = 24.0
    with_key = decode.make_problem([301], 2, heads, rows=[rows], softmax_scale=scale)
    with_key.query[..., 575] = 1.0
    sinks = torch.ones(heads, device="cuda")
    with_sink = decode.make_problem(
        [300], 2, heads, rows=[rows[1:]], softmax_scale=scale, sinks=sinks, lse_includes_sink=True
    )
    with_sink.query = with_key.query
    for key, sink in zip(decode.run(with_key), decode.run(with_sink), strict=True):
        assert torch.allclose(key.float(), sink.float(), rtol=2**-7, atol=1e-3)


def test_context_parallel_ranks_are_merged_before_sinks_count(gpu):
    whole = decode.make_problem([201, 2, 64], 3, 6, sinks=sinks_of(6))
    exact, exact_lse = decode.attend(whole, torch.float64)
    shards = decode.sharded(whole, 2, 16)
    out, lse = decode.merged([decode.check(shard) for shard in shards])
    share = 1 / (1 + torch.exp(whole.sinks - lse * math.log(2)))
    out = out * torch.where(lse == -math.inf, 0.0, share)[..., None]
    assert torch.allclose(out, exact, rtol=0, atol=2e-2)
    assert torch.allclose(lse, exact_lse, rtol=1e-6, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"merge the ranks' results.* 1 / \(1 \+ exp\(sink - lse\)\)"):
        decode.run(dataclasses.replace(shards[0], sinks=whole.sinks))


def test_sinks_far_from_the_scores(gpu):
    """Scores around 1000 with sinks around 0, and the other way round: no weight is infinite times nothing."""
    for score, sink in ((1000.0, 0.0), (-1000.0, 0.0), (0.0, 1000.0), (0.0, -1000.0), (0.0, 1e38)):
        rows = torch.randn(200, 576, device="cuda").to(torch.bfloat16)
        rows[:, 575] = score
        problem = decode.make_problem([200, 0], 1, 3, rows=[rows, rows[:0]], softmax_scale=1 / 16)
        problem.query[..., 575] = 16.0
        problem.sinks = torch.full((3,), sink, device="cuda")
        decode.check(problem)
        problem.lse_includes_sink = True
        decode.check(problem)


def test_a_sink_that_is_not_a_number_makes_rows_with_keys_nan(gpu):
    problem = decode.make_problem([100, 0], 1, 2, sinks=torch.tensor([math.nan, 1.0], device="cuda"))
    problem.lse_includes_sink = True
    out, lse = (tensor.cpu() for tensor in decode.run(problem))
    assert out[0, :, 0].isnan().all() and lse[:, :, 0].isnan().all()
    assert (out[1] == 0).all() and out[:, :, 1].isfinite().all() and lse[:, :, 1].isfinite().all()
