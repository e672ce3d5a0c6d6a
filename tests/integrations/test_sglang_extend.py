"""The SGLang plug-in's prefills: new tokens and chunks of their context with keys of every head, as SGLang's DeepSeek
models ask for them, and new tokens whose layers leave keys latent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_server import BF16, E4M3, HEADS, Layer, Server, close, expanded_layer
from sglang_server import expected as absorbed
from stand_in_kernels import merged, rows
from tsmla.integrations.sglang.backend import TsmlaBackend

pytestmark = pytest.mark.usefixtures("kernels")
NEW = [20, 1, 7]


def extend(server: Server, context: list[int], mode=ForwardMode.EXTEND):
    """A batch of NEW tokens behind so many keys each."""
    batch = server.batch(mode, [c + n for c, n in zip(context, NEW, strict=True)])
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(NEW, dtype=torch.int32), NEW
    batch.seq_lens_cpu = batch.seq_lens
    return batch


def expanded(latent: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of every head, and values as a slice of the projection's result."""
    kv = (latent[:, :512] @ weight.T).view(-1, HEADS, 256)
    return torch.cat((kv[..., :128], latent[:, None, 512:].expand(-1, HEADS, -1)), -1), kv[..., 128:]


def as_the_model_does(backend, server: Server, batch, context: list[int], q: torch.Tensor, chunk: int) -> torch.Tensor:
    """New tokens; then every request's next `chunk` keys of context, merged by natural LSEs, until none are left."""
    weight = torch.randn(HEADS * 256, 512).mul_(512**-0.5).to(BF16)
    new = torch.cat([keys[c : c + n] for keys, c, n in zip(server.keys, context, NEW, strict=True)])
    batch.mha_return_lse, batch.attn_attend_prefix_cache = any(context), False
    result = backend.forward(q, *expanded(new, weight), expanded_layer(), batch, save_kv_cache=False)
    if not any(context):
        return result, weight
    out, lse = (x.double() for x in result)
    batch.attn_attend_prefix_cache, starts = True, range(0, max(context), chunk)
    parts = [[keys[a : min(a + chunk, c)] for keys, c in zip(server.keys, context, strict=True)] for a in starts]
    ends = [list(itertools.accumulate((len(own) for own in part), initial=0)) for part in parts]
    batch.prefix_chunk_cu_seq_lens = torch.tensor(ends, dtype=torch.int32)
    for batch.prefix_chunk_idx, part in enumerate(parts):
        result = backend.forward(q, *expanded(torch.cat(part), weight), expanded_layer(), batch, save_kv_cache=False)
        assert result[1].shape == (len(q), HEADS) and result[1].is_contiguous()
        out, lse = merged(*(x.double() for x in result), out, lse)
    return out, weight


def test_models_ask_their_backend_for_the_pools(sglang):
    """Chunks of context are gathered through them (`forward_context.get_req_to_token_pool`)."""
    runner = Server([30]).runner()
    backend = TsmlaBackend(runner)
    assert backend.req_to_token_pool is runner.req_to_token_pool
    assert backend.token_to_kv_pool is runner.token_to_kv_pool


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("context", [[0, 0, 0], [30, 0, 50], [0, 64, 0]])
def test_new_tokens_and_their_context_in_chunks(sglang, context, mode):
    server = Server([c + n for c, n in zip(context, NEW, strict=True)])
    backend, batch = TsmlaBackend(server.runner()), extend(server, context, mode)
    backend.init_forward_metadata(batch)
    q = torch.randn(sum(NEW), HEADS, 192).to(BF16)
    out, weight = as_the_model_does(backend, server, batch, context, q, chunk=24)
    ends = list(itertools.accumulate(NEW, initial=0))
    for first, last, keys in zip(ends[:-1], ends[1:], server.keys, strict=True):
        k, v = expanded(keys, weight)
        scores = expanded_layer().scaling * torch.einsum("qhd,khd->hqk", q[first:last].double(), k.double())
        n, m = scores.shape[1:]
        scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
        close(out[first:last], rows(scores, v.double().transpose(0, 1))[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("padding", [0, 3])
def test_new_tokens_whose_keys_stay_latent(sglang, dtype, page, padding):
    """They are decoded, each request's own number of them; rows behind them belong to no request."""
    context = [50, 0, 9]
    server = Server([c + n for c, n in zip(context, NEW, strict=True)], dtype=dtype, page=page)
    for request, n in enumerate(context):
        server.write(request, 0, n)
    backend, batch = TsmlaBackend(server.runner()), extend(server, context)
    backend.init_forward_metadata(batch)
    batch.out_cache_loc, new = server.new(context, NEW)
    q = torch.randn(sum(NEW) + padding, HEADS, 576).to(BF16) / 4
    parts = {"q_rope": q[..., 512:], "k_rope": new[:, None, 512:]}
    out = backend.forward(q[..., :512].contiguous(), new[:, None, :512], new[:, None, :512], Layer(), batch, **parts)
    read = q.to(dtype).double()[: sum(NEW)]
    assert out.shape == (sum(NEW) + padding, HEADS * 512)
    close(out[: sum(NEW)], absorbed(read, [server.kept(r) for r in range(3)], NEW), atol=2e-2)


def run(sglang, layer, changes=None, world=1, **others):
    """Ask for a prefill without context."""
    server = Server(NEW, world=world)
    sglang.parallel.dcp_enabled, sglang.parallel.dcp_size = world > 1, world
    backend, batch = TsmlaBackend(server.runner(**changes or {})), extend(server, [0, 0, 0])
    batch.mha_one_shot = others.pop("mha_one_shot", None)
    backend.init_forward_metadata(batch)
    q, k, v = torch.zeros(3, sum(NEW), HEADS, 576, dtype=BF16)
    return backend.forward(q, k, v, layer, batch, save_kv_cache=False, **others)


def test_what_prefills_refuse(sglang):
    with pytest.raises(NotImplementedError, match="under context parallelism .* with keys of every head"):
        run(sglang, Layer(), world=2)
    with pytest.raises(NotImplementedError, match="not made for prefills"):
        run(sglang, expanded_layer(), {"prefill_attention_backend_str": "fa3"})
    with pytest.raises(NotImplementedError, match="not both at once"):
        run(sglang, expanded_layer(), mha_one_shot=True)
    with pytest.raises(NotImplementedError, match="without topk_indices"):
        run(sglang, Layer(), topk_indices=torch.zeros(1))


@pytest.mark.parametrize("mode", [ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND])
def test_batches_that_are_not_run(sglang, mode):
    server = Server(NEW)
    backend = TsmlaBackend(server.runner())
    with pytest.raises(NotImplementedError, match=mode.name):
        backend.init_forward_metadata(extend(server, [0, 0, 0], mode))


def test_prefills_are_not_captured(sglang):
    server = Server(NEW)
    backend = TsmlaBackend(server.runner())
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(NotImplementedError, match="--cuda-graph-backend-prefill disabled"):
        backend.init_forward_metadata_out_graph(extend(server, [0, 0, 0]), in_capture=True)
