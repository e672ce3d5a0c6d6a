"""tsmla_decode in emulation against float64: the edges of its contract."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from decode_queries import LAYOUTS, WIDTHS, laid_out
from decode_reference import (
    SHAPES,
    Sight,
    attend,
    check,
    check_other_words,
    make_problem,
    merged,
    run,
    sharded,
)
from emulated_archs import KERNELS, SMS
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.operators.checks import TORCH_DTYPES
from unwatched import unwatched

DTYPES = [
    (arch, torch_dtype)
    for arch in KERNELS
    for torch_dtype, ours in TORCH_DTYPES.items()
    if ours in Arch(arch).facts.decode
]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_against_float64(gpu, case):
    seq_lens, q_len, heads, sight, page_size = case
    check(make_problem(seq_lens, q_len, heads, page_size=page_size, sight=sight, output_scale=0.5))


@pytest.mark.parametrize("seq_lens", [[150], [64, 0]], ids=str)
def test_more_ctas_than_tiles(gpu, monkeypatch, seq_lens):
    """CTAs without work store nothing, neither a result nor a partial one."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 8, *shape))
    for arch, dtype in DTYPES:
        if arch == gpu.arch:
            check(make_problem(seq_lens, 1, 16, dtype))


@pytest.mark.parametrize("heads, q_len", [(1, 1), (48, 1), (96, 2), (128, 1), (6, 7), (1, 70)])
def test_head_counts_and_query_lengths(gpu, heads, q_len):
    check(make_problem([150, 65], q_len, heads))


@pytest.mark.parametrize("heads", [16, 48])
def test_dtypes(gpu, heads):
    for arch, dtype in DTYPES:
        if arch == gpu.arch:
            check(make_problem([1500, 1, 65], 2, heads, dtype))
            check(make_problem([400, 30], 4, 8, dtype, sight=Sight(window_left=70)))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_eight_bits_with_everything_that_hides_keys(gpu, dtype):
    """Query tokens of their own visible lengths, in the keys of a context-parallel rank."""
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_problem([190, 66], 3, 16, dtype, 32, visible=visible, causal_seqs=[380, 130], sight=sight))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("heavy", [100, 150])
def test_eight_bits_do_not_round_the_weight_of_a_late_heavy_key(gpu, heavy, dtype):
    """It has two thirds of all: 2.12 times the weight of the first key, which alone would be rounded to 2."""
    rows = torch.randn(300, 576, device="cuda").to(dtype)
    for keys, score in ((slice(None), -30.0), (0, 0.0), (heavy, 0.75)):
        rows[keys, 512] = score
    problem = make_problem([300], 1, 16, dtype, rows=[rows], softmax_scale=1.0)
    problem.query.copy_(torch.zeros(problem.query.shape))
    problem.query[..., 512] = 1.0
    check(problem)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_splits_keep_the_largest_and_the_smallest_values_of_eight_bits(gpu, dtype):
    """Averages of the smallest cancel: kept in fewer bits of too small numbers, little would be left of them."""
    limits = torch.finfo(dtype)
    rows = torch.full((700, 576), limits.max)
    rows[:, :256] = limits.smallest_normal * limits.eps * torch.randn(700, 256).sign()
    problem = make_problem([700], 1, 16, dtype, rows=[rows.to(dtype).to("cuda")])
    problem.query.copy_(torch.zeros(problem.query.shape))
    out, _ = check(problem)
    got, exact = out.double()[..., :256], attend(problem, torch.float64)[0][..., :256]
    assert exact.count_nonzero() > 0.9 * exact.numel()
    assert (got - exact).norm() <= 2**-8 * exact.norm()


