"""The vLLM plug-in's prefill: new tokens, context in chunks as old and new vLLMs describe it, FP8."""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_layer import BF16, HEADS, SCALE, Problem, close, expected, inputs, ints
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import Dtype, PackVariant, PrefillVariant, ReadCacheVariant
from tsmla.integrations.shared import ready as shared_ready
from tsmla.integrations.vllm import options, ready
from tsmla.integrations.vllm.prefill import TsmlaPrefill
from tsmla.problems.rows import numbers_in, stored_as

pytestmark = pytest.mark.usefixtures("vllm_ops")


@pytest.fixture
def backend(config, kernels):
    """One for each value of FP8."""

    def make(fp8: bool = False) -> TsmlaPrefill:
        config.attention_config.use_prefill_query_quantization = fp8
        return TsmlaPrefill(
            num_heads=HEADS,
            scale=SCALE,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            vllm_config=config,
        )

    return make


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("given_out", [False, True])
def test_new_tokens_under_any_decode_backend(backend, lse, given_out):
    q, k, v = inputs(9, 9)
    made = backend()
    made.prepare_metadata(types.SimpleNamespace(query_start_loc=ints(0, 4, 9, 9)))
    out = torch.full((9, HEADS, 128), math.nan, dtype=BF16) if given_out else None
    result = made.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=lse, out=out)
    got, got_lse = result if lse else (result, None)
    assert out is None or got is out
    for request in (slice(0, 4), slice(4, 9)):
        want, want_lse = expected(q[request], k[request], v[request])
        close(got[request], want)
        if got_lse is not None:
            close(got_lse[:, request], want_lse)
            assert got_lse.is_contiguous()


def test_a_context_chunk_as_old_and_new_vllms_ask_for_it(backend):
    q, k, v = inputs(5, 12)
    starts_q, starts_kv = ints(0, 2, 5), ints(0, 12, 12)
    old = types.SimpleNamespace(
        cu_seq_lens=starts_kv[None], seq_tot=[12], max_seq_lens=[12], token_to_seq=[None], starts=[None]
    )
    new = types.SimpleNamespace(
        query_start_loc=starts_q,
        cu_seq_lens=starts_kv,
        request_slice=None,
        token_slice=None,
        num_context_tokens=12,
        max_seq_len=12,
        token_to_seq=None,
        starts=None,
    )
    want, want_lse = expected(q[:2], k, v, causal=False)
    for arguments in ({"chunk_idx": 0}, {"chunk": new}):
        made = backend()
        made.prepare_metadata(types.SimpleNamespace(query_start_loc=starts_q, chunked_context=old))
        out, lse = made.run_prefill_context_chunk(**arguments, q=q, k=k, v=v)
        close(out[:2], want)
        close(lse[:, :2], want_lse)
        assert (out[2:] == 0).all() and lse[:, 2:].isneginf().all()


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=20)
@given(
    new=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    left_out=st.integers(1, 5),
    fp8=st.booleans(),
    lse=st.booleans(),
    given_out=st.booleans(),
)
def test_tokens_that_the_gpu_leaves_out(backend, nan_in_new_memory, config, new, left_out, fp8, lse, given_out):
    """They see no key, among new tokens and in the context, under any decode backend."""
    config.speculative_config = types.SimpleNamespace(enable_adaptive_verification=True)
    made, mine = backend(fp8), sum(new)
    starts, tokens = ints(0, *itertools.accumulate(new)), sum(new) + left_out
    chunk = types.SimpleNamespace(
        query_start_loc=starts,
        cu_seq_lens=ints(0, *[9] * len(new)),
        request_slice=None,
        token_slice=None,
        num_context_tokens=9,
        max_seq_len=9,
        token_to_seq=None,
        starts=None,
    )
    made.prepare_metadata(types.SimpleNamespace(query_start_loc=starts, chunked_context=None))
    for context in (False, True):
        q, k, v = inputs(tokens, 9 if context else tokens)
        q[mine:] = math.nan
        if not context:
            k[mine:], v[mine:] = math.nan, math.nan
        out = torch.full((tokens, HEADS, 128), math.nan, dtype=BF16) if given_out else None
        with torch.inference_mode():
            if context:
                got, got_lse = made.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v, out=out)
            else:
                result = made.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=lse, out=out)
                got, got_lse = result if lse else (result, None)
        assert (out is None or got is out) and got.dtype == BF16
        assert (got[mine:] == 0).all() and not got.isnan().any()
        if got_lse is not None:
            assert got_lse[:, mine:].isneginf().all() and not got_lse.isnan().any()
        first = slice(0, new[0])
        rows = q[first], *((k, v) if context else (k[first], v[first]))
        if fp8:  # as they are multiplied
            rows = tuple(numbers.to(torch.float8_e4m3fn) for numbers in rows)
        want, _ = expected(*rows, causal=not context)
        close(got[first], want)


@pytest.mark.parametrize("style", ["old", "new_style"])
def test_chunks_are_merged_into_tokens_that_the_gpu_leaves_out(backend, make_impl, config, style):
    """Tokens without a request are merged as nothing."""
    config.speculative_config = types.SimpleNamespace(enable_adaptive_verification=True, num_speculative_tokens=3)
    problem = Problem([21, 0, 9, 40], [3, 4, 1, 7])
    context = getattr(problem, style)(12)
    problem.q, tokens = torch.cat((problem.q, torch.full((3, HEADS, 192), math.nan, dtype=BF16))), len(problem.q)
    problem.keys.append(torch.full((3, 576), math.nan, dtype=BF16))
    problem.contexts.append(0)
    out = problem.run(make_impl(weight=problem.weight), backend(), context)
    assert (out[tokens:] == 0).all()
    problem.keys.pop()
    problem.check(out)


