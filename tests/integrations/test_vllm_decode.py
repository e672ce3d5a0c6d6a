"""The vLLM plug-in's decode, on metadata as vLLM makes it: numbers against attention over each request's own keys."""

from __future__ import annotations

import math
import random
import types

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stand_in_kernels import rows, scaled_fp8_quant
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.integrations.shared import ready as shared_ready
from tsmla.integrations.vllm import builder, decode, layer, queries, ready
from tsmla.integrations.vllm.builder import TsmlaDecodeMetadata, TsmlaMetadata, TsmlaMetadataBuilder, alike, uniform
from tsmla.problems.pages import page_tables, put_keys
from tsmla.problems.rows import numbers_in, stored_as

HEADS, PAGE, SCALE = 2, 16, 0.1
LAYER = types.SimpleNamespace(_q_scale_float=0.5, _k_scale_float=0.25)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def cached(keys: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cache, block_table, seq_lens) of requests' keys; pages in disorder, NaN where nothing is."""
    lengths = [len(own) for own in keys]
    table, pages = page_tables(lengths, PAGE, spare_pages=1, spare_columns=2, unused=0)
    cache = torch.full((pages, PAGE, 576), math.nan).to(keys[0].dtype)
    put_keys(cache, table, keys)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def batch(decode: TsmlaDecodeMetadata, longest: int, causal: bool = True) -> TsmlaMetadata:
    metadata = object.__new__(TsmlaMetadata)
    metadata.decode, metadata.max_seq_len, metadata.causal = decode, longest, causal
    return metadata


def expected(q, keys, q_len, *, scale=SCALE, out_scale=1.0, causal=True, window=None) -> torch.Tensor:
    """Attention of every token in turn: q [tokens, heads, 576], keys of each request with its query tokens' own."""
    outs = []
    for t, query in enumerate(q.double()):
        own = keys[t // q_len].double()
        last = len(own) - q_len + t % q_len
        first = 0 if window is None else max(0, last - window + 1)
        seen = own[first : last + 1] if causal else own
        outs.append(out_scale * rows(scale * query @ seen.T, seen[:, :512])[0])
    return torch.stack(outs)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1.5e-2, atol=4e-3)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_in_two_parts(kernels, make_impl, q_len, causal):
    keys = [torch.randn(n, 576).to(BF16) for n in (5, 40, 16)]
    cache, table, lengths = cached(keys)
    latent, rope = torch.randn(HEADS, 3 * q_len, 512).to(BF16).transpose(0, 1), torch.randn(3 * q_len, 4, 64).to(BF16)
    parts = latent, rope[:, :HEADS]
    metadata = batch(TsmlaDecodeMetadata(table, lengths, None, q_len), 40, causal)
    out, lse = make_impl().forward_mqa(parts, cache, metadata, LAYER)
    assert lse is None and out.shape == (3 * q_len, HEADS, 512) and out.dtype == BF16
    close(out, expected(torch.cat(parts, -1), keys, q_len, causal=causal))


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=20)
@given(q_lens=st.lists(st.integers(0, 5), min_size=1, max_size=4), joined=st.booleans())
def test_requests_of_other_query_lengths(kernels, make_impl, q_lens, joined):
    """Requests go as the builder describes them, and the layer decodes them; all alike are a rectangle."""
    keys = [torch.randn(n + q, 576).to(BF16) for n, q in zip((5, 40, 16, 1), q_lens, strict=False)]
    cache, table, lengths = cached(keys)
    tokens, starts = sum(q_lens), torch.tensor([0, *q_lens]).cumsum(0).int()
    if not tokens:
        return
    made = object.__new__(TsmlaMetadataBuilder)._build_decode(
        block_table_tensor=table,
        seq_lens_device=lengths,
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=tokens,
        dcp_tot_seq_lens_device=None,
    )
    assert (made.starts is None) == alike(q_lens)
    q = torch.randn(HEADS, tokens, 512).to(BF16).transpose(0, 1), torch.randn(tokens, HEADS, 64).to(BF16)
    out, _ = make_impl().forward_mqa(torch.cat(q, -1) if joined else q, cache, batch(made, 50), LAYER)
    want = [
        expected(torch.cat(q, -1)[int(starts[b]) : int(starts[b + 1])], [keys[b]], n) for b, n in enumerate(q_lens) if n
    ]
    close(out, torch.cat(want))