SIXTEEN_BITS = {
    torch.bfloat16: [(110, 100, -120, 0), (-120, 118, -123, 118), (0, -3, 12, 2)],
    torch.float16: [(9, -3, 0, 9), (-12, -9, -2, 0)],
}
"""Powers of two of 128 columns each, for one request after the other."""


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_splits_keep_values_of_any_magnitude(gpu, dtype):
    """Partial results may be kept in a type that holds few magnitudes: each half row has one of its own. What they have
    of a block that is up to 2^15 smaller than the other of its half is as precise; of one that is smaller yet, as
    precise as the other is."""
    powers = SIXTEEN_BITS[dtype]
    rows = []
    for own in powers:
        rows.append(torch.randn(700, 576))
        rows[-1][:, :512] *= 2.0 ** torch.tensor(own).repeat_interleave(128)
    rows = [own.to(dtype).to("cuda") for own in rows]
    problem = make_problem([700] * len(rows), 1, 16, dtype, rows=rows)
    problem.query[..., :512] = 0
    out, lse = run(problem)
    exact, exact_lse = attend(problem, torch.float64)
    plain, _ = attend(problem, dtype)
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-6, atol=1e-4)
    got, exact, plain = (x.double().unflatten(-1, (4, 128)) for x in (out, exact, plain))
    for request, own in enumerate(powers):
        for block, power in enumerate(own):
            other = block ^ 2
            far = own[other] - power > 15
            size = exact[request, :, :, other if far else block].norm()
            error, as_plain = ((x - exact)[request, :, :, block].norm() for x in (got, plain))
            assert error <= 1.5 * as_plain + size * (2**-20 if far else torch.finfo(dtype).eps), (own, block)


@pytest.mark.archs("sm_90a")
def test_splits_keep_infinite_and_undefined_values_to_their_columns(gpu):
    """A column in which a key of weight 0 is infinite, and one whose sums are beyond float32."""
    row = torch.randn(700, 576).to(torch.bfloat16)
    row[:, 7], row[:, 300] = 0, 3.3e38
    row[100, 7] = math.inf
    problem = make_problem([700], 1, 16, rows=[row.to("cuda")])
    problem.query[..., :512] = 0
    problem.query[..., 7] = -1.0
    plain, exact = (attend(problem, dtype)[0] for dtype in (torch.bfloat16, torch.float64))
    out, _ = run(problem)
    assert out[..., 7].isnan().all()
    assert not out[..., 300].isfinite().any()
    others = torch.tensor([column for column in range(512) if column not in (7, 300)])
    got, plain, exact = (x.double()[..., others] for x in (out, plain, exact))
    assert (got - exact).norm() <= 1.5 * (plain - exact).norm() + 2**-8 * exact.norm()


def test_visible_lengths_of_each_query_token(gpu):
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    check(make_problem([190, 66], 3, 16, visible=visible, sight=Sight(causal=False)))


def test_with_pdl(gpu):
    check(make_problem([700, 64], 2, 16), enable_pdl=True)


@pytest.mark.parametrize("heads", [16, 48])
def test_outputs_have_the_same_bits_with_and_without_lse(gpu, heads):
    """A key too many or too few, which moves outputs by less than their tolerance, shows in the LSE of one of them."""
    for arch, dtype in DTYPES:
        if arch == gpu.arch:
            problem = make_problem([1100, 1, 65, 130], 2, heads, dtype)
            without, _ = check(problem, return_lse=False)
            with unwatched(gpu):
                with_lse, _ = check(problem)
            assert torch.equal(with_lse.view(torch.uint8), without.view(torch.uint8))


def test_other_ways_to_say_the_same(gpu):
    check_other_words(make_problem([700, 64, 5], 2, 16))


@pytest.mark.parametrize("heads, q_len", [(3, 3), (16, 1), (128, 1)])
def test_a_query_of_any_strides_and_in_pieces_gives_the_same_bits(gpu, heads, q_len):
    for arch, dtype in DTYPES:
        if arch == gpu.arch and dtype in (torch.bfloat16, torch.float8_e4m3fn):
            problem = make_problem([70, 0, 3], q_len, heads, dtype)
            with unwatched(gpu):
                out, lse = check(problem)
            for layout in LAYOUTS if heads < 128 else ("pieces", "latent heads first, rope a slice", "other orders"):
                got, got_lse = run(problem, query=laid_out(problem.query, layout))
                assert torch.equal(got, out) and torch.equal(got_lse, lse), layout


