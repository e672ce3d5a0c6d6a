"""tsmla_decode with query tokens of its own for each request, in emulation against float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from decode_queries import laid_out
from decode_reference import Sight, attend, check, judge, make_problem, merged, run, sharded
from emulated_archs import KERNELS, SMS
from tsmla.identity.arch import Arch
from tsmla.identity.plan import DEALS, plan_decode
from tsmla.operators.workspace import decode_workspace_size
from tsmla_emulator.dealt import deal_out
from unwatched import unwatched

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]

CASES = {
    "short ones among long ones": ([300, 65, 0, 200, 7, 140], [1, 17, 2, 64, 0, 5], 16, Sight()),
    "one tile of rows": ([300, 65, 0, 40], [2, 0, 1, 3], 16, Sight()),
    "odd heads": ([130, 1, 70, 300], [17, 2, 130, 1], 3, Sight()),
    "128 heads": ([300, 1300, 64], [1, 5, 2], 128, Sight()),
    "as many row tiles each": ([300, 65, 20], [2, 2, 0], 64, Sight()),
    "one request": ([400], [64], 16, Sight()),
    "one request of one token": ([1500], [1], 16, Sight()),
    "nothing at all": ([300, 65], [0, 0], 16, Sight()),
    "fewer keys than query tokens": ([3, 0, 20], [17, 5, 64], 16, Sight()),
    "more row tiles than workers": ([5, 0], [7, 0], 65, Sight()),
    "full": ([300, 65, 20], [17, 1, 5], 16, Sight(causal=False)),
    "window": ([300, 65, 200], [1, 17, 8], 16, Sight(window_left=40)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    seq_lens, q_lens, heads, sight = case
    check(make_problem(seq_lens, q_lens, heads, sight=sight, output_scale=0.5, max_q_len=max(*q_lens, 1) + heads % 2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_other_dtypes(gpu, dtype):
    check(make_problem([300, 65, 0, 200], [1, 17, 2, 5], 16, dtype))


def test_everything_that_hides_keys(gpu):
    """Visible lengths of each token, keys of a context-parallel rank, sinks in the LSE."""
    visible = torch.tensor([3, 200, 130, 0, 64, 65, 190, 7, 7], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_problem([190, 66], [5, 3], 24, page_size=32, visible=visible, causal_seqs=[380, 130], sight=sight))
    sinks = torch.linspace(-3, 3, 16).to("cuda")
    check(make_problem([300, 65, 0], [1, 9, 3], 16, sinks=sinks, lse_includes_sink=True))


def test_context_parallel_ranks_merge_to_the_whole(gpu):
    problem = make_problem([201, 2, 64], [9, 1, 3], 16)
    exact, exact_lse = attend(problem, torch.float64)
    shards = [dataclasses.replace(shard, cum_q=problem.cum_q) for shard in sharded(problem, 2, 1)]
    out, lse = merged([check(shard) for shard in shards])
    mine = slice(problem.cum_q[-1])
    assert torch.allclose(out[mine], exact[mine], rtol=0, atol=2e-2)
    assert torch.allclose(lse[mine], exact_lse[mine], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("cum_q", [[0, 9, 3, 12, 60], [-5, 4, 1 << 30, 6, 33], [40, 40, 0, 0, 0], [33, 20, 9, 4, 0]])
def test_no_value_leads_astray(gpu, cum_q):
    """Values that descend or lie outside of the query, and requests longer than max_q_len."""
    check(make_problem([300, 65, 20, 99], [8] * 4, 16, cum_q=cum_q, max_q_len=7))


@pytest.mark.parametrize("heads, q_len, requests", [(16, 1, 3), (16, 9, 3), (128, 2, 2), (16, 2, 70)])
def test_one_query_length_gives_the_bits_of_a_call_without_a_pack(gpu, heads, q_len, requests):
    """However the call is cut: requests whole, in equal pieces, or where cuts fall."""
    problem = make_problem([(700, 65, 0)[i % 3] for i in range(requests)], q_len, heads)
    with unwatched(gpu):
        out, lse = run(problem)
    packed = dataclasses.replace(
        problem, query=problem.query.flatten(0, 1), cum_q=[i * q_len for i in range(requests + 1)]
    )
    again, again_lse = run(packed)
    assert torch.equal(again, out.flatten(0, 1)) and torch.equal(again_lse, lse.flatten(0, 1))


@pytest.mark.parametrize("heads, q_len, requests", [(128, 1, 1), (128, 2, 2), (16, 9, 3)])
def test_a_pack_is_combined_by_as_many_ctas_as_a_call_without(gpu, heads, q_len, requests):
    problem = make_problem([700] * requests, q_len, heads)
    packed = dataclasses.replace(
        problem, query=problem.query.flatten(0, 1), cum_q=[i * q_len for i in range(requests + 1)]
    )
    grids = []
    for given in problem, packed:
        run(given)
        grids.append(gpu.emulation.calls[-1].launches[1].grid)
    assert grids[0] == grids[1]


def test_the_same_tensors_with_other_lengths(gpu):
    """A CUDA graph is replayed so: the host knows 4 requests of up to 17 query tokens, 30 in all, and no more."""
    problem = make_problem([300, 65, 0, 40], [1, 17, 2, 9], 16)
    given = problem.arguments(max_q_len=17, max_seq_len=512)
    others = ([1] * 4, [250, 3, 0, 40]), ([0, 0, 17, 0], [9] * 4), ([4] * 4, problem.seq_lens)
    for q_lens, seq_lens in (([1, 17, 2, 9], problem.seq_lens), *others):
        now = dataclasses.replace(
            problem,
            cum_q=list(itertools.accumulate(q_lens, initial=0)),
            max_q_len=17,
            seq_lens=[min(a, b) for a, b in zip(seq_lens, problem.seq_lens, strict=True)],
        )
        given["cum_seq_lens_q"].copy_(torch.tensor(now.cum_q))
        given["seq_lens"].copy_(torch.tensor(now.seq_lens))
        given["out"].fill_(float("nan"))
        out, lse = run(problem, **{**given, "out": given["out"]})
        lse[now.cum_q[-1] :] = float("nan")
        judge(now, out, lse)


def test_a_workspace_of_just_what_is_needed(gpu):
    problem = make_problem([700, 65, 300], [1, 30, 5], 16)
    size = decode_workspace_size(3, 30, 16, 700, varies=True)
    check(problem, workspace_buffer=torch.full((size,), -1, dtype=torch.int8, device="cuda"))


@pytest.mark.parametrize("sm_count", [3, 6])
def test_few_parts(gpu, monkeypatch, sm_count):
    """Chunks that hold ends of requests, whole rounds and beginnings."""
    monkeypatch.setattr(
        "tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, sm_count, *shape)
    )
    check(make_problem([500, 0, 65, 300, 1, 129], [1, 9, 33, 2, 0, 6], 16))


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("case", [([40, 3400, 700], [1, 17, 5]), ([40, 200, 12960], [1, 5, 1])], ids=["ends", "middle"])
def test_parts_that_walk_keys_in_step(gpu, monkeypatch, case, dtype):
    """Ends of row tiles come last; and a request that goes on before and behind a part's stretch begins in its
    middle."""
    seq_lens, q_lens = case
    plan = plan_decode(Arch.SM90A, 3, 3, max(q_lens), 16, max(seq_lens), varies=True)
    dealt = deal_out(DEALS[Arch.SM90A], seq_lens, q_lens, 16, plan.workers, plan.slots)
    walks = [[(s.request, s.row_tile, s.first_tile) for s in own] for own in dealt.segments]
    assert any(walk != sorted(walk) for walk in walks)
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 3, *shape))
    check(make_problem(seq_lens, q_lens, 16, dtype))


def test_neighbours_in_a_tile_change_nothing(gpu):
    """A row tile brings rows of the next request along, whatever they hold."""
    problem = make_problem([300, 200], [1, 1], 16)
    out, lse = run(problem)
    problem.query[1].fill_(float("nan"))
    again, again_lse = run(problem)
    assert torch.equal(again[0], out[0]) and torch.equal(again_lse[0], lse[0])


@pytest.mark.parametrize("heads", [16, 128])
def test_pieces_and_strides_give_the_same_bits(gpu, heads):
    """Lines of a tensor map are all rows, or the heads of a token; rows that are in no line are copied one by one."""
    problem = make_problem([70, 3, 0, 9], [1, 5, 2, 3], heads)
    with unwatched(gpu):
        out, lse = check(problem)
    rows = problem.cum_q[-1]
    for layout in ("joined, with gaps", "latent heads first, rope a slice", "other orders"):
        query = laid_out(problem.query[None], layout)
        query = tuple(piece[0] for piece in query) if isinstance(query, tuple) else query[0]
        got, got_lse = run(problem, query=query)
        assert torch.equal(got[:rows], out[:rows]) and torch.equal(got_lse[:rows], lse[:rows]), layout


def test_lengths_of_64_bits_and_results_of_its_own(gpu):
    problem = make_problem([300, 65], [1, 9], 16)
    out, lse = check(problem)
    wide = problem.arguments()["cum_seq_lens_q"].long()
    again, again_lse = run(problem, cum_seq_lens_q=wide, out=None, lse=None)
    rows = problem.cum_q[-1]
    assert torch.equal(again[:rows], out[:rows]) and torch.equal(again_lse[:rows], lse[:rows])