@pytest.mark.parametrize("lengths", [[1], [3, 3, 0], [1, 2], [2, 0, 2], [0, 2], [0, 0], [2, 2, 1]])
def test_which_batches_are_alike(lengths):
    assert alike(lengths) == (lengths in ([1], [3, 3, 0], [0, 0]))


@pytest.mark.parametrize("wanted", [False, True])
def test_keys_are_not_split_where_vllm_is_to_be_batch_invariant(kernels, make_impl, monkeypatch, wanted):
    asked = []
    monkeypatch.setattr(layer.envs, "VLLM_BATCH_INVARIANT", wanted)
    monkeypatch.setattr(decode, "tsmla_decode", lambda *_, **given: asked.append(given["batch_invariant"]) or _[0])
    cache, table, lengths = cached([torch.randn(30, 576).to(BF16)])
    q = torch.randn(1, HEADS, 576).to(BF16)
    make_impl().forward_mqa(q, cache, batch(TsmlaDecodeMetadata(table, lengths, None), 30), LAYER)
    assert asked == [wanted]


def test_an_fp8_cache_has_the_layers_scales(kernels, make_impl):
    keys = [torch.randn(n, 576).to(E4M3) for n in (30, 4)]
    cache, table, lengths = cached(keys)
    q = torch.randn(2, HEADS, 576).to(E4M3)
    impl = make_impl(cache="fp8")
    out, _ = impl.forward_mqa(q, cache, batch(TsmlaDecodeMetadata(table, lengths, None), 30), LAYER)
    assert out.dtype == BF16 and kernels.asked == [DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, False)]
    close(out, expected(q.float(), [k.float() for k in keys], 1, scale=SCALE * 0.5 * 0.25, out_scale=0.25))
    other = types.SimpleNamespace(_q_scale_float=1.0, _k_scale_float=2.0)
    out, _ = impl.forward_mqa(q, cache, batch(TsmlaDecodeMetadata(table, lengths, None), 30), other)
    close(out, expected(q.float(), [k.float() for k in keys], 1, scale=SCALE * 2.0, out_scale=2.0))


