"""tsmla_prefill in emulation against float64: the edges of its contract, under every schedule."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from emulated_archs import KERNELS, PREFILLS
from prefill_edges import LENGTHS, SEVERAL_TILES, check
from prefill_reference import judge, make_problem
from tsmla_emulator.run.host.memory import addresses_from
from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

pytestmark = pytest.mark.archs(*KERNELS)
ON_BOTH_BLACKWELLS = pytest.mark.archs(*PREFILLS)
LOW = 0x302000000
"""Where cudaMallocAsync's addresses begin."""
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@ON_BOTH_BLACKWELLS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(gpu, lengths, dtype, causal):
    check(make_problem(*lengths, 2, 1, 192, 128, dtype, "cuda", slack=3, padded_entries=2, strided=True), causal)


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", SEVERAL_TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_ctas_with_tiles_far_apart(gpu, monkeypatch, lengths, dtype, causal):
    """Hopper: CTAs with eight tiles, with fewer, and with one."""
    monkeypatch.setattr("tsmla.operators.prefill.multiprocessors", lambda device: 1)
    problem = make_problem(*lengths, 4, 2, 192, 128, dtype, "cuda", slack=3, padded_entries=2)
    check(problem, causal)
    if gpu.emulation is not None:  # one tile each would be as many CTAs as there may be tiles
        tiles = problem.query.shape[0] // (192 if dtype.itemsize == 1 else 128) + problem.cum_seq_lens_q.shape[0] - 1
        assert gpu.emulation.calls[-1].launches[0].grid[0] < 4 * tiles


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_ctas_with_tiles_that_follow_each_other(gpu, monkeypatch, causal):
    """Hopper's kernels of 8 bits, long sequences: of ten tiles one CTA has four."""
    monkeypatch.setattr("tsmla.operators.prefill.multiprocessors", lambda device: 1)
    check(make_problem([200], [4200], 5, 1, 192, 128, torch.float8_e4m3fn, "cuda", slack=3), causal)
    if gpu.emulation is not None:
        assert gpu.emulation.calls[-1].launches[0].grid[0] == 7


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", SEVERAL_TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ctas_with_one_tile(gpu, monkeypatch, dtype, lengths, causal):
    """Hopper, 16 bits: a kernel of its own for long sequences, by the host's measure, the rows of the keys' pack."""
    monkeypatch.setattr("tsmla.operators.prefill.multiprocessors", lambda device: 1)
    long = LONG_KEYS * len(lengths[1])
    problem = make_problem(*lengths, 4, 2, 192, 128, dtype, "cuda", slack=3, slack_kv=long)
    with_lse, without = (check(problem, causal, lse) for lse in (True, False))
    assert torch.equal(with_lse.view(torch.uint8), without.view(torch.uint8))
    if gpu.emulation is not None:  # as many CTAs as there may be tiles
        tiles = problem.query.shape[0] // 128 + len(lengths[0])
        assert gpu.emulation.calls[-1].launches[0].grid[0] == 4 * tiles


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_dims(gpu, dtype, dims):
    check(make_problem([130], [200], 1, 1, *dims, dtype, "cuda"), True)


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_eight_bit_dtypes_and_dims(gpu, dtype, dims):
    check(make_problem([130], [200], 1, 1, *dims, dtype, "cuda"), True)


@ON_BOTH_BLACKWELLS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_outputs_have_the_same_bits_with_and_without_lse(gpu, dtype, causal):
    """A key too many or too few, which moves outputs by less than their tolerance, shows in the LSE of one of them."""
    problem = make_problem([127, 150, 1], [129, 77, 300], 2, 1, 192, 128, dtype, "cuda")
    with_lse, without = (check(problem, causal, lse) for lse in (True, False))
    assert torch.equal(with_lse.view(torch.uint8), without.view(torch.uint8))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tensors_near_the_beginning_of_memory(gpu, causal):
    """Tensor maps that clip sequences begin before their tensors, and must not begin before the first address."""
    with addresses_from(LOW):
        problem = make_problem([127, 0, 150], [129, 77, 300], 2, 1, 192, 128, torch.bfloat16, "cuda", slack=3)
        assert LOW <= problem.query.data_ptr() < 2 * LOW
        check(problem, causal)


def test_bf16_from_fp16(gpu):
    check(make_problem([130], [200], 1, 1, 192, 128, torch.float16, "cuda"), True, out_dtype=torch.bfloat16)


@ON_BOTH_BLACKWELLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_force_rescaling(gpu, dtype):
    check(make_problem([300], [700], 1, 1, 192, 128, dtype, "cuda", magnitude=6.0), False)


@ON_BOTH_BLACKWELLS
def test_large_eight_bit_scores_force_rescaling(gpu):
    check(make_problem([300], [700], 1, 1, 192, 128, torch.float8_e4m3fn, "cuda", magnitude=6.0), False)


@ON_BOTH_BLACKWELLS
def test_eight_bit_probabilities_far_below_the_largest_count(gpu):
    """One key has half of the weight, 4096 others 2**-13 each, and only these have values."""
    problem = make_problem([64], [1 + 4096], 1, 1, 192, 128, torch.float8_e4m3fn, "cuda")
    for tensor, value in ((problem.query, 0.0), (problem.key, 0.0), (problem.value, 1.0)):
        tensor.copy_(torch.full(tensor.shape, value).to(tensor.dtype))
    problem.query[..., 0] = problem.key[0, 0, 0] = 1.0
    problem.value[0] = 0.0
    problem.softmax_scale = 12 * math.log(2.0)
    check(problem, False)


@ON_BOTH_BLACKWELLS
def test_eight_bits_do_not_round_the_weight_of_a_late_heavy_key(gpu):
    """It has two thirds of all: 2.12 times the weight of the first key, which alone would be rounded to 2."""
    problem = make_problem([64], [400], 1, 1, 192, 128, torch.float8_e4m3fn, "cuda")
    problem.query.copy_(torch.zeros(problem.query.shape))
    problem.query[..., 0] = problem.softmax_scale = 1.0
    for keys, score in ((slice(None), -30.0), (0, 0.0), (300, 0.75)):
        problem.key[keys, ..., 0] = score
    check(problem, False)


@pytest.mark.parametrize("heads", [(4, 1), (3, 3)], ids=str)
def test_head_counts(gpu, heads):
    check(make_problem([20, 140], [150, 30], *heads, 128, 128, torch.bfloat16, "cuda"), True)


@pytest.mark.archs("sm_100a")
def test_more_key_heads_than_a_section(gpu):
    """Blackwell, causal: query tiles are dealt 32 key heads at a time; here 32 and then 2."""
    check(make_problem([257], [129], 34, 34, 192, 128, torch.float8_e4m3fn, "cuda"), True)


def test_with_pdl(gpu):
    check(make_problem([130], [200], 1, 1, 192, 128, torch.bfloat16, "cuda"), False, enable_pdl=True)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("factor", [-0.5, 0.0], ids=str)
def test_scales(gpu, factor, dims):
    problem = make_problem([40, 2], [70, 0], 1, 1, *dims, torch.bfloat16, "cuda")
    ends_q, ends_kv = problem.cum_seq_lens_q, problem.cum_seq_lens_kv
    out, lse = tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        ends_kv,
        70,
        2,
        problem.softmax_scale / 0.375,
        True,
        True,
        ends_q,
        k_scale=0.375,
        v_scale=4.0,
        output_scale=factor / 4.0,
    )
    if factor == 0.0:
        assert (out == 0).all()
    else:
        judge(problem, True, out / factor, lse)  # a power of two: nothing is rounded anew
