"""tsmla_prefill of heads with 256 dims in emulation: against float64 at every edge, with pieces, with earlier results,
with sinks, and the same bits however a row is computed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import tsmla
from emulated_archs import KERNELS, PREFILLS
from prefill_edges import LENGTHS, SEVERAL_TILES, check
from prefill_reference import Problem, judge, make_problem
from unwatched import unwatched

pytestmark = pytest.mark.archs(*KERNELS)
ON_BOTH_BLACKWELLS = pytest.mark.archs(*PREFILLS)
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
AROUND_TILES = {
    "around tiles of 80 and 96 keys": ([3, 65, 128, 2, 64, 1], [79, 80, 81, 95, 96, 97]),
    "around two and three of them": ([2, 63, 130, 1, 5, 64], [159, 160, 161, 191, 193, 240]),
    "around tiles of a pair of CTAs": ([128, 129, 255, 257, 256], [63, 65, 128, 257, 385]),
}
KINDS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
OF_BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "e4m3"])


def wide(lengths_q: list[int], lengths_kv: list[int], heads_q: int, heads_kv: int, dtype, **options) -> Problem:
    return make_problem(lengths_q, lengths_kv, heads_q, heads_kv, 256, 256, dtype, "cuda", **options)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@ON_BOTH_BLACKWELLS
@KINDS
@OF_BOTH
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), *AROUND_TILES.values()], ids=[*LENGTHS, *AROUND_TILES])
def test_against_float64(gpu, lengths, dtype, causal):
    check(wide(*lengths, 2, 1, dtype, slack=3, padded_entries=2, strided=True), causal)


@pytest.mark.archs("sm_90a")
@KINDS
@OF_BOTH
@pytest.mark.parametrize("lengths", SEVERAL_TILES, ids=str)
def test_ctas_with_several_tiles(gpu, monkeypatch, lengths, dtype, causal):
    monkeypatch.setattr("tsmla.operators.prefill.multiprocessors", lambda device: 1)
    problem = wide(*lengths, 4, 2, dtype, slack=3, padded_entries=2)
    check(problem, causal)
    if gpu.emulation is not None:  # one tile each would be as many CTAs as there may be tiles
        tiles = problem.query.shape[0] // 128 + problem.cum_seq_lens_q.shape[0] - 1
        assert gpu.emulation.calls[-1].launches[0].grid[0] < 4 * tiles


@KINDS
@OF_BOTH
def test_outputs_have_the_same_bits_with_and_without_lse(gpu, dtype, causal):
    problem = wide([127, 150, 1], [129, 77, 300], 2, 1, dtype)
    assert same(*(check(problem, causal, lse) for lse in (True, False)))


@OF_BOTH
def test_with_pdl(gpu, dtype):
    check(wide([130], [200], 3, 3, dtype), True, enable_pdl=True)


@pytest.mark.archs("sm_90a")
@OF_BOTH
def test_tiles_that_no_row_of_a_warpgroup_sees_are_passed_over(gpu, dtype):
    """There are 128 rows, and the first 64 do not see the second tile. Its values are NaN: multiplied by zeros, they
    would show."""
    problem = wide([128], [128], 1, 1, dtype)
    problem.value[80 if dtype is torch.bfloat16 else 96 :] = math.nan
    out, lse = tsmla.tsmla_prefill(
        problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 128, 1, problem.softmax_scale,
        True, True, problem.cum_seq_lens_q,
    )  # fmt: skip
    first = [tensor[:64] for tensor in (problem.query, problem.key, problem.value)]
    ends = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    judge(Problem(*first, ends, ends, [64], [64], problem.softmax_scale), True, out[:64], lse[:64])


@ON_BOTH_BLACKWELLS
@OF_BOTH
def test_large_scores_force_rescaling(gpu, dtype):
    check(wide([300], [700], 1, 1, dtype, magnitude=6.0), False)


@ON_BOTH_BLACKWELLS
@OF_BOTH
@pytest.mark.parametrize("growth", [7.0, 9.0], ids=["below the limit of 2^8", "beyond it"])
def test_references_that_lag(gpu, dtype, growth):
    """Every second row's scores grow by a little less and by more than what moves a reference of 16 bits, from tile to
    tile: rows of a warp that move have others beside them that do not."""
    problem = wide([70], [500], 1, 1, dtype)
    problem.query.zero_()
    problem.query[::2, :, 0] = 1.0
    problem.key[..., 0] = (torch.arange(500) // 100).mul(growth).view(-1, 1).to(problem.key.dtype)
    problem.softmax_scale = math.log(2.0)
    check(problem, False)


@ON_BOTH_BLACKWELLS
@KINDS
@pytest.mark.parametrize("exponent", [48, 60], ids=str)
def test_products_far_below_zero(gpu, exponent, causal):
    """All keys of a row have such products; causal rows do not see the tiles that they visit first."""
    problem = wide([130, 1], [130, 1], 1, 1, torch.bfloat16)
    problem.query[..., 0], problem.query[..., 1:] = 2.0**exponent, 0.0
    problem.key[..., 0] = -(2.0**exponent) * (1 + torch.arange(131).view(-1, 1) % 8 / 128).to(torch.bfloat16)
    problem.softmax_scale = 200 * 2.0 ** (-2 * exponent)
    check(problem, causal)


@ON_BOTH_BLACKWELLS
def test_eight_bits_do_not_round_the_weight_of_a_late_heavy_key(gpu):
    problem = wide([64], [400], 1, 1, torch.float8_e4m3fn)
    problem.query.copy_(torch.zeros(problem.query.shape))
    problem.query[..., 0] = problem.softmax_scale = 1.0
    for keys, score in ((slice(None), -30.0), (0, 0.0), (300, 0.75)):
        problem.key[keys, ..., 0] = score
    check(problem, False)


@OF_BOTH
def test_values_of_every_dim_and_key_count(gpu, dtype):
    """Equal weights, and values that say where they are: a dim or key that changes places with another shows."""
    problem = wide([3], [192], 1, 1, dtype)
    problem.query.zero_()
    for key in (0, 1, 8, 15, 17, 40, 79, 80, 95, 96, 191):
        problem.value.copy_(torch.zeros(problem.value.shape))
        problem.value[key, 0] = (torch.arange(256) % 61 + 1).div(4).to(dtype)
        out = check(problem, False)
        assert (out[:, 0].float().cpu() * 192 - problem.value[key, 0].float().cpu()).abs().max() < 0.07


@KINDS
@OF_BOTH
def test_pieces_give_the_bits_of_joined_ones(gpu, dtype, causal):
    """192 columns and a rope of 64, from rows with NaN between them; keys share a rope."""
    problem = wide([1, 0, 130, 5], [1, 77, 0, 300], 4, 2, dtype, slack=3)
    problem.key[:, :, 192:] = problem.key[:, :1, 192:].clone()

    def apart(rows: torch.Tensor) -> torch.Tensor:
        wider = torch.full((*rows.shape[:-1], rows.shape[-1] + 16), math.nan, device="cuda").to(dtype)
        wider[..., : rows.shape[-1]] = rows
        return wider[..., : rows.shape[-1]]

    query = apart(problem.query[..., :192]), apart(problem.query[..., 192:])
    key = apart(problem.key[..., :192]), apart(problem.key[:, 0, 192:])

    def run(q, k) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full(problem.query.shape, math.nan, dtype=torch.bfloat16, device="cuda")
        return tsmla.tsmla_prefill(
            q, k, problem.value, None, problem.cum_seq_lens_kv, 1, 4, problem.softmax_scale, causal, True,
            problem.cum_seq_lens_q, out=out, lse=torch.full(out.shape[:2], math.nan, device="cuda"),
        )  # fmt: skip

    with unwatched(gpu):
        joined = run(problem.query, problem.key)
    judge(problem, causal, *joined)
    for q, k in ((query, key), (query, problem.key), (problem.query, (key[0], key[1][:, None]))):
        assert all(same(a, b) for a, b in zip(run(q, k), joined, strict=True))


@OF_BOTH
def test_two_parts_are_the_whole(gpu, dtype):
    """Keys of the first call and of the second; rows with keys in both, in one, in none."""
    lengths = [300, 0, 90]
    whole = wide([130, 5, 70], lengths, 2, 1, dtype, slack=3)
    cuts = [200, 0, 90]
    starts = [0, 300, 300]
    parts = []
    for first in (True, False):
        spans = [(s, s + c) if first else (s + c, s + n) for s, c, n in zip(starts, cuts, lengths, strict=True)]
        rows = torch.cat([torch.arange(*span) for span in spans]).to("cuda")
        counts = [end - start for start, end in spans]
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to("cuda")
        parts.append(
            dataclasses.replace(
                whole, key=whole.key[rows], value=whole.value[rows], cum_seq_lens_kv=ends, lengths_kv=counts
            )
        )

    def run(problem: Problem, **options) -> tuple[torch.Tensor, torch.Tensor]:
        return tsmla.tsmla_prefill(
            problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 1, 3, problem.softmax_scale,
            False, True, problem.cum_seq_lens_q, **options,
        )  # fmt: skip

    earlier = run(parts[0])
    before = [tensor.clone() for tensor in earlier]
    out, lse = run(parts[1], merge_into=earlier)
    tokens = whole.tokens
    assert same(out[130:135], before[0][130:135]) and (lse[130:135] == -math.inf).all()
    assert same(out[135:tokens], before[0][135:tokens]), "a row without new keys stays"
    out[tokens:] = lse[tokens:] = math.nan
    judge(whole, False, out, lse)


@OF_BOTH
@KINDS
def test_bits_do_not_depend_on_other_sequences(gpu, dtype, causal):
    problem = wide([150, 3, 1], [300, 40, 400], 2, 1, dtype)

    def run(*rows: slice, lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        ends = [torch.tensor([0, length], dtype=torch.int32, device="cuda") for length in lengths]
        return tsmla.tsmla_prefill(
            problem.query[rows[0]], problem.key[rows[1]], problem.value[rows[1]], None, ends[1], 400, 1,
            problem.softmax_scale, causal, True, ends[0],
        )  # fmt: skip

    out, lse = tsmla.tsmla_prefill(
        problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 400, 3, problem.softmax_scale,
        causal, True, problem.cum_seq_lens_q,
    )  # fmt: skip
    for (q, k), lengths in zip(((0, 0), (150, 300), (153, 340)), ((150, 300), (3, 40), (1, 400)), strict=True):
        queries, keys = slice(q, q + lengths[0]), slice(k, k + lengths[1])
        alone = run(queries, keys, lengths=lengths)
        assert same(alone[0], out[queries]) and same(alone[1], lse[queries])
