"""tsmla_prefill with a key mask in emulation: against float64 at every edge of the contract."""

from __future__ import annotations

import math

import key_masks
import pytest
import torch
import tsmla
from emulated_archs import KERNELS, PREFILLS
from prefill_edges import LENGTHS, check
from prefill_reference import Problem, judge, make_problem
from tsmla_kernels.sm90.prefill.policy import POLICIES

pytestmark = pytest.mark.archs(*KERNELS)
ON_BOTH_BLACKWELLS = pytest.mark.archs(*PREFILLS)
DIMS = [(192, 128), (128, 128), (256, 256)]
KINDS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
OF_EACH = pytest.mark.parametrize(
    ("dtype", "dims"),
    [(torch.bfloat16, (192, 128)), (torch.bfloat16, (256, 256)), (torch.float8_e4m3fn, (192, 128)),
     (torch.float8_e4m3fn, (256, 256))],
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
"""The four kinds of heads that have tiles and rings of their own."""


def masked(
    lengths_q: list[int], lengths_kv: list[int], heads: tuple[int, int], dims, dtype, seen=0.3, **options
) -> Problem:
    """A problem and what its queries see: a tensor, or the share of all keys."""
    problem = make_problem(lengths_q, lengths_kv, *heads, *dims, dtype, "cuda", **options)
    problem.seen = key_masks.random(lengths_q, lengths_kv, seen) if isinstance(seen, float) else seen
    return problem


def words(problem: Problem, **more) -> torch.Tensor:
    slack = problem.query.shape[0] - problem.tokens
    return key_masks.words(problem.seen, problem.lengths_q, problem.lengths_kv, slack=slack, **more)


def checked(problem: Problem, causal: bool, **options) -> torch.Tensor:
    return check(problem, causal, key_mask=words(problem), **options)


@KINDS
@OF_EACH
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(gpu, lengths, dtype, dims, causal):
    problem = masked(*lengths, (2, 1), dims, dtype, slack=3, padded_entries=2, strided=True)
    check(problem, causal, key_mask=words(problem, gap=5, spare=2))


@KINDS
@OF_EACH
def test_ctas_with_several_tiles(gpu, monkeypatch, dtype, dims, causal):
    """A CTA has tiles without any visit: the first 150 rows see nothing at all."""
    monkeypatch.setattr("tsmla.operators.prefill.multiprocessors", lambda device: 1)
    problem = masked([257, 0, 130], [300, 7, 100], (4, 2), dims, dtype, 0.02, slack=3, padded_entries=2)
    problem.seen[:150] = False
    checked(problem, causal)


@KINDS
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_and_dims(gpu, dtype, dims, causal):
    if dims == (256, 256) and dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        with pytest.raises(tsmla.UnsupportedError, match=r"head dims \(qk, v\) \(256, 256\) takes bf16, e4m3"):
            checked(masked([3], [4], (1, 1), dims, dtype), causal)
    else:
        checked(masked([130], [200], (2, 2), dims, dtype), causal)


@ON_BOTH_BLACKWELLS
@KINDS
@OF_EACH
def test_all_bits_give_the_bits_of_a_call_without_a_mask(gpu, dtype, dims, causal):
    problem = masked([127, 150, 1], [129, 77, 300], (2, 1), dims, dtype, 1.1)
    both = [
        tsmla.tsmla_prefill(
            problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 300, 3, problem.softmax_scale,
            causal, True, problem.cum_seq_lens_q, key_mask=mask,
        )
        for mask in (words(problem), None)
    ]  # fmt: skip
    assert all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(*both, strict=True))


@ON_BOTH_BLACKWELLS
@OF_EACH
def test_tiles_of_which_one_bit_is_missing(gpu, dtype, dims):
    """All other words of such a tile are whole. LSEs of equal scores tell one key more or less."""
    problem = masked([130], [384], (1, 1), dims, dtype, 1.1)
    problem.query.zero_()
    problem.seen[torch.tensor([0, 63, 64, 129]), torch.tensor([0, 131, 300, 383])] = False
    checked(problem, False)


@ON_BOTH_BLACKWELLS
@OF_EACH
def test_single_keys_at_every_bound(gpu, dtype, dims):
    """Each query sees one key: its output is that key's value, and nothing else."""
    keys = sorted({n + d for n in (1, 32, 64, 80, 96, 128, 160, 192, 240, 256, 288, 320) for d in (-1, 0)} | {16, 48})
    problem = masked([len(keys)], [321], (1, 1), dims, dtype, torch.zeros(len(keys), 321, dtype=torch.bool))
    problem.seen[torch.arange(len(keys)), torch.tensor(keys)] = True
    out = checked(problem, False)
    assert torch.equal(out.cpu().float(), problem.value[keys].cpu().to(torch.bfloat16).float())