@pytest.mark.parametrize("heads_first", [True, False], ids=["0.26", "0.33"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_queries_are_quantised_in_parts_where_vllm_would_join_them_first(
    kernels, make_impl, uncompiled, tokens, heads_first
):
    keys = [torch.randn(n, 576).to(E4M3) for n in range(30, 30 + tokens)]
    cache, table, lengths = cached(keys)
    impl, metadata = make_impl(cache="fp8"), batch(TsmlaDecodeMetadata(table, lengths, None), 40)
    assert not impl.supports_quant_query_input
    latent = torch.randn(HEADS, tokens, 512).transpose(0, 1) if heads_first else torch.randn(tokens, HEADS, 512)
    parts = (900 * latent).to(BF16), torch.randn(tokens, HEADS, 192).to(BF16)[..., 128:]
    layer = types.SimpleNamespace(_q_scale=torch.tensor(0.5), _q_scale_float=0.5, _k_scale_float=0.25)
    out, _ = impl.forward_mqa(parts, cache, metadata, layer)
    joined, _ = scaled_fp8_quant(torch.cat(parts, -1).flatten(1), layer._q_scale)
    same, _ = impl.forward_mqa(joined.view(tokens, HEADS, 576), cache, metadata, layer)
    assert out.equal(same) and out.any()
    assert queries.quantised(parts[0], layer._q_scale).stride(1) == parts[0].stride(1)


@pytest.mark.parametrize("cache, mode, ranks, ours", [("fp8", 0, 1, True), ("fp8", 3, 1, False), ("fp8", 0, 2, False)])
def test_who_quantises_queries(kernels, make_impl, uncompiled, cache, mode, ranks, ours):
    """vLLM does it in one launch where it compiles, and before ranks gather them."""
    uncompiled.compilation_config.mode = mode
    uncompiled.parallel_config.decode_context_parallel_size = ranks
    assert make_impl(cache=cache).supports_quant_query_input == (not ours)
    assert make_impl(cache="auto").supports_quant_query_input


def test_layers_of_a_step_use_one_workspace(kernels, make_impl, monkeypatch):
    asked = []
    monkeypatch.setattr(ready, "workspace", lambda *_: asked.append(None) or torch.zeros(40 << 20, dtype=torch.int8))
    cache, table, lengths = cached([torch.randn(30, 576).to(BF16)])
    q = torch.randn(1, HEADS, 576).to(BF16)
    first, second = make_impl(), make_impl()
    asked.clear()
    for steps in (1, 2):
        step = batch(TsmlaDecodeMetadata(table, lengths, None), 30)
        first.forward_mqa(q, cache, step, LAYER)
        second.forward_mqa(q, cache, step, LAYER)
        assert len(asked) == steps


def test_a_cache_of_656_bytes_has_its_scales_in_its_rows(kernels, make_impl):
    """The query stays in bf16, and none of the layer's scales counts."""
    row = ROWS["fp8_ds_mla"]
    kept = [stored_as(row, 30 * torch.randn(n, 576)) for n in (30, 4)]
    keys = [numbers_in(row, x) for x in kept]
    cache, table, lengths = cached(keys)
    bytes = stored_as(row, cache).view(torch.uint8)
    impl = make_impl(cache="fp8_ds_mla")
    assert not impl.supports_quant_query_input and make_impl(cache="fp8").supports_quant_query_input
    q = torch.randn(2, HEADS, 512).to(BF16) / 30, torch.randn(2, HEADS, 64).to(BF16) / 30
    out, _ = impl.forward_mqa(q, bytes, batch(TsmlaDecodeMetadata(table, lengths, None), 30), LAYER)
    assert out.dtype == BF16 and kernels.asked == [DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, False, row)]
    want = expected(torch.cat(q, -1), keys, 1)
    torch.testing.assert_close(out.double(), want, rtol=1.5e-2, atol=0.12)


def test_a_sliding_window_counts_the_token_itself(kernels, make_impl):
    keys = [torch.randn(50, 576).to(BF16)]
    cache, table, lengths = cached(keys)
    q = torch.randn(2, HEADS, 576).to(BF16)
    metadata = batch(TsmlaDecodeMetadata(table, lengths, None, 2), 50)
    out, _ = make_impl(window=7).forward_mqa(q, cache, metadata, LAYER)
    close(out, expected(q, keys, 2, window=7))


@pytest.mark.parametrize("world, interleave", [(2, 1), (4, 16), (3, 4)])
def test_ranks_of_context_parallelism_merge_to_the_whole(kernels, config, make_impl, world, interleave):
    """With the base that the implementation declares, as vLLM merges. A rank may have no keys of a request."""
    config.parallel_config.decode_context_parallel_size = world
    whole = [torch.randn(n, 576).to(BF16) for n in (3, 70)]
    q = torch.randn(4, HEADS, 576).to(BF16)
    total = torch.tensor([len(k) for k in whole], dtype=torch.int32)
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    outs, lses = [], []
    for rank in range(world):
        owned = [k[torch.arange(len(k)) // interleave % world == rank] for k in whole]
        cache, table, lengths = cached(owned)
        impl = make_impl()
        impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = world, rank, True
        out, lse = impl.forward_mqa(q, cache, batch(TsmlaDecodeMetadata(table, lengths, total, 2), 70), LAYER)
        assert lse is not None and lse.shape == (4, HEADS)
        outs.append(out.double())
        lses.append(lse.double() * (1.0 if impl.lse_base_on_e else math.log(2)))
    weights = torch.softmax(torch.stack(lses), 0)
    close((weights[..., None] * torch.stack(outs)).sum(0), expected(q, whole, 2))


@settings(deadline=None)
@given(q_len=st.integers(1, 130), active=st.integers(1, 40), padding=st.integers(0, 9), padded=st.booleans())
def test_requests_and_their_tokens(q_len, active, padding, padded):
    """Padding requests have tokens in graphs, and none in eager steps."""
    tokens = q_len * (active + padding if padded else active)
    assert uniform(q_len, tokens, active + padding) == (tokens // q_len, q_len)


@settings(deadline=None)
@given(q_len=st.integers(1, 130), requests=st.integers(1, 40), first=st.integers(0, 1))
def test_the_batch_of_a_capture(q_len, requests, first):
    """May say that each request has one token, or none, while the graph is for more."""
    assert uniform(first, q_len * requests, requests) == (requests, q_len)


def test_uneven_batches_are_refused():
    with pytest.raises(ValueError, match="5 tokens of 2 requests to decode, the first with 3.*how many"):
        uniform(3, 5, 2)


def test_the_builder_keeps_requests_that_have_tokens():
    made = object.__new__(TsmlaMetadataBuilder)
    decode = made._build_decode(
        block_table_tensor=torch.zeros(5, 7, dtype=torch.int32),
        seq_lens_device=torch.arange(5),
        max_seq_len=9,
        query_start_loc_cpu=torch.tensor([0, 4, 8, 8, 8, 8]),
        query_start_loc_device=None,
        num_decode_tokens=8,
        max_query_len=4,
        dcp_tot_seq_lens_device=torch.arange(5) + 10,
    )
    assert decode.q_len == 4 and decode.block_table.shape == (2, 7)
    assert decode.seq_lens.tolist() == [0, 1] and decode.dcp_tot_seq_lens.tolist() == [10, 11]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=30)
@given(
    q_lens=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    left_out=st.integers(0, 5),
    lse=st.booleans(),
    cache=st.sampled_from(["auto", "fp8"]),
)
@example([4, 0], 0, False, "auto")
@example([1, 4, 1], 0, False, "auto")
@example([2, 1], 1, True, "auto")
@example([0, 0], 3, True, "fp8")
def test_lengths_that_only_the_gpu_knows(kernels, nan_in_new_memory, make_impl, q_lens, left_out, lse, cache):
    """The host is told as many tokens as the GPU computes on, dealt out evenly, and the most that a request may have.
    Tokens that the GPU leaves out are behind the others, NaN, and see no key."""
    dtype, tokens = (E4M3 if cache == "fp8" else BF16), sum(q_lens) + left_out
    if not tokens:
        return
    keys = [torch.randn(n + q, 576).to(dtype) for n, q in zip((5, 40, 16, 1), q_lens, strict=False)]
    pages, table, lengths = cached(keys)
    each, more = divmod(tokens, len(q_lens))
    told = [each + (request < more) for request in range(len(q_lens))]
    starts, on_host = (torch.tensor([0, *n]).cumsum(0).int() for n in (q_lens, told))
    made = object.__new__(TsmlaMetadataBuilder)
    made._host_knows_lengths = False
    decoded = made._build_decode(
        block_table_tensor=table,
        seq_lens_device=lengths,
        query_start_loc_cpu=on_host,
        query_start_loc_device=starts,
        num_decode_tokens=tokens,
        dcp_tot_seq_lens_device=None,
        max_query_len=4,
        max_seq_len=50,
    )
    q = torch.randn(tokens, HEADS, 576).to(dtype)
    q[sum(q_lens) :] = torch.full((), math.nan)
    impl = make_impl(cache=cache)
    impl.need_to_return_lse_for_decode = lse
    with torch.inference_mode():
        out, out_lse = impl.forward_mqa(q, pages, batch(decoded, 50), LAYER)
    scales = {"scale": SCALE * 0.5 * 0.25, "out_scale": 0.25} if cache == "fp8" else {}
    want = [
        expected(q[int(starts[b]) : int(starts[b + 1])].float(), [keys[b].float()], n, **scales)
        for b, n in enumerate(q_lens)
        if n
    ]
    assert out.dtype == BF16
    close(out, torch.cat([*want, torch.zeros(left_out, HEADS, 512).double()]))
    assert (out_lse is None) == (not lse)
    if out_lse is not None:
        assert out_lse.isneginf().tolist() == [[token >= sum(q_lens)] * HEADS for token in range(tokens)]
        assert not out_lse.isnan().any()


def test_results_are_made_in_advance_only_where_tokens_may_be_left_out(kernels, make_impl, monkeypatch):
    """They cost launches."""
    asked = []
    monkeypatch.setattr(decode, "tsmla_decode", lambda *_, **given: asked.append(given) or _[0])
    q, starts = torch.randn(3, HEADS, 576).to(BF16), torch.tensor([0, 1, 3], dtype=torch.int32)
    cache, table, lengths = cached([torch.randn(30, 576).to(BF16)] * 2)
    made = object.__new__(TsmlaMetadataBuilder)._build_decode(
        block_table_tensor=table,
        seq_lens_device=lengths,
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        num_decode_tokens=3,
        dcp_tot_seq_lens_device=None,
    )
    make_impl().forward_mqa(q, cache, batch(made, 30), LAYER)
    assert made.starts is not None and asked[0]["out"] is asked[0]["lse"] is None


@pytest.mark.parametrize("adaptive", [True, False, None])
def test_graphs_are_replayed_with_other_lengths_where_drafts_are_left_out_on_the_gpu(config, adaptive):
    if adaptive is not None:
        config.speculative_config = types.SimpleNamespace(enable_adaptive_verification=adaptive)
    wanted = TsmlaMetadataBuilder.reorder_batch_threshold if adaptive else None
    assert TsmlaMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == wanted


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", [3, 12, 16, 128])
def test_the_reserved_workspace_does_for_every_decode(heads):
    most = ready.workspace_bytes(heads, 128, torch.device("cuda"))
    draw = random.Random()
    for _ in range(300):
        batch, q_len = int(2 ** draw.uniform(0, 12)), draw.randint(1, 128)
        for varies in (False, True):
            needed = plan_decode(Arch.SM90A, 132, batch, q_len, heads, varies=varies).workspace_bytes
            assert needed <= most < 40 << 20, (batch, q_len)


def test_speculation_lengthens_decodes(config):
    assert ready.longest_decode(config, 8) == 8
    config.speculative_config = types.SimpleNamespace(num_speculative_tokens=7)
    assert ready.longest_decode(config, 8) == 15


@pytest.mark.parametrize("cache, read", [("auto", Dtype.BF16), ("fp8_e4m3", Dtype.E4M3)])
@pytest.mark.usefixtures("kernels")
def test_kernels_are_loaded_when_a_layer_is_made(monkeypatch, make_impl, cache, read):
    loaded = []
    monkeypatch.setattr(ready, "arch", lambda: Arch.SM100A)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(shared_ready, "warmup", lambda variants: loaded.append(list(variants)))
    monkeypatch.setattr(shared_ready, "_loaded", set())
    make_impl(cache=cache)
    make_impl(cache=cache)
    assert loaded == [[DecodeVariant(Arch.SM100A, read, Dtype.BF16, False)], []]


def test_layers_that_cannot_be_served_are_refused(make_impl, config):
    from tsmla.integrations.vllm import PREFILL

    with pytest.raises(NotImplementedError, match="qk_rope_head_dim 512 and 64.*, not 256 and 64"):
        make_impl(kv_lora_rank=256)
    config.attention_config.mla_prefill_backend = types.SimpleNamespace(get_path=lambda: PREFILL)
    with pytest.raises(NotImplementedError, match="its prefill has none"):
        make_impl(window=100)


def test_an_fp8_cache_of_kimi_k3_is_refused_where_vllm_cannot_fill_it(make_impl, config, monkeypatch):
    """The refusal names the 8-bit cache that works; where vLLM makes FP8 queries, nothing is refused."""
    config.model_config.hf_config.model_type = decode.KIMI_K3
    vllms, queries = decode.MLACommonMetadataBuilder, {"dtype": BF16}
    monkeypatch.setattr(vllms, "determine_prefill_query_data_type", staticmethod(lambda *_: queries["dtype"]))
    with pytest.raises(NotImplementedError, match="--kv-cache-dtype fp8_ds_mla has 8 bits, too"):
        make_impl(cache="fp8")
    for cache in ("auto", "fp8_ds_mla"):
        make_impl(cache=cache)
    queries["dtype"] = E4M3
    make_impl(cache="fp8")


def test_what_the_builder_promises():
    assert TsmlaMetadataBuilder._cudagraph_support.name == "UNIFORM_BATCH"
    assert TsmlaMetadataBuilder.query_len_support.name == "VARLEN"
    assert TsmlaMetadataBuilder.reorder_batch_threshold == builder.options.decode_threshold() == 128
