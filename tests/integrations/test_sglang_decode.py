"""The SGLang plug-in's decodes and verifications, on batches as SGLang makes them: numbers against attention over each
request's own keys."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_server import BF16, CONTEXT, E4M3, HEADS, Layer, Server, close, expected
from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.integrations.sglang.backend import TsmlaBackend

pytestmark = pytest.mark.usefixtures("kernels")
LENGTHS = [70, 1, 33]


def decode(backend, server, batch, first, q_len=1, *, joined=False, q=None):
    """Run one layer on a batch whose requests have q_len new tokens each, from positions `first` on."""
    counts = [q_len] * len(first)
    batch.out_cache_loc, new = server.new(first, counts)
    if q is None:
        q = torch.randn(HEADS, len(new), 512).to(BF16).transpose(0, 1), torch.randn(len(new), HEADS, 64).to(BF16)
    if joined:
        result = backend.forward(torch.cat(q, -1), new[:, None], new[:, None, :512], Layer(), batch)
    else:
        parts = {"q_rope": q[1], "k_rope": new[:, None, 512:]}
        result = backend.forward(q[0], new[:, None, :512], new[:, None, :512], Layer(), batch, **parts)
    return result, torch.cat(q, -1)


def before(server: Server, lengths: list[int], q_len: int = 1) -> list[int]:
    """Write all keys but those of the last q_len tokens; return their positions."""
    for request, n in enumerate(lengths):
        server.write(request, 0, n - q_len)
    return [n - q_len for n in lengths]


@pytest.mark.parametrize("page", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_batch_outside_of_graphs(sglang, page, joined, known):
    server = Server(LENGTHS, page=page)
    backend, first = TsmlaBackend(server.runner()), before(server, LENGTHS)
    batch = server.batch(ForwardMode.DECODE, LENGTHS)
    batch.seq_lens_cpu = torch.tensor(LENGTHS) if known else None
    backend.init_forward_metadata(batch)
    out, q = decode(backend, server, batch, first, joined=joined)
    assert out.shape == (3, HEADS * 512) and out.dtype == BF16
    close(out, expected(q, [server.kept(r) for r in range(3)], [1] * 3))


@pytest.mark.parametrize("joined", [False, True])
def test_pools_of_a_former_release_are_given_slots(sglang, joined, monkeypatch):
    """SGLang 0.5.17 is such a release."""
    monkeypatch.delattr(memory_pool.KVWriteLoc, "for_batch", raising=False)
    server = Server(LENGTHS)
    backend, first = TsmlaBackend(server.runner()), before(server, LENGTHS)
    batch = server.batch(ForwardMode.DECODE, LENGTHS)
    del batch.out_cache_loc_is_physical
    backend.init_forward_metadata(batch)
    out, q = decode(backend, server, batch, first, joined=joined)
    close(out, expected(q, [server.kept(r) for r in range(3)], [1] * 3))


def test_rows_without_rope(sglang):
    server = Server(LENGTHS, columns=512)
    backend, first = TsmlaBackend(server.runner(prefill_attention_backend_str="fa3")), before(server, LENGTHS)
    batch = server.batch(ForwardMode.DECODE, LENGTHS)
    backend.init_forward_metadata(batch)
    batch.out_cache_loc, new = server.new(first, [1] * 3)
    q, layer = torch.randn(3, HEADS, 512).to(BF16), Layer(head_dim=512)
    nothing = new[:, None, 512:]
    parts = {"q_rope": q[..., :0], "k_rope": nothing}
    out = backend.forward(q, new[:, None], new[:, None], layer, batch, **parts)
    close(out, expected(q, [server.kept(r) for r in range(3)], [1] * 3))


def test_an_fp8_cache(sglang, kernels):
    """Queries are rounded to e4m3, those beyond its range to its largest number."""
    server = Server(LENGTHS, dtype=E4M3)
    backend, first = TsmlaBackend(server.runner()), before(server, LENGTHS)
    batch = server.batch(ForwardMode.DECODE, LENGTHS)
    backend.init_forward_metadata(batch)
    q = torch.randn(3, HEADS, 512).to(BF16) / 4, torch.randn(3, HEADS, 64).to(BF16) / 4
    q[0][0, 0, 0] = 1000.0
    out, whole = decode(backend, server, batch, first, q=q)
    assert kernels.asked == [DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, False)]
    rounded = whole.clamp(-448, 448).to(E4M3)
    close(out, expected(rounded, [server.kept(r) for r in range(3)], [1] * 3), atol=2e-2)


def speculates(sglang, drafts: int) -> None:
    sglang.spec.speculative_algorithm, sglang.spec.speculative_eagle_topk = "EAGLE", 1
    sglang.spec.speculative_num_draft_tokens = drafts


@pytest.mark.parametrize("known", [False, True])
def test_drafts_are_verified(sglang, known):
    """SGLang's lengths leave out the drafts."""
    speculates(sglang, 3)
    lengths = [67, 3, 30]
    server = Server(lengths)
    backend, first = TsmlaBackend(server.runner()), before(server, lengths, 3)
    batch = server.batch(ForwardMode.TARGET_VERIFY, first)
    batch.seq_lens_cpu = torch.tensor(first) if known else None
    backend.init_forward_metadata(batch)
    out, q = decode(backend, server, batch, first, 3)
    close(out, expected(q, [server.kept(r) for r in range(3)], [3] * 3))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_graph_reads_the_same_memory_at_every_replay(sglang, drafts, known):
    """Captured with rows of padding; replayed with other requests, longer and shorter ones, and padding again."""
    if drafts:
        speculates(sglang, drafts)
    mode, q_len = (ForwardMode.TARGET_VERIFY, drafts) if drafts else (ForwardMode.DECODE, 1)
    lengths = [CONTEXT, 5, 40]
    server = Server(lengths)
    backend = TsmlaBackend(server.runner())
    backend.init_cuda_graph_state(4, 4 * q_len)
    assert (backend.verify_mask is None) == (not drafts)
    padding = backend.get_cuda_graph_seq_len_fill_value()
    server.slots[0] = 0
    backend.init_forward_metadata_out_graph(server.batch(mode, [padding] * 4, [-1] * 4), in_capture=True)
    captured = backend.forward_metadata
    assert captured.count == 4 and captured.longest == CONTEXT + drafts and captured.starts is None
    for requests in ([0, 1, 2], [2, 1], [1]):
        own = [lengths[r] for r in requests]
        for r, n in zip(requests, own, strict=True):
            server.write(r, 0, n)
        rest = 4 - len(own)
        counted = [n - drafts for n in own] + [padding] * rest
        batch = server.batch(mode, counted, requests + [-1] * rest)
        batch.seq_lens_cpu = torch.tensor(counted) if known else None
        backend.init_forward_metadata_out_graph(batch)
        seen = backend.forward_metadata
        for name in ("table", "lengths"):
            ours, theirs = getattr(seen, name), getattr(captured, name)
            assert ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
        q = torch.randn(4 * q_len, HEADS, 576).to(BF16)
        server.pools[0].buffer[:64] = 0  # the page that rows of padding write to
        backend.forward_metadata = captured
        out = backend.forward(q, None, None, Layer(), batch)
        used = len(own) * q_len
        close(out[:used], expected(q[:used], [server.kept(r) for r in requests], [q_len] * len(own)))
        assert not out.isnan().any()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_ranks_of_context_parallelism_merge_with_powers_of_two(sglang, world, drafts, graph):
    """Every rank decodes its keys for all heads. The second request has fewer keys than there are ranks."""
    if drafts:
        speculates(sglang, drafts)
    mode, q_len = (ForwardMode.TARGET_VERIFY, drafts) if drafts else (ForwardMode.DECODE, 1)
    lengths = [70, max(q_len, 1), 33]
    server = Server(lengths, page=16, world=world)
    first = before(server, lengths, q_len)
    sglang.parallel.dcp_enabled, sglang.parallel.dcp_size = True, world
    q, results = None, []
    for rank in range(world):
        sglang.parallel.dcp_rank = rank
        backend = TsmlaBackend(server.runner(rank))
        batch = server.batch(mode, [n - drafts for n in lengths])
        if graph:
            backend.init_cuda_graph_state(3, 3 * q_len)
            backend.init_forward_metadata_out_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        torch.manual_seed(3)
        (out, lse), q = decode(backend, server, batch, first, q_len)
        assert lse.shape == (3 * q_len, HEADS) and out.shape == (3 * q_len, HEADS * 512)
        results.append((out.view(-1, HEADS, 512).double(), lse.double()))
    if q_len == 1:
        assert results[-1][1][1].isneginf().all() and not results[-1][0][1].any()
    weights = torch.softmax(torch.stack([lse for _, lse in results]) * torch.tensor(2.0).log(), 0)
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, results, strict=True))
    close(merged, expected(q, [server.kept(r) for r in range(3)], [q_len] * 3))


def test_a_batch_that_is_padded_after_it_was_described(sglang):
    server = Server(LENGTHS)
    backend, first = TsmlaBackend(server.runner()), before(server, LENGTHS)
    backend.init_forward_metadata(server.batch(ForwardMode.DECODE, LENGTHS[:2]))
    out, q = decode(backend, server, server.batch(ForwardMode.DECODE, LENGTHS), first)
    close(out, expected(q, [server.kept(r) for r in range(3)], [1] * 3))


def test_a_batch_without_requests(sglang):
    server = Server(LENGTHS)
    backend, batch = TsmlaBackend(server.runner()), server.batch(ForwardMode.IDLE, [])
    backend.init_forward_metadata(batch)
    assert backend.forward(torch.zeros(0, HEADS, 512), None, None, Layer(), batch).shape == (0, HEADS * 512)
