"""tsmla_decode of rows without a rope piece in emulation against float64: `qk_rope_head_dim` is 0."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from chosen_reference import check_chosen, make_chosen
from decode_reference import SHAPES, Sight, check, make_problem, merged, run, sharded
from emulated_archs import KERNELS, SMS
from tsmla.identity.row_format import ROWS
from tsmla.operators.checks import TORCH_DTYPE_OF
from unwatched import unwatched

LATENT_ROWS = [name for name, row in ROWS.items() if not row.has("rope")]
DTYPES = [TORCH_DTYPE_OF[ROWS[name].dtype] for name in LATENT_ROWS]

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]

CASES = {
    **SHAPES,
    "one head": ([150, 65], 1, 1, Sight(), 64),
    "128 heads": ([700, 65], 1, 128, Sight(), 32),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case, dtype):
    seq_lens, q_len, heads, sight, page_size = case
    check(make_problem(seq_lens, q_len, heads, dtype, page_size, rope=0, sight=sight, output_scale=0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_that_hides_keys(gpu, dtype):
    """Query tokens of their own visible lengths, in the keys of a context-parallel rank, and sinks."""
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_problem([190, 66], 3, 16, dtype, 32, rope=0, visible=visible, causal_seqs=[380, 130], sight=sight))
    sinks = torch.randn(16, device="cuda")
    check(make_problem([190, 0, 66], 1, 16, dtype, 16, rope=0, sinks=sinks, lse_includes_sink=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packs_of_other_numbers_of_tokens(gpu, dtype):
    check(make_problem([150, 70, 0, 300], [2, 0, 1, 5], 24, dtype, rope=0))


def test_ranks_merge(gpu):
    problem = make_problem([300, 5, 0], 1, 16, rope=0)
    exact, exact_lse = run(problem)
    out, lse = merged([check(shard) for shard in sharded(problem, 2, 16)])
    assert torch.allclose(out, exact.double(), atol=2e-2)
    assert torch.allclose(lse, exact_lse.double(), atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_have_the_same_bits_with_and_without_lse(gpu, dtype):
    problem = make_problem([1100, 1, 65, 130], 2, 16, dtype, rope=0)
    without, _ = check(problem, return_lse=False)
    with unwatched(gpu):
        with_lse, _ = check(problem)
    assert torch.equal(with_lse, without)


@pytest.mark.parametrize("heads", [16, 96])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rope_piece_of_zeros_gives_the_same_bits(gpu, heads, dtype):
    """Rows of 576 whose last 64 columns add nothing to scores."""
    problem = make_problem([700, 3, 130], 1, heads, dtype, rope=0)
    out, lse = check(problem)
    cache = torch.nn.functional.pad(problem.kv_cache.float(), (0, 64)).to(dtype)
    query = torch.nn.functional.pad(problem.query.float(), (0, 64)).to(dtype)
    with unwatched(gpu):
        padded, its_lse = run(problem, query=query, kv_cache=cache, qk_rope_head_dim=64)
    assert torch.equal(padded, out) and torch.equal(its_lse, lse)


@pytest.mark.parametrize("order, gap", [((0, 1, 2), 16), ((2, 0, 1), 0), ((1, 0, 2), 48)], ids=str)
def test_a_query_of_any_strides_gives_the_same_bits(gpu, order, gap):
    problem = make_problem([70, 0, 3], 3, 3, rope=0)
    out, lse = check(problem)
    shape = [problem.query.shape[dim] for dim in order]
    around = torch.full((shape[0], shape[1] + 1, shape[2], 512 + gap), math.nan, device="cuda").to(torch.bfloat16)
    inner = around[:, : shape[1], :, :512].permute(*(order.index(dim) for dim in range(3)), 3)
    query = inner.copy_(problem.query)
    got, got_lse = run(problem, query=query)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_pages_that_do_not_exist_are_zeros(gpu):
    problem = make_problem([500], 1, 16, rope=0)
    pages = problem.kv_cache.shape[0]
    for page, entry in ((0, -1), (3, pages), (7, 2**31 - 1)):
        problem.block_tables[0, page] = entry
        problem.rows[0][page * 64 : (page + 1) * 64] = 0
    check(problem)


def test_batch_invariance(gpu):
    problem = make_problem([700, 65], 1, 16, rope=0)
    out, lse = check(problem, batch_invariant=True)
    alone = dataclasses.replace(
        problem, query=problem.query[:1], rows=problem.rows[:1], block_tables=problem.block_tables[:1], seq_lens=[700]
    )
    one, its_lse = run(alone, batch_invariant=True)
    assert torch.equal(one, out[:1]) and torch.equal(its_lse, lse[:1])


CHOSEN = {
    "lists of their own lengths": ((5,), 16, 130, {"lengths": [0, 1, 63, 64, 130]}),
    "a row tile and a row": ((1, 1), 65, 128, {}),
    "a long list": ((1,), 16, 1500, {}),
    "pages of 69 keys": ((2,), 16, 200, {"page_size": 69}),
    "pages of one key, without gaps": ((2,), 16, 100, {"pages": 333, "page_size": 1, "page_gap": 0}),
    "nearly all outside": ((3,), 16, 192, {"outside": 0.97}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHOSEN.values(), ids=CHOSEN.keys())
def test_chosen_keys(gpu, case, dtype):
    shape, heads, top_k, more = case
    check_chosen(make_chosen(shape, heads, top_k, dtype, rope=0, output_scale=0.5, **more))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_pages(gpu, dtype):
    check(make_problem([70, 0, 200], 2, 16, dtype, 1, rope=0))
