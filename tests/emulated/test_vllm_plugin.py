"""The vLLM plug-in's calls, as emulated kernels take them: strides and dtypes of what vLLM hands over, and numbers."""

from __future__ import annotations

import math
import types

import pytest
import stub_vllm
import torch
from stand_in_kernels import rows
from tsmla.identity.row_format import ROWS
from tsmla.problems.rows import numbers_in, stored_as

if not stub_vllm.REAL_VLLM:
    stub_vllm.install()

pytestmark = pytest.mark.archs("sm_90a")
HEADS, SCALE = 4, 0.1


@pytest.mark.parametrize("q_lens", [[2, 2], [3, 1], [2, 1]], ids=["alike", "of their own", "one is left out"])
def test_decode(gpu, q_lens):
    """The query's latent part comes out of a batched product, its rope part is a slice, and pages are strided. New
    memory is NaN, and so is a query token that no request has, which sees no key."""
    from tsmla.integrations.vllm.decode import TsmlaImpl

    impl = object.__new__(TsmlaImpl)
    impl.__dict__.update(
        scale=SCALE,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        _fp8=False,
        _quantises=False,
        _batch_invariant=False,
        _window_left=-1,
        dcp_world_size=1,
        dcp_rank=0,
        need_to_return_lse_for_decode=sum(q_lens) < 4,
        _parallel=None,
        _workspace=lambda heads, device: torch.empty(1 << 22, dtype=torch.int8, device=device),
    )
    lengths = [70, 3]
    latent = torch.randn(HEADS, 4, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    rope = torch.randn(4, HEADS, 192, dtype=torch.bfloat16, device="cuda")[..., 128:]
    cache = torch.randn(3, 2, 64, 576, dtype=torch.bfloat16, device="cuda")[:, 1]
    table = torch.tensor([[2, 0, 0], [1, 0, 0]], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    ends = [0, q_lens[0], sum(q_lens)]
    starts = None if q_lens == [2, 2] else torch.tensor(ends, dtype=torch.int32, device="cuda")
    decode = types.SimpleNamespace(
        block_table=table,
        seq_lens=seq_lens,
        dcp_tot_seq_lens=None,
        q_len=max(q_lens),
        starts=starts,
        leaves_out=ends[-1] < 4,
        workspace=None,
    )
    for part in latent, rope:
        part[ends[-1] :] = math.nan
    out, lse = impl.forward_mqa((latent, rope), cache, types.SimpleNamespace(decode=decode, max_seq_len=70), None)
    assert out.shape == (4, HEADS, 512) and (out[ends[-1] :] == 0).all()
    if decode.leaves_out:
        assert lse.shape == (4, HEADS) and lse[3:].isneginf().all() and lse[:3].isfinite().all()
    else:
        assert lse is None
    q, pages, got = torch.cat((latent, rope), -1).cpu().double(), cache.cpu().double(), out.cpu().double()
    for token in range(ends[-1]):
        request = int(token >= q_lens[0])
        behind = sum(q_lens[: request + 1]) - 1 - token
        keys = pages[[2, 0] if request == 0 else [1]].reshape(-1, 576)[: lengths[request] - behind]
        want, _ = rows(SCALE * q[token] @ keys.T, keys[:, :512])
        torch.testing.assert_close(got[token], want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("gap", [0, 2])
def test_decode_of_chosen_keys(gpu, gap):
    """The query comes in two strided parts. Rows of memory are numbered, those between pages too, which are NaN. The
    last token chose nothing."""
    from tsmla.integrations.vllm.sparse import TsmlaSparseImpl

    impl = object.__new__(TsmlaSparseImpl)
    impl.__dict__.update(
        scale=SCALE,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        _fp8=False,
        _quantises=False,
        _batch_invariant=False,
        need_to_return_lse_for_decode=True,
        _workspace=lambda heads, device: torch.empty(1 << 22, dtype=torch.int8, device=device),
    )
    latent = torch.randn(HEADS, 3, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    rope = torch.randn(3, HEADS, 192, dtype=torch.bfloat16, device="cuda")[..., 128:]
    pool = torch.full((4, 16 + gap, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    cache = pool[:, :16]
    cache.copy_(torch.randn(4, 16, 576))
    counts = torch.tensor([70, 5, 0], dtype=torch.int32, device="cuda")
    slots = torch.randint(0, 64, (3, 80))
    indices = (slots // 16 * (16 + gap) + slots % 16).to(torch.int32).to("cuda")
    out, lse = impl._forward_mqa_kernel(
        (latent, rope), cache, indices, counts, layer=None, block_size=16, is_decode=True
    )
    q, numbers = torch.cat((latent, rope), -1).cpu().double(), cache.cpu().double()
    for token, count in enumerate([70, 5, 0]):
        own = slots[token, :count]
        keys = numbers[own // 16, own % 16]
        want, natural = rows(SCALE * q[token] @ keys.T, keys[:, :512])
        torch.testing.assert_close(out[token].cpu().double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse[token].cpu().double(), natural / math.log(2), rtol=1e-3, atol=1e-3)


def test_prompts_over_rows_of_656_bytes(gpu, monkeypatch):
    """Two prompts are decoded from keys that are read into bf16 first, a decode before them from its rows. Pages are
    strided; rows that no key has are 0xFF."""
    from tsmla.integrations.vllm import prompts, sparse

    def slots_of(requests, table, positions, BLOCK_SIZE, **rest):
        pages = table[requests.long()[:, None], positions.clamp(min=0).long() // BLOCK_SIZE]
        found = torch.where(positions < 0, -1, pages * BLOCK_SIZE + positions % BLOCK_SIZE)
        return found.int(), (positions >= 0).sum(-1).int()

    monkeypatch.setattr(sparse.sparse_utils, "triton_filter_and_convert_dcp_index", slots_of)
    row, lengths, tokens = ROWS["fp8_ds_mla"], [5, 70, 32], [1, 3, 2]
    heads, table = prompts.MOST_HEADS_THAT_DECODE + 1, torch.arange(15, dtype=torch.int32).view(3, 5).flip(0)
    stored = [stored_as(row, torch.randn(length, 576).to(torch.bfloat16)) for length in lengths]
    pool = torch.full((15, 2, 16, 656), 255, dtype=torch.uint8)
    for own, pages in zip(stored, table.tolist(), strict=True):
        for place, key in enumerate(own.view(torch.uint8)):
            pool[pages[place // 16], 1, place % 16] = key
    requests = torch.repeat_interleave(torch.arange(3), torch.tensor(tokens))
    chosen = torch.full((6, 40), -1, dtype=torch.int32)
    for token, request in enumerate(requests.tolist()):
        chosen[token, : 7 * token] = torch.randint(0, lengths[request], (7 * token,))
    metadata = types.SimpleNamespace(
        num_decodes=1, num_prefills=2, num_decode_tokens=1, num_actual_tokens=6, block_size=16,
        lengths=torch.tensor(lengths), block_table=table.to("cuda"), req_id_per_token=requests.int().to("cuda"),
        cp_kv_cache_interleave_size=1,
    )  # fmt: skip
    metadata.prompts = prompts.of(metadata)
    impl = object.__new__(sparse.TsmlaSparseImpl)
    impl.__dict__.update(
        scale=SCALE, kv_lora_rank=512, qk_rope_head_dim=64, _fp8=False, _quantises=False, _batch_invariant=False,
        _reads_prompts=True, topk_indices_buffer=chosen.to("cuda"), dcp_world_size=1, dcp_rank=0,
        need_to_return_lse_for_decode=False,
        _workspace=lambda heads, device: torch.empty(1 << 22, dtype=torch.int8, device=device),
    )  # fmt: skip
    latent = torch.randn(heads, 6, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    rope = torch.randn(6, heads, 192, dtype=torch.bfloat16, device="cuda")[..., 128:]
    out, _ = impl.forward_mqa((latent, rope), pool.to("cuda")[:, 1], metadata, None)
    q = torch.cat((latent, rope), -1).cpu().double()
    for token, request in enumerate(requests.tolist()):
        keys = numbers_in(row, stored[request])[chosen[token, : 7 * token].long()].double()
        want, _ = rows(SCALE * q[token] @ keys.T, keys[:, :512])
        torch.testing.assert_close(out[token].cpu().double(), want, rtol=2e-2, atol=1e-2)


def test_prefill(gpu):
    """Keys stay in their two parts, k_nope and values are slices of a projection's result. New tokens are computed into
    the layer's output, and context is merged into it. The last tokens are no request's, and see no key."""
    from tsmla.integrations.vllm.prefill import TsmlaPrefill

    backend = object.__new__(TsmlaPrefill)
    backend.__dict__.update(scale=SCALE, fp8=False, qk_nope_head_dim=128, qk_rope_head_dim=64, _leaves_out=True)
    assert backend.takes_keys_in_parts
    new, context, left_out = 40, 70, 3
    q = torch.randn(new + left_out, HEADS, 192, dtype=torch.bfloat16, device="cuda")
    q[new:] = math.nan
    output = torch.full((new + left_out, HEADS * 128), math.nan, dtype=torch.bfloat16, device="cuda")
    output = output.view(-1, HEADS, 128)
    earlier, scores, values = None, [], []
    for n, causal in ((new, True), (context, False)):
        kv = torch.randn(n, HEADS, 256, dtype=torch.bfloat16, device="cuda")
        k_pe = torch.randn(n, 1, 64, dtype=torch.bfloat16, device="cuda")
        starts = (torch.tensor([0, tokens], dtype=torch.int32, device="cuda") for tokens in (new, n))
        given = {"out": output} if earlier is None else {"earlier": earlier}
        earlier = backend.attend(q, (kv[..., :128], k_pe), kv[..., 128:], *starts, causal, True, **given)
        k = torch.cat((kv[..., :128], k_pe.expand(-1, HEADS, -1)), -1).cpu().double()
        scores.append(SCALE * torch.einsum("qhd,khd->hqk", q[:new].cpu().double(), k))
        if causal:
            scores[-1].masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        values.append(kv[..., 128:].cpu().double().transpose(0, 1))
    want, natural = rows(torch.cat(scores, -1), torch.cat(values, 1))
    out, lse = earlier
    assert out.data_ptr() == output.data_ptr() and lse.is_contiguous()
    torch.testing.assert_close(output[:new].cpu().double(), want.transpose(0, 1), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:, :new].cpu().double(), natural, rtol=1e-3, atol=1e-3)
    assert (output[new:] == 0).all() and lse[:, new:].isneginf().all()
