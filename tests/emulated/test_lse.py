"""Log-sum-exps of either base, wherever a caller wants them; rows of no request keep what they hold."""

from __future__ import annotations

import math

import prefill_reference
import pytest
import torch
from decode_reference import judge, make_problem, run
from emulated_archs import KERNELS, SMS
from tsmla import tsmla_prefill
from tsmla.compat import flashinfer
from unwatched import unwatched

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]
LN_2 = torch.tensor(math.log(2), dtype=torch.float32)


def layouts(*shape: int) -> dict[str, torch.Tensor]:
    """Tensors [.., heads] of NaN that lie in ways of their own."""
    *outer, heads = shape
    nan = [torch.full(sizes, math.nan, device="cuda") for sizes in ((heads, *outer), (*outer, heads, 2), (*shape,))]
    return {"heads first": nan[0].movedim(0, -1), "with gaps": nan[1][..., 0], "contiguous": nan[2]}


@pytest.mark.parametrize("layout", ["heads first", "with gaps", "contiguous"])
@pytest.mark.parametrize(
    ("lengths", "q_len", "heads"),
    [([70, 0, 3], 2, 6), ([1500], 3, 8), ([300, 65], [3, 1], 40), ([130, 2], 1, 128)],
    ids=["whole", "split", "a pack", "128 heads"],
)
def test_decode(gpu, lengths, q_len, heads, layout):
    """Base e is base 2 times a factor, to the bit, and where it lies changes nothing."""
    problem = make_problem(lengths, q_len, heads)
    shape = problem.query.shape[:-1]
    with unwatched(gpu):
        out, base_2 = run(problem, lse=torch.full(shape, math.nan, device="cuda"))
    judge(problem, out, base_2)
    for base, factor in ((2.0, torch.tensor(1.0)), (math.e, LN_2)):
        lse = layouts(*shape)[layout]
        again, got = run(problem, lse=lse, lse_base=base)
        assert got is lse and torch.equal(again.view(torch.int16), out.view(torch.int16))
        want = base_2.cpu() * factor
        assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(gpu, causal):
    problem = prefill_reference.make_problem([40, 5], [33, 60], 2, 2, 192, 128, torch.bfloat16, "cuda")
    lengths = problem.cum_seq_lens_q, problem.cum_seq_lens_kv

    def lse_of(buffer: torch.Tensor, **base: float) -> torch.Tensor:
        tsmla_prefill(
            problem.query,
            problem.key,
            problem.value,
            None,
            lengths[1],
            60,
            2,
            problem.softmax_scale,
            causal,
            cum_seq_lens_q=lengths[0],
            lse=buffer,
            **base,
        )
        return buffer.cpu()

    shape = problem.query.shape[:2]
    natural = lse_of(layouts(*shape)["contiguous"])
    base_2 = lse_of(layouts(*shape)["heads first"], lse_base=2)
    log2_e = torch.tensor(math.log2(math.e), dtype=torch.float32)
    owned = ~natural.isnan()
    assert torch.equal(natural[owned] * log2_e, base_2[owned]) and torch.equal(base_2.isnan(), natural.isnan())


def test_rows_of_no_request_keep_what_they_hold(gpu):
    """However often a call is made: they are a caller's own."""
    problem = make_problem([70, 3, 9], [1, 2, 0], 6)
    for _ in range(2):
        lse = torch.full(problem.query.shape[:-1], 5.0, device="cuda")
        run(problem, lse=lse, lse_base=math.e)
        run(problem, lse=lse, lse_base=math.e)
        assert (lse[3:] == 5).all() and (lse[:3] != 5).all()
    given = problem.arguments()
    lse = torch.full(problem.query.shape[:-1], 5.0, device="cuda")
    names = ("query", "kv_cache", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens")
    _, got = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **{name: given[name] for name in names},
        qk_nope_head_dim=128,
        max_seq_len=70,
        return_lse=True,
        lse=lse,
        bmm1_scale=problem.softmax_scale,
        cum_seq_lens_q=given["cum_seq_lens_q"],
        max_q_len=2,
    )
    assert got is lse and (lse[3:] == 5).all() and (lse[:3] != 5).all()


def test_rows_of_no_sequence_keep_what_they_hold(gpu):
    problem = prefill_reference.make_problem([40, 5], [33, 60], 2, 2, 192, 128, torch.bfloat16, "cuda")
    tokens, heads = problem.query.shape[:2]
    ends = problem.cum_seq_lens_q.clone()
    ends[-1] -= 2
    lse = torch.full((heads, tokens), 5.0, device="cuda").T
    _, got = flashinfer.trtllm_ragged_attention_deepseek(
        problem.query,
        problem.key,
        problem.value,
        None,
        None,
        40,
        60,
        problem.softmax_scale,
        1.0,
        None,
        2,
        -1,
        ends,
        problem.cum_seq_lens_kv,
        None,
        False,
        True,
        lse=lse,
    )
    last = int(ends[-1])
    assert got is lse and (lse[last:] == 5).all() and (lse[:last] != 5).all()


@pytest.mark.parametrize("empty", ["cache", "table"])
def test_nothing_to_read(gpu, empty):
    """A cache without pages, or a table without columns: zeros and -inf, also from FlashInfer's face."""
    problem = make_problem([0, 0], 2, 6)
    given = problem.arguments()
    if empty == "cache":
        given["kv_cache"] = given["kv_cache"][:0]
    else:
        given["block_tables"] = given["block_tables"][:, :0]
    problem.kv_cache, problem.block_tables = given["kv_cache"], given["block_tables"]
    out, lse = run(problem)
    assert (out == 0).all() and (lse == -math.inf).all()
    names = ("query", "kv_cache", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens")
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **{name: given[name] for name in names}, qk_nope_head_dim=128, max_seq_len=1, return_lse=True
    )
    assert (out == 0).all() and (lse == -math.inf).all()
