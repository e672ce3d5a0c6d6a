"""tsmla_sparse_prefill in emulation against float64."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from chosen_reference import Chosen, in_two_tensors, make_chosen
from decode_reference import LATENT, judge
from emulated_archs import KERNELS, SMS

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]
LN_2 = math.log(2.0)


def check(chosen: Chosen, kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, **changes) -> None:
    """Call the operator and judge what it gives."""
    out, lse, largest = tsmla.tsmla_sparse_prefill(
        chosen.query, chosen.kv_cache if kv is None else kv, chosen.indices, chosen.alone.softmax_scale,
        topk_length=chosen.topk_length, sinks=chosen.alone.sinks, output_scale=chosen.alone.output_scale,
        return_lse=True, return_max_logits=True, **changes,
    )  # fmt: skip
    torch.cuda.synchronize()
    judge(chosen.alone, out[:, None], lse[:, None] / LN_2)
    judge_largest(chosen, largest)


def judge_largest(chosen: Chosen, largest: torch.Tensor) -> None:
    """Compare the largest logits with float64, to what float32 sums of so many products round by; rows of 656 bytes are
    given as bf16 rounds them."""
    given = chosen.alone
    for token, keys in enumerate(given.rows):
        query, error = given.query[token, 0].double() * given.softmax_scale, 2.0**-18
        if chosen.kv_cache.shape[-1] == 656:
            error = 2.0**-9
        scores, sizes = query @ keys.double().T, query.abs() @ keys.double().abs().T
        expected = scores.amax(-1) if len(keys) else scores.new_full((len(query),), -math.inf)
        slack = sizes.amax(-1) * error if len(keys) else 0
        assert torch.equal(largest[token].isinf(), expected.isinf()), token
        assert not len(keys) or ((largest[token] - expected).abs() <= slack).all(), token


def of_rows(tokens: int, heads: int, top_k: int, dtype: torch.dtype = torch.bfloat16, **more) -> Chosen:
    return make_chosen((tokens,), heads, top_k, dtype, page_size=1, page_gap=0, pages=333, output_scale=0.5, **more)


@pytest.mark.parametrize("heads", [1, 8, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows(gpu, dtype, heads):
    chosen = of_rows(4, heads, 200, dtype, lengths=[200, 64, 0, 3], sinks=torch.randn(heads, device="cuda"))
    check(chosen, chosen.kv_cache[:, 0])


def test_rows_without_rope_parts(gpu):
    chosen = of_rows(3, 16, 130, rope=0)
    check(chosen, chosen.kv_cache[:, 0])


def test_rows_of_656_bytes(gpu):
    chosen = of_rows(3, 16, 130, row="fp8_ds_mla")
    check(chosen, chosen.kv_cache[:, 0])
    check(make_chosen((3,), 64, 130, row="fp8_ds_mla", page_size=61))


def test_pieces(gpu):
    chosen = of_rows(3, 16, 130)
    latent, rope = (x[:, 0] for x in in_two_tensors(chosen.kv_cache))
    check(chosen, (latent, rope))
    chosen.query = chosen.query[..., :LATENT].clone(), chosen.query[..., LATENT:].clone()
    check(chosen, (latent, rope))


def test_more_tokens_than_processors(gpu):
    """Work of whole tokens and of parts of them: the workspace that is made is enough."""
    check(of_rows(4 * SMS + 1, 16, 70))


def test_one_token_s_bits_do_not_depend_on_others(gpu):
    chosen = of_rows(5, 16, 400)
    given = {"softmax_scale": 0.1, "batch_invariant": True}
    out = tsmla.tsmla_sparse_prefill(chosen.query, chosen.kv_cache, chosen.indices, **given)
    for token in range(5):
        own = slice(token, token + 1)
        alone = tsmla.tsmla_sparse_prefill(chosen.query[own], chosen.kv_cache, chosen.indices[own], **given)
        assert torch.equal(alone, out[own])
