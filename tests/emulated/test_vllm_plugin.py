"""The vLLM plug-in's calls, as emulated kernels take them: strides and dtypes of what vLLM hands over, and numbers."""

from __future__ import annotations

import importlib.util
import math
import types

import pytest
import stub_vllm
import torch
from stand_in_kernels import rows

if importlib.util.find_spec("vllm") is None:
    stub_vllm.install()

pytestmark = pytest.mark.archs("sm_90a")
HEADS, SCALE = 4, 0.1


def test_decode(gpu):
    """The query's latent part comes out of a batched product, its rope part is a slice, and pages are strided."""
    from tsmla.integrations.vllm.decode import TsmlaImpl

    impl = object.__new__(TsmlaImpl)
    impl.__dict__.update(
        scale=SCALE, _fp8=False, _window_left=-1, dcp_world_size=1, dcp_rank=0, need_to_return_lse_for_decode=False,
        _workspace=lambda heads, device: torch.empty(1 << 22, dtype=torch.int8, device=device),
    )  # fmt: skip
    lengths = [70, 3]
    latent = torch.randn(HEADS, 4, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    rope = torch.randn(4, HEADS, 192, dtype=torch.bfloat16, device="cuda")[..., 128:]
    cache = torch.randn(3, 2, 64, 576, dtype=torch.bfloat16, device="cuda")[:, 1]
    table = torch.tensor([[2, 0, 0], [1, 0, 0]], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    decode = types.SimpleNamespace(block_table=table, seq_lens=seq_lens, dcp_tot_seq_lens=None, q_len=2)
    out, lse = impl.forward_mqa((latent, rope), cache, types.SimpleNamespace(decode=decode, max_seq_len=70), None)
    assert lse is None and out.shape == (4, HEADS, 512)
    q, pages, got = torch.cat((latent, rope), -1).cpu().double(), cache.cpu().double(), out.cpu().double()
    for token in range(4):
        request, last = divmod(token, 2)
        keys = pages[[2, 0] if request == 0 else [1]].reshape(-1, 576)[: lengths[request] - 1 + last]
        want, _ = rows(SCALE * q[token] @ keys.T, keys[:, :512])
        torch.testing.assert_close(got[token], want, rtol=2e-2, atol=1e-2)


def test_prefill(gpu):
    """Into the layer's output; values are a slice of the projection's result."""
    from tsmla.integrations.vllm.prefill import TsmlaPrefill

    backend = object.__new__(TsmlaPrefill)
    backend.__dict__.update(scale=SCALE, fp8=False, qk_nope_head_dim=128)
    n = 40
    q, k, kv = (torch.randn(n, HEADS, d, dtype=torch.bfloat16, device="cuda") for d in (192, 192, 256))
    starts = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    output = torch.full((n, HEADS * 128), math.nan, dtype=torch.bfloat16, device="cuda")
    _, lse = backend.attend(q, k, kv[..., 128:], starts, starts, True, True, output.view(n, HEADS, 128))
    scores = SCALE * torch.einsum("qhd,khd->hqk", q.cpu().double(), k.cpu().double())
    scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    want, natural = rows(scores, kv[..., 128:].cpu().double().transpose(0, 1))
    torch.testing.assert_close(output.cpu().double().view(n, HEADS, 128), want.transpose(0, 1), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu().double(), natural, rtol=1e-3, atol=1e-3)