def test_quantised_outputs_are_refused(backend):
    q, k, v = inputs(1, 1)
    made = backend()
    made.prepare_metadata(types.SimpleNamespace(query_start_loc=ints(0, 1)))
    with pytest.raises(NotImplementedError, match="no quantised outputs"):
        made.run_prefill_new_tokens(q, k, v, False, output_scale=torch.ones(1))


def test_without_context_the_layers_output_is_written(backend, make_impl):
    problem = Problem([0, 0], [5, 3])
    problem.check(problem.run(make_impl(weight=problem.weight), backend(), None))


@pytest.mark.parametrize("chunk", [4, 12, 64])
@pytest.mark.parametrize("style", ["old", "new_style"])
def test_context_is_merged_into_it(backend, make_impl, style, chunk):
    problem = Problem([21, 0, 9, 40], [3, 4, 1, 7])
    context = getattr(problem, style)(chunk)
    problem.check(problem.run(make_impl(weight=problem.weight), backend(), context))


@pytest.mark.parametrize("style", ["old", "new_style"])
def test_context_in_rows_of_656_bytes_is_read_by_tsmla(backend, make_impl, kernels, monkeypatch, style):
    monkeypatch.delattr("vllm._custom_ops.gather_and_maybe_dequant_cache")
    row = ROWS["fp8_ds_mla"]
    problem = Problem([21, 0, 9, 40], [3, 4, 1, 7])
    problem.cache = stored_as(row, problem.cache).view(torch.uint8)
    for keys, context in zip(problem.keys, problem.contexts, strict=True):
        keys[:context] = numbers_in(row, stored_as(row, keys[:context]))
    impl = make_impl(weight=problem.weight, cache="fp8_ds_mla")
    problem.check(problem.run(impl, backend(), getattr(problem, style)(12)))
    assert ReadCacheVariant(Arch.SM90A, Dtype.BF16, row) in kernels.asked


@pytest.mark.parametrize("style", ["old", "new_style"])
def test_fp8_rounds_queries_keys_and_values(backend, make_impl, kernels, style):
    problem = Problem([21, 0, 9], [3, 4, 1])
    out = problem.run(make_impl(weight=problem.weight), backend(fp8=True), getattr(problem, style)(12))
    problem.check(out, rtol=0.2, atol=0.15)
    prefills = {v for v in kernels.asked if isinstance(v, PrefillVariant)}
    assert {v.dtype for v in prefills} == {Dtype.E4M3} and {v.out_dtype for v in prefills} == {Dtype.BF16}
    assert PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128) in kernels.asked


def test_fp8_under_another_decode_backend_takes_the_keys_apart(backend):
    q, k, v = inputs(6, 6)
    made = backend(fp8=True)
    made.prepare_metadata(types.SimpleNamespace(query_start_loc=ints(0, 6)))
    want, _ = expected(*(rows.to(torch.float8_e4m3fn) for rows in (q, k, v)))
    close(made.run_prefill_new_tokens(q, k, v, False), want)


@pytest.mark.parametrize("layers", ["make_impl", "make_sparse"])
def test_ranks_of_context_parallelism_gather_as_vllm_does(backend, request, layers):
    problem = Problem([10], [3])
    impl = request.getfixturevalue(layers)(weight=problem.weight)
    impl.dcp_world_size = 2
    keys, values = problem.expanded(problem.keys[0][:10])
    out, lse = expected(problem.q, keys, values, causal=False)

    def of_all_ranks(q, cache, metadata, *, k_scale, dcp_world_size):
        assert q is problem.q and dcp_world_size == 2
        return out.to(BF16), lse.float()

    impl._context_parallel_compute_prefill_context = of_all_ranks
    problem.check(problem.run(impl, backend(), problem.old(16)))


def test_other_prefill_backends_are_left_to_vllm(make_impl, monkeypatch):
    problem = Problem([0], [3])
    seen = []
    from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

    monkeypatch.setattr(MLACommonImpl, "forward_mha", lambda self, *given, **named: seen.append((given, named)))
    problem.run(make_impl(weight=problem.weight), object(), None)
    ((given, named),) = seen
    assert given[0] is problem.q and len(given) == 7 and named == {"output_scale": None}


def test_kernels_are_loaded_when_a_layer_is_made(monkeypatch, backend):
    loaded = []
    monkeypatch.setattr(ready, "arch", lambda: Arch.SM90A)
    monkeypatch.setattr(shared_ready, "warmup", lambda variants: loaded.extend(variants))
    monkeypatch.setattr(shared_ready, "_loaded", set())
    backend(fp8=True)
    kinds = [(v.causal, v.lse) for v in loaded if isinstance(v, PrefillVariant)]
    assert kinds == [(True, False), (True, True), (False, True)]
    assert [v.symbol() for v in loaded if isinstance(v, PackVariant)] == [
        PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128).symbol()
    ]


@pytest.mark.parametrize(
    "text, engine, fp8", [("", False, False), ("", True, True), ("0", True, False), ("1", 0, True)]
)
def test_who_asks_for_fp8(monkeypatch, config, text, engine, fp8):
    monkeypatch.setenv(options.FP8_PREFILL.name, text)
    config.attention_config.use_prefill_query_quantization = engine
    assert options.fp8_prefill(config) is fp8


def test_fp8_of_an_fp16_model_is_refused(backend, config):
    config.model_config.dtype = torch.float16
    with pytest.raises(NotImplementedError, match="FP8 prefill writes bfloat16, and the model is in float16"):
        backend(fp8=True)
