"""tsmla_decode on a GPU against float64, at every edge that its contract names."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import tsmla
from decode_queries import LAYOUTS, laid_out
from decode_reference import (
    LATENT,
    Problem,
    Sight,
    attend,
    callers_workspace,
    check,
    check_other_words,
    judge,
    make_problem,
    merged,
    run,
    sharded,
)
from tsmla.identity.arch import Arch
from tsmla.operators.checks import TORCH_DTYPE_OF

GUARD = 123.0
DTYPES = sorted({dtype for arch in Arch for dtype in arch.facts.decode})
LENGTHS = {
    "one key": [1],
    "around a tile": [63, 64, 65, 127, 128, 129],
    "empty and short": [0, 1, 0, 5, 16, 17, 31, 33],
    "long and short": [16512, 3, 0, 700, 8192],
    "one long": [40000],
    "many": [37 * i % 1500 for i in range(70)],
}


@pytest.fixture(autouse=True)
def decodes(arch: Arch, seed: int) -> None:
    if not arch.facts.decode:
        pytest.skip(f"decode has no kernel for {arch}")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, arch: Arch) -> torch.dtype:
    if request.param not in arch.facts.decode:
        pytest.skip(f"decode for {arch} does not take {request.param}")
    return TORCH_DTYPE_OF[request.param]


@pytest.mark.parametrize("q_len, heads", [(1, 16), (4, 16), (1, 128), (2, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(dtype, lengths, q_len, heads):
    check(make_problem(lengths, q_len, heads, dtype, output_scale=0.5))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(dtype, page_size):
    check(make_problem([300, 1, 0, 129, 2000], 3, 16, dtype, page_size))


@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("heads", [1, 6, 12, 24, 48, 96, 128])
def test_head_counts(dtype, heads, q_len):
    check(make_problem([700, 65, 3], q_len, heads, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_len, heads", [(1, 16), (4, 12), (3, 1), (2, 64), (3, 96), (1, 128), (4, 128)])
def test_queries_of_any_strides_and_in_pieces_give_the_same_bits(dtype, layout, q_len, heads):
    problem = make_problem([700, 0, 65, 3000], q_len, heads, dtype)
    out, lse = check(problem)
    got, got_lse = run(problem, query=laid_out(problem.query, layout))
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_queries_expanded_over_requests_and_heads(dtype):
    problem = make_problem([700, 65], 2, 16, dtype)
    for dims in ((1, 2, 16), (2, 2, 1), (2, 1, 16), (1, 1, 1)):
        first = problem.query[: dims[0], : dims[1], : dims[2]]
        latent, rope = (piece.expand(2, 2, 16, -1) for piece in first.split((512, 64), -1))
        problem.query = torch.cat((latent, rope), -1)
        check(problem, query=(latent, rope))


@pytest.mark.parametrize("q_len, heads", [(70, 1), (33, 8), (17, 128)])
def test_many_query_tokens(dtype, q_len, heads):
    check(make_problem([900, 12, 130], q_len, heads, dtype))


@pytest.mark.parametrize(
    "sight",
    [Sight(causal=False), Sight(window_left=0), Sight(window_left=100), Sight(window_left=4096)],
    ids=lambda s: f"window {s.window_left}" if s.causal else "full",
)
def test_masks(dtype, sight):
    check(make_problem([3, 70, 500, 9000], 4, 24, dtype, sight=sight))


def test_visible_lengths_of_each_query_token(dtype):
    visible = torch.randint(0, 400, (5, 3), dtype=torch.int32, device="cuda")
    check(make_problem([1, 64, 390, 0, 200], 3, 16, dtype, visible=visible, sight=Sight(causal=False)))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("lengths, q_len, heads", [([9000, 3, 0, 700], 1, 16), ([4000, 65], 3, 48)])
def test_sinks(dtype, lengths, q_len, heads, counted):
    problem = make_problem(lengths, q_len, heads, dtype)
    plain = run(problem)
    problem.sinks = 4 * torch.randn(heads, device="cuda")
    problem.sinks[:2] = torch.tensor([-math.inf, math.inf])
    problem.lse_includes_sink = counted
    out, lse = check(problem)
    assert torch.equal(out[..., 0, :], plain[0][..., 0, :]) and (out[..., 1, :] == 0).all()
    assert torch.equal(lse[..., 0], plain[1][..., 0]) and (counted or torch.equal(lse, plain[1]))


def test_large_scores_force_rescaling(dtype):
    check(make_problem([900, 5000], 2, 16, dtype, magnitude=2.5))


def test_batches_larger_than_the_gpu(dtype):
    check(make_problem([(i * 131) % 400 for i in range(400)], 1, 8, dtype))


@pytest.mark.parametrize("lengths", [[4000] * 3, [300] * 132, [20000]], ids=str)
def test_uniform_scores_have_a_closed_form_lse(dtype, lengths):
    problem = make_problem(lengths, 4, 16, dtype)
    problem.query.zero_()
    out, lse = run(problem)
    visible = torch.tensor(lengths, device="cuda")[:, None] - torch.arange(3, -1, -1, device="cuda")
    expected = visible.double().log2()[..., None].expand_as(lse)
    assert torch.allclose(lse.double(), expected, rtol=1e-6, atol=2e-5)
    mean = problem.rows[0][: lengths[0], :LATENT].double().mean(0)
    assert torch.allclose(out[0, -1, 0].double(), mean, rtol=0, atol=8e-3)


def test_results_lie_within_their_tensor(dtype):
    problem = make_problem([700, 0, 65], 3, 24, dtype)
    guarded = torch.full((5, 3, 24, LATENT), GUARD, dtype=problem.out_dtype, device="cuda")
    out, lse = run(problem, out=guarded[1:4])
    judge(problem, out, lse)
    assert (guarded[0] == GUARD).all() and (guarded[4] == GUARD).all()


def test_the_workspace_may_hold_anything_and_is_not_overrun(dtype):
    problem = make_problem([9000, 3, 500], 2, 16, dtype)
    reference, reference_lse = check(problem)
    needed = tsmla.decode_workspace_size(3, 2, 16, 9000)
    for fill in (0, -1, 0x3F):
        space = torch.full((needed + 4096,), fill, dtype=torch.int8, device="cuda")
        space[needed:] = 77
        out, lse = run(problem, workspace_buffer=space[:needed])
        assert torch.equal(out, reference) and torch.equal(lse, reference_lse)
        assert (space[needed:] == 77).all()


def test_without_lse_and_with_pdl_give_the_same_bits(dtype):
    problem = make_problem([700, 12000, 64], 2, 16, dtype)
    reference, reference_lse = check(problem)
    for _ in range(20):
        out, lse = run(problem, enable_pdl=True)
        assert torch.equal(out, reference) and torch.equal(lse, reference_lse)
    assert torch.equal(run(problem, return_lse=False)[0], reference)
    assert torch.equal(run(problem, return_lse=False, enable_pdl=True)[0], reference)


def test_pdl_waits_for_what_writes_its_inputs(dtype):
    problem = make_problem([4000] * 64, 1, 16, dtype)
    reference, _ = check(problem)
    arguments = problem.arguments(enable_pdl=True)
    later, query = torch.empty_like(problem.query), problem.query
    arguments["query"] = later
    for _ in range(20):
        later.view(torch.uint8).fill_(0x7F)
        later.copy_(query)
        out, _ = tsmla.tsmla_decode(**arguments)
        torch.cuda.synchronize()
        assert torch.equal(out, reference)


def test_other_ways_to_say_the_same(dtype):
    check_other_words(make_problem([700, 64, 5], 2, 16, dtype))


@pytest.mark.parametrize("world, interleave", [(2, 1), (4, 1), (2, 16), (4, 64)])
def test_context_parallel_ranks_merge_to_the_whole(arch, dtype, world, interleave):
    problem = make_problem([4001, 2, 64, 0, 513], 3, 24, dtype)
    shards = sharded(problem, world, interleave)
    out, lse = merged([check(shard) for shard in shards])
    whole, whole_lse = check(problem)
    exact, exact_lse = attend(problem, torch.float64)
    plain, _ = attend(problem, dtype)
    # Each side may be as far from float64 as twice what PyTorch in this dtype is.
    lost = 4 * (plain - exact).abs().max()
    assert torch.allclose(out, whole.double(), rtol=0, atol=1e-2 + float(lost))
    assert torch.allclose(lse, whole_lse.double(), rtol=1e-6, atol=2e-5)
    rounds = dtype == torch.float8_e4m3fn and arch is not Arch.SM90A  # weights, to e4m3
    assert (out - exact).norm() <= (3e-2 if rounds else 1e-2) * exact.norm()


def test_cuda_graph_replay(dtype):
    """Captured once; replayed with other lengths in the same tensors, into outputs and a workspace full of NaN."""
    problem = make_problem([9000, 300, 64], 2, 16, dtype)
    arguments = problem.arguments()
    tsmla.tsmla_decode(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tsmla.tsmla_decode(**arguments)
    for lengths in ([9000, 300, 64], [1, 0, 64], [8999, 257, 1]):
        arguments["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        arguments["workspace_buffer"].view(torch.float32).fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        judge(shortened(problem, lengths), out, lse)


def shortened(problem: Problem, lengths: list[int]) -> Problem:
    """A call with fewer keys; what lies behind them in the cache is other keys rather than NaN."""
    rows = [whole[:length] for whole, length in zip(problem.rows, lengths, strict=True)]
    return dataclasses.replace(problem, rows=rows, seq_lens=lengths)


def test_other_streams(dtype):
    problem = make_problem([3000, 5], 2, 16, dtype)
    reference, _ = check(problem)
    arguments = problem.arguments()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        out, _ = tsmla.tsmla_decode(**arguments)
    stream.synchronize()
    assert torch.equal(out, reference)


def test_calls_allocate_their_results_and_nothing_else(dtype):
    problem = make_problem([3000, 5], 2, 16, dtype)
    arguments = problem.arguments()
    tsmla.tsmla_decode(**arguments)
    before = torch.cuda.memory_allocated()
    out, lse = tsmla.tsmla_decode(**arguments)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - before
    assert out is arguments["out"] and allocated <= max(512, lse.nbytes)


def test_the_callers_workspace_is_enough(dtype):
    for batch, q_len, heads in ((1, 8, 8), (3, 7, 1), (140, 5, 6), (2, 1, 128)):
        lengths = [3000 + 17 * i for i in range(batch)]
        problem = make_problem(lengths, q_len, heads, dtype)
        check(problem, workspace_buffer=callers_workspace(heads, q_len))


@pytest.mark.parametrize("heads", [3, 16, 128])
def test_requests_with_query_tokens_of_their_own(dtype, heads):
    lengths = [16512, 3, 0, 700, 8192, 65, 129, 1000]
    check(make_problem(lengths, [1, 17, 2, 64, 0, 5, 130, 1], heads, dtype, output_scale=0.5))
    check(make_problem(lengths, [1] * 8, heads, dtype))
    check(make_problem(lengths, [512, 1, 1, 0, 1, 1, 1, 1], heads, dtype, sight=Sight(window_left=300)))


def test_a_graph_is_replayed_with_other_query_lengths(dtype):
    """There are 8 requests, 40 query tokens and at most 17 in each, as the host knows; the tensors say which."""
    problem = make_problem([700, 65, 9, 3000, 1, 129, 64, 500], [5] * 8, 16, dtype)
    given = problem.arguments(max_q_len=17, max_seq_len=4096)
    tsmla.tsmla_decode(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tsmla.tsmla_decode(**given)
    for q_lens in ([5] * 8, [1] * 8, [17, 0, 1, 2, 17, 0, 0, 3], [0] * 8):
        ends = [sum(q_lens[:i]) for i in range(9)]
        given["cum_seq_lens_q"].copy_(torch.tensor(ends))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        judge(dataclasses.replace(problem, cum_q=ends, max_q_len=17), out, lse)


@pytest.mark.parametrize("q_len", [1, 4, 40])
def test_one_query_length_gives_the_bits_of_a_call_without_a_pack(dtype, q_len):
    problem = make_problem([8192, 3, 700, 0] * 8, q_len, 16, dtype)
    out, lse = run(problem)
    packed = dataclasses.replace(problem, query=problem.query.flatten(0, 1), cum_q=[i * q_len for i in range(33)])
    again, again_lse = run(packed)
    assert torch.equal(again, out.flatten(0, 1)) and torch.equal(again_lse, lse.flatten(0, 1))