@ON_BOTH_BLACKWELLS
@KINDS
@OF_EACH
def test_rows_that_see_no_key(gpu, dtype, dims, causal):
    """A whole call, a whole query tile, and single rows beside others; with sinks, which such rows see."""
    none = masked([200], [300], (2, 1), dims, dtype, 0.0)
    assert not checked(none, causal).any()
    problem = masked([300], [300], (2, 1), dims, dtype, 0.2)
    problem.seen[100:300:3] = False
    problem.seen[:40] = False
    checked(problem, causal)
    problem.sinks, problem.lse_includes_sink = torch.randn(2, device="cuda"), True
    checked(problem, causal, sinks=problem.sinks, lse_includes_sink=True)


@KINDS
@OF_EACH
@pytest.mark.parametrize("tiles", [(4,), (0,), (1, 3), (0, 4), (0, 2, 4)], ids=str)
def test_tiles_without_a_bit_are_neither_loaded_nor_multiplied(gpu, dtype, dims, causal, tiles):
    """Their values are NaN, as are the keys'; multiplied by zeros, they would show. The second sequence has its own."""
    tile_kv = POLICIES[8 * dtype.itemsize, dims[1]].tile_kv if gpu.arch == "sm_90a" else 128
    keys = 5 * tile_kv
    problem = masked([140, 3], [keys, 5], (2, 1), dims, dtype, 0.05)
    for tile in set(range(5)) - set(tiles):
        hidden = slice(tile * tile_kv, (tile + 1) * tile_kv)
        problem.seen[:140, hidden] = False
    mask, whole = words(problem), problem
    key, value = problem.key.clone(), problem.value.clone()
    for tile in set(range(5)) - set(tiles):
        hidden = slice(tile * tile_kv, (tile + 1) * tile_kv)
        problem.key[hidden] = problem.value[hidden] = math.nan
    out, lse = tsmla.tsmla_prefill(
        problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, keys, 2, problem.softmax_scale,
        causal, True, problem.cum_seq_lens_q, key_mask=mask,
    )  # fmt: skip
    whole.key, whole.value = key, value
    judge(whole, causal, out, lse)


@KINDS
@OF_EACH
def test_keys_without_a_word_are_not_seen(gpu, dtype, dims, causal):
    """The mask ends before the keys do, which the host does not know, and has no words at all."""
    problem = masked([150, 3], [300, 40], (2, 1), dims, dtype, 0.5, slack=2)
    mask = words(problem)
    for count in (9, 3, 1, 0):
        problem.seen[:, 32 * count :] = False
        narrow = mask[:, :count]
        out = torch.full((*problem.query.shape[:2], dims[1]), math.nan, dtype=torch.bfloat16, device="cuda")
        out, lse = tsmla.tsmla_prefill(
            problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 0, 2, problem.softmax_scale,
            causal, True, problem.cum_seq_lens_q, out=out, key_mask=narrow,
            lse=torch.full(out.shape[:2], math.nan, device="cuda"),
        )  # fmt: skip
        judge(problem, causal, out, lse)


@KINDS
@OF_EACH
def test_results_are_merged(gpu, dtype, dims, causal):
    """Rows with keys in both calls, in one, in none: a mask and what it leaves out are the whole."""
    problem = masked([130, 5, 70], [300, 2, 90], (2, 1), dims, dtype, 0.4, slack=3)
    problem.seen[::7] = False
    problem.seen[3::7] = True
    tail = problem.seen.clone()

    def run(seen: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
        problem.seen = seen
        return tsmla.tsmla_prefill(
            problem.query, problem.key, problem.value, None, problem.cum_seq_lens_kv, 300, 3, problem.softmax_scale,
            causal, True, problem.cum_seq_lens_q, key_mask=words(problem), **options,
        )  # fmt: skip

    out, lse = run(~tail, merge_into=run(tail))
    problem.seen = None
    out[problem.tokens :] = lse[problem.tokens :] = math.nan
    judge(problem, causal, out, lse)


@OF_EACH
def test_pieces_and_an_lse_of_the_callers(gpu, dtype, dims):
    problem = masked([130, 5], [170, 300], (4, 2), dims, dtype, 0.3)
    nope = dims[0] - 64
    problem.key[:, :, nope:] = problem.key[:, :1, nope:].clone()
    lse = torch.full((4, 135), math.nan, device="cuda")
    out = tsmla.tsmla_prefill(
        (problem.query[..., :nope].clone(), problem.query[..., nope:].clone()),
        (problem.key[..., :nope].clone(), problem.key[:, 0, nope:].clone()),
        problem.value, None, problem.cum_seq_lens_kv, 300, 2, problem.softmax_scale, True, False,
        problem.cum_seq_lens_q, enable_pdl=True, lse=lse.T, lse_base=2, key_mask=words(problem, gap=1000),
    )  # fmt: skip
    judge(problem, True, out, lse.T * math.log(2))


@ON_BOTH_BLACKWELLS
@OF_EACH
def test_large_scores_force_rescaling(gpu, dtype, dims):
    checked(masked([130], [700], (1, 1), dims, dtype, 0.1, magnitude=6.0), False)