def test_pieces_whose_strides_of_one_element_mean_nothing(gpu):
    problem = make_problem([150], 1, 1)
    out, lse = check(problem)
    pieces = problem.query.split(WIDTHS, -1)
    odd = tuple(piece.as_strided(piece.shape, (1, 3, 577, 1), piece.storage_offset()) for piece in pieces)
    for query in (problem.query.as_strided((1, 1, 1, 576), (3, 5, 7, 1)), odd):
        got, got_lse = run(problem, query=query)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_pieces_expanded_over_requests_and_heads(gpu):
    """Strides of 0."""
    problem = make_problem([150, 65], 2, 16)
    for dims in ((1, 2, 16), (2, 2, 1), (2, 1, 16), (1, 1, 1)):
        first = problem.query[: dims[0], : dims[1], : dims[2]]
        latent, rope = (piece.expand(2, 2, 16, -1) for piece in first.split(WIDTHS, -1))
        problem.query = torch.cat((latent, rope), -1)
        check(problem, query=(latent, rope))


def test_pages_at_any_multiple_of_16_bytes(gpu):
    problem = make_problem([300, 65], 1, 16)
    pages, page_size, width = problem.kv_cache.shape
    stride = page_size * width + 8
    pool = torch.full((pages, stride), math.nan, dtype=problem.kv_cache.dtype, device="cuda")
    cache = pool[:, : page_size * width].unflatten(1, (page_size, width))
    cache.copy_(problem.kv_cache)
    assert cache.stride() == (stride, width, 1)
    check(problem, kv_cache=cache)


@pytest.mark.parametrize("heads, page_size", [(16, 64), (16, 16), (96, 32), (96, 64), (96, 128)])
def test_keys_of_pages_that_do_not_exist_are_zeros(gpu, heads, page_size):
    """Whether whole tiles, boxes or lanes copy them: in the middle of a request, and its last, partial page."""
    problem = make_problem([1100, 3 * page_size + 5], 1, heads, page_size=page_size)
    pages = problem.kv_cache.shape[0]
    last = -(-1100 // page_size) - 1
    odd = {(0, 1): -1, (0, 3): pages, (0, last - 2): (1 << 31) - 1, (0, last): -(1 << 31)}
    odd |= {(1, 0): pages + 7, (1, 3): -2}
    for (request, page), entry in odd.items():
        problem.block_tables[request, page] = entry
        problem.rows[request][page * page_size : (page + 1) * page_size] = 0
    check(problem)


@pytest.mark.parametrize("world, interleave", [(2, 1), (4, 1), (2, 16)])
def test_context_parallel_ranks_merge_to_the_whole(gpu, world, interleave):
    problem = make_problem([201, 2, 64], 3, 8)
    exact, exact_lse = attend(problem, torch.float64)
    shards = sharded(problem, world, interleave)
    out, lse = merged([check(shard) for shard in shards])
    assert torch.allclose(out, exact, rtol=0, atol=2e-2)
    assert torch.allclose(lse, exact_lse, rtol=1e-6, atol=1e-5)


def plan_for(monkeypatch, sm_count):
    """Plan for a GPU of so many SMs."""
    monkeypatch.setattr(
        "tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, sm_count, *shape)
    )


@pytest.mark.parametrize("heads", [16, 96])
def test_more_requests_than_parts(gpu, monkeypatch, heads):
    """Chunks that hold ends of requests and whole ones."""
    plan_for(monkeypatch, 6)
    check(make_problem([1100, 0, 65, 300, 1, 500, 129], 1, heads))


def test_more_short_requests_than_parts(gpu, monkeypatch):
    """Many ends of requests one after the other, which roles reach at different times, in every dtype."""
    plan_for(monkeypatch, 2)
    for arch, dtype in DTYPES:
        if arch == gpu.arch:
            check(make_problem([60] * 24, 1, 16, dtype))


def test_warming_up_fits_the_kernel(gpu):
    variant = DecodeVariant(Arch(gpu.arch), Dtype.BF16, Dtype.BF16, lse=True)
    assert tsmla.warmup([variant]).keys() == {variant}
    assert len(gpu.emulation.calls) == 1
