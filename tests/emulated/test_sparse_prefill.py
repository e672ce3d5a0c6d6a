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
    out, lse = tsmla.tsmla_sparse_prefill(
        chosen.query, chosen.kv_cache if kv is None else kv, chosen.indices, chosen.alone.softmax_scale,
        topk_length=chosen.topk_length, sinks=chosen.alone.sinks, output_scale=chosen.alone.output_scale,
        return_lse=True, **changes,
    )  # fmt: skip
    torch.cuda.synchronize()
    judge(chosen.alone, out[:, None], lse[:, None] / LN_2)


def of_rows(tokens: int, heads: int, top_k: int, dtype: torch.dtype = torch.bfloat16, **more) -> Chosen:
    return make_chosen((tokens,), heads, top_k, dtype, page_size=1, page_gap=0, pages=333, output_scale=0.5, **more)


@pytest.mark.parametrize("heads", [8, 80])
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
