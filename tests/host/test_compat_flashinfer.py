"""FlashInfer's two functions: what they launch is what the operators called directly launch; LSE base as asked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from launches import ROOM, alike, distinct, launched, place_of, processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.compat.flashinfer import trtllm_batch_decode_with_kv_cache_mla as decode
from tsmla.compat.flashinfer import trtllm_ragged_attention_deepseek as ragged
from tsmla.loading import resolve
from tsmla.operators.decode import tsmla_decode
from tsmla.operators.prefill import tsmla_prefill

BATCH, Q_LEN, HEADS, PAGES, PAGE, WIDTH = 3, 2, 4, 10, 32, 6
DECODE_LSE, PREFILL_LSE = place_of("lse", "decode"), place_of("lse", "prefill")
DECODE_FACTOR, PREFILL_FACTOR = place_of("lse_factor", "decode"), place_of("lse_factor", "prefill")
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_inputs(q_len: int = Q_LEN, dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": distinct(BATCH, q_len, HEADS, 576, dtype=dtype),
        "kv_cache": distinct(PAGES, 1, PAGE, 576, dtype=dtype),
        "workspace_buffer": ROOM,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.arange(BATCH * WIDTH, dtype=torch.int32).view(BATCH, WIDTH) % PAGES,
        "seq_lens": ints(3, 100, 2),
        "max_seq_len": 150,
    }
    return {**given, **changes}


def directly(face: dict, **changes) -> dict:
    shared = ("query", "kv_cache", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens")
    given = {name: face[name] for name in (*shared, "max_seq_len")}
    return {**given, "softmax_scale": 1.0, **changes}


HARMLESS = some.fixed_dictionaries(
    {},
    optional={
        "is_var_seq": some.booleans(),
        "uses_shared_paged_kv_idx": some.just(True),
        "skip_softmax_threshold_scale_factor": some.sampled_from([None, 0.0, 0]),
        "cute_dsl_impl": some.sampled_from(["auto", "modular", "monolithic"]),
        "kv_scale_format": some.just("auto"),
        "sparse_mla_top_k": some.just(0),
        "use_fp16_softmax": some.sampled_from([None, False]),
        "multi_ctas_kv_counter_buffer": some.just(torch.zeros(64, dtype=torch.uint8)),
        "backend": some.sampled_from(["auto", "trtllm-gen", "xqa", "cake"]),
        "enable_dcp": some.just(False),
    },
)
"""What changes no launch."""


@many
@given(
    q_len=some.integers(1, 3),
    dtype=some.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    harmless=HARMLESS,
    bmm1=some.none() | some.floats(0.01, 2.0),
    bmm2=some.none() | some.floats(-2.0, 2.0),
    as_tensor=some.booleans(),
    pdl=some.sampled_from([None, False, True]),
    sinks=some.sampled_from([None, "tensor", "list"]),
)
def test_decode_launches_what_the_operator_does(recorder, q_len, dtype, harmless, bmm1, bmm2, as_tensor, pdl, sinks):
    face = decode_inputs(q_len, dtype, **harmless, enable_pdl=pdl)
    operator: dict = {"enable_pdl": bool(pdl)}
    for name, ours, value in (("bmm1_scale", "softmax_scale", bmm1), ("bmm2_scale", "output_scale", bmm2)):
        if value is not None:
            face[name] = torch.tensor(value) if as_tensor else value
            operator[ours] = float(face[name])
    if sinks:
        operator["sinks"] = torch.arange(HEADS, dtype=torch.float32)
        face["sinks"] = [operator["sinks"]] if sinks == "list" else operator["sinks"]
    out, got, variant = launched(recorder, lambda: decode(**face))
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**directly(face, **operator)))
    assert variant == wanted and out.shape == (BATCH, q_len, HEADS, 512)
    alike(got, want)


def kernel_that_writes(monkeypatch, base_2: torch.Tensor) -> None:
    def write(*arguments) -> None:
        lse = arguments[DECODE_LSE]
        lse.copy_(base_2.view(lse.shape) * arguments[DECODE_FACTOR])

    monkeypatch.setattr(resolve, "kernel", lambda variant: write)


@pytest.mark.parametrize(
    ("options", "natural"),
    [
        ({}, False),
        ({"backend": "trtllm-gen"}, False),
        ({"backend": "cute-dsl"}, True),
        ({"backend": "cute-dsl", "return_lse_base": "base2"}, False),
        ({"return_lse_base": "basee"}, True),
        ({"return_lse_base": "base2"}, False),
        ({"enable_dcp": True, "cp_world": 2, "causal_seqlens_kv_global": ints(5, 9, 4)}, True),
        ({"enable_dcp": True, "causal_seqlens_kv_global": ints(5, 9, 4), "return_lse_base": "base2"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["none", "flat", "nested"])
def test_the_lse_has_the_base_that_was_asked_for(recorder, monkeypatch, options, natural, given):
    base_2 = torch.arange(BATCH * Q_LEN * HEADS, dtype=torch.float32).view(BATCH * Q_LEN, HEADS)
    base_2[3] = -math.inf
    kernel_that_writes(monkeypatch, base_2)
    shapes = {"none": None, "flat": (BATCH * Q_LEN, HEADS), "nested": (BATCH, Q_LEN, HEADS)}
    buffer = None if shapes[given] is None else torch.full(shapes[given], math.nan)
    _, lse = decode(**decode_inputs(**options), return_lse=True, lse=buffer)
    assert lse.shape == (shapes[given] or shapes["flat"]) and (buffer is None or lse is buffer)
    assert torch.allclose(lse.view(base_2.shape), base_2 * math.log(2) if natural else base_2, rtol=1e-6)


def test_context_parallelism(recorder):
    bounds = ints(7, 300, 2)
    face = decode_inputs(enable_dcp=True, cp_world=4, cp_rank=3, causal_seqlens_kv_global=bounds, return_lse=True)
    _, got, _ = launched(recorder, lambda: decode(**face))
    operator = directly(face, cp_world=4, cp_rank=3, causal_seqs=bounds, return_lse=True, lse_base=math.e)
    _, want, _ = launched(recorder, lambda: tsmla_decode(**operator))
    alike(got, want)


@many
@given(
    lengths=some.lists(some.integers(0, 4), min_size=BATCH, max_size=BATCH),
    padding=some.integers(0, 2),
    parallel=some.booleans(),
    with_out=some.booleans(),
)
def test_queries_of_different_lengths_are_a_pack(recorder, lengths, padding, parallel, with_out):
    tokens = sum(lengths) + padding
    if not tokens:
        return
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    query = distinct(tokens, HEADS, 576)
    out = torch.zeros(tokens, HEADS, 512, dtype=torch.bfloat16) if with_out else None
    bounds = ints(7, 300, 2)
    options = {"enable_dcp": True, "cp_world": 2, "causal_seqlens_kv_global": bounds} if parallel else {}
    face = decode_inputs(query=query, cum_seq_lens_q=ends, max_q_len=4, out=out, return_lse=True, **options)
    (result, lse), launch, _ = launched(recorder, lambda: decode(**face))
    assert result.shape == (tokens, HEADS, 512) and lse.shape == (tokens, HEADS)
    assert out is None or (result is out and launch["out"].data_ptr() == out.data_ptr())
    ranks = {"cp_world": 2, "causal_seqs": bounds} if parallel else {}
    pack = {"query": query, "cum_seq_lens_q": ends, "max_q_len": 4, "lse_base": math.e, "return_lse": True}
    operator = directly(face, **{**pack, **ranks})
    _, want, _ = launched(recorder, lambda: tsmla_decode(**operator))
    alike(launch, want)
    _, unbounded, _ = launched(recorder, lambda: decode(**{**face, "max_q_len": None}))
    assert unbounded["q_len"] == tokens and torch.equal(unbounded["query"].view(query.shape), query)


@pytest.mark.parametrize("width", [640, 577])
def test_strided_queries_are_copied_where_they_must_be(recorder, width):
    wide = distinct(BATCH, Q_LEN, HEADS, width)[..., :576]
    _, got, _ = launched(recorder, lambda: decode(**decode_inputs(query=wide)))
    assert (got["query"].data_ptr() == wide.data_ptr()) == (width % 8 == 0) and torch.equal(got["query"], wide)


CHOSEN = {
    "block_tables": torch.arange(BATCH * Q_LEN * 70, dtype=torch.int32).view(BATCH, Q_LEN, 70) - 30,
    "sparse_mla_top_k": 70,
}
CHOSEN_PACK = {
    "query": distinct(5, HEADS, 576), "block_tables": torch.arange(350, dtype=torch.int32).view(5, 70),
    "sparse_mla_top_k": 70, "cum_seq_lens_q": ints(0, 3, 3, 4),
}  # fmt: skip
"""Requests of 3, 0 and 1 query tokens; the last token is of none."""


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, ints(2, 3, 99, 100, 1, 2).view(BATCH, Q_LEN)),
        ({"seq_lens": torch.tensor([2, 1, 9])}, torch.tensor([[1, 2], [0, 1], [8, 9]])),
        ({"seq_lens": ints(5, 6, 7, 8, 9, 1).view(BATCH, Q_LEN)}, ints(5, 6, 7, 8, 9, 1).view(BATCH, Q_LEN)),
        ({"seq_lens": None}, None),
        ({"sparse_mla_top_k_lens": ints(1, 2, 3, 4, 5, 6)}, ints(1, 2, 3, 4, 5, 6).view(BATCH, Q_LEN)),
        ({"max_seq_len": 0, "backend": "sparse"}, ints(2, 3, 99, 100, 1, 2).view(BATCH, Q_LEN)),
        (CHOSEN_PACK, ints(1, 2, 3, 2, 0)),
        ({**CHOSEN_PACK, "cum_seq_lens_q": torch.tensor([0, 3, 3, 4])}, ints(1, 2, 3, 2, 0)),
        ({**CHOSEN_PACK, "max_q_len": 1, "sparse_mla_top_k_lens": ints(9, 8, 7, 6, 5)}, ints(9, 8, 7, 6, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [PAGE, 69])
def test_chosen_keys_launch_what_the_operator_does(recorder, changes, lengths, page):
    """Lists stand where page tables do; a token's list counts as far as it has keys."""
    cache = distinct(PAGES, 1, page, 576)
    face = decode_inputs(**{"kv_cache": cache, **CHOSEN, **changes, "return_lse": True, "bmm2_scale": 0.5})
    (out, lse), got, variant = launched(recorder, lambda: decode(**face))
    tokens = face["query"].shape[:-2]
    assert out.shape == (*tokens, HEADS, 512) and lse.shape == (math.prod(tokens), HEADS)
    operator = directly(
        face, block_tables=None, seq_lens=None, max_seq_len=None, indices=face["block_tables"], topk_length=lengths,
        output_scale=0.5, return_lse=True, lse_base=math.e if "cum_seq_lens_q" in changes else 2,
    )  # fmt: skip
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**operator))
    assert variant == wanted and variant.gathers
    alike(got, want)


ONE_TOKEN = {"query": distinct(4, HEADS, 576), "cum_seq_lens_q": ints(0, 1, 2, 4)}
SINKS = torch.zeros(HEADS)
DCP = {"enable_dcp": True, "cp_world": 2, "causal_seqlens_kv_global": ints(5, 5, 5), "return_lse": True}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sparse_mla_top_k": 2048}, r"block_tables has shape \[3, 6\]; it must be \[3, 2, 2048\]"),
        ({"sparse_mla_top_k": -1}, "sparse_mla_top_k is -1"),
        ({"sparse_mla_top_k": None}, "sparse_mla_top_k is a NoneType"),
        ({"sparse_mla_top_k_lens": ints(1)}, "sparse_mla_top_k_lens is given and sparse_mla_top_k is 0"),
        ({"backend": "sparse"}, "backend is sparse and sparse_mla_top_k is 0; it must be the length of lists"),
        ({**CHOSEN, "sparse_mla_top_k": 69}, r"block_tables has shape \[3, 2, 70\]; it must be \[3, 2, 69\]"),
        ({**CHOSEN, "block_tables": None}, "block_tables is a NoneType"),
        ({**CHOSEN, "block_tables": CHOSEN["block_tables"].long()}, "indices is torch.int64.*is block_tables"),
        (
            {**CHOSEN, "sparse_mla_top_k_lens": ints(1, 2, 3)},
            r"sparse_mla_top_k_lens has shape \[3\]; it must be \[6\]",
        ),
        ({**CHOSEN, "sparse_mla_top_k_lens": torch.ones(6)}, "sparse_mla_top_k_lens is torch.float32"),
        ({**CHOSEN, "seq_lens": ints(1, 2)}, r"seq_lens has shape \[2\]; it must be \[3\] or \[3, 2\]"),
        ({**CHOSEN, "seq_lens": 3}, "seq_lens is a int"),
        ({**CHOSEN, "kv_scale_format": "e8m0"}, "kv_scale_format is 'e8m0'; accepted: auto, pow2_fp32, arbitrary_fp32"),
        ({**CHOSEN, **DCP}, "enable_dcp is True with chosen keys; pass lists of the rank's own keys"),
        ({**CHOSEN_PACK, "cum_seq_lens_q": ints(0, 5)}, r"cum_seq_lens_q has shape \[2\]; it must be \[4\]"),
        ({"backend": "fa9"}, "backend is 'fa9'; accepted: auto"),
        ({"backend": None}, "backend is a NoneType"),
        ({"skip_softmax_threshold_scale_factor": 0.5}, "skip_softmax_threshold_scale_factor is 0.5"),
        ({"skip_softmax_threshold_scale_factor": "x"}, "skip_softmax_threshold_scale_factor is a str"),
        ({"use_fp16_softmax": True}, "use_fp16_softmax is True"),
        ({"cute_dsl_impl": "x"}, "cute_dsl_impl is 'x'"),
        ({"kv_scale_format": "pow2_fp32"}, "kv_scale_format is 'pow2_fp32'; accepted: auto"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx is False"),
        ({"is_var_seq": 3}, "is_var_seq is 3"),
        ({"max_q_len": 4}, "max_q_len is given without cum_seq_lens_q"),
        ({"lse": torch.zeros(BATCH, Q_LEN, HEADS)}, "lse is given and return_lse is False"),
        ({"return_lse": True, "lse": torch.zeros(BATCH, HEADS)}, r"lse has shape \[3, 4\]; it must be \[6, 4\] or"),
        ({"return_lse": True, "lse": torch.zeros(6, HEADS).double()}, "lse is torch.float64"),
        ({"return_lse": True, "lse": 1}, "lse is a int"),
        ({"return_lse": True, "return_lse_base": "e"}, "return_lse_base is 'e'; accepted: base2, basee"),
        ({"return_lse": True, "sinks": SINKS}, "sinks are given with return_lse"),
        ({"sinks": [SINKS, SINKS]}, "sinks has 2 tensors"),
        ({"sinks": SINKS.double()}, "sinks is torch.float64"),
        ({"cp_world": 2}, "cp_world is given and enable_dcp is False"),
        ({"cp_world": 0}, "cp_world is 0"),
        ({"cp_rank": 1}, "cp_rank is 1; it must be from 0 to 0"),
        ({"causal_seqlens_kv_global": ints(1, 2, 3)}, "causal_seqlens_kv_global is given and enable_dcp is False"),
        ({**DCP, "return_lse": False}, "enable_dcp needs return_lse"),
        ({**DCP, "causal_seqlens_kv_global": None}, "enable_dcp needs causal_seqlens_kv_global"),
        ({**DCP, "causal_seqlens_kv_global": ints(1)}, "causal_seqs has .* is causal_seqlens_kv_global here"),
        ({**DCP, "cp_rank": 2}, "cp_rank is 2"),
        ({"bmm1_scale": 0.0}, "softmax_scale is 0.0; .*softmax_scale is bmm1_scale here"),
        ({"bmm1_scale": None}, "bmm1_scale is a NoneType"),
        ({"bmm2_scale": math.inf}, "output_scale is inf; .*output_scale is bmm2_scale here"),
        ({"bmm2_scale": torch.ones(2)}, r"bmm2_scale has shape \[2\]"),
        ({"enable_pdl": "x"}, "enable_pdl is 'x'"),
        ({"seq_lens": None}, "seq_lens is a NoneType"),
        ({"query": distinct(4, HEADS, 576)}, r"query has shape \[4, 4, 576\]; it must be \[batch, q_len"),
        ({"query": None}, "query is a NoneType"),
        ({"kv_cache": torch.zeros(PAGES, PAGE, 640, dtype=torch.uint8)}, r"kv_cache (has shape|is torch.uint8)"),
        ({"workspace_buffer": torch.zeros(64, dtype=torch.uint8)}, "workspace_buffer has 64 bytes; this call needs"),
        ({"kv_lora_rank": 256}, "kv_lora_rank and qk_rope_head_dim are 256 and 64"),
        ({**ONE_TOKEN, "query": distinct(BATCH, 1, HEADS, 576)}, r"query has shape .*; it must be \[tokens"),
        ({**ONE_TOKEN, "cum_seq_lens_q": ints(0)}, r"cum_seq_lens_q has shape \[1\]"),
        ({**ONE_TOKEN, "cum_seq_lens_q": torch.zeros(4)}, "cum_seq_lens_q is torch.float32"),
        ({**ONE_TOKEN, "cum_seq_lens_q": 3}, "cum_seq_lens_q is a int"),
        ({**ONE_TOKEN, "seq_lens": None}, "seq_lens is a NoneType"),
        ({**ONE_TOKEN, "seq_lens": ints(1)}, r"seq_lens has shape \[1\]"),
        ({**ONE_TOKEN, "seq_lens": torch.zeros(3)}, "seq_lens is torch.float32"),
        ({**ONE_TOKEN, "block_tables": ints(1)}, r"block_tables has shape \[1\]"),
        ({**ONE_TOKEN, "out": torch.zeros(4, 512, dtype=torch.bfloat16)}, r"out has shape \[4, 512\]"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_decode_refuses_by_name(recorder, changes, text):
    with pytest.raises(ArgumentError, match=f"^trtllm_batch_decode_with_kv_cache_mla: .*{text}"):
        decode(**decode_inputs(**changes))
    assert not recorder.launches


def ragged_inputs(dtype: torch.dtype = torch.bfloat16, d_qk: int = 192, **changes) -> dict:
    both = distinct(20, 4, d_qk + 128, dtype=dtype)
    given = {
        "query": distinct(12, 8, d_qk, dtype=dtype),
        "key": both[..., :d_qk],
        "value": both[..., d_qk:],
        "workspace_buffer": torch.zeros(1, dtype=torch.uint8),
        "seq_lens": ints(15, 5),
        "max_q_len": 10,
        "max_kv_len": 15,
        "bmm1_scale": 0.0721,
        "bmm2_scale": 0.5,
        "o_sf_scale": 1.0,
        "batch_size": 2,
        "window_left": -1,
        "cum_seq_lens_q": ints(0, 10, 12),
        "cum_seq_lens_kv": ints(0, 15, 20),
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": False,
    }
    return {**given, **changes}


@many
@given(
    dtype=some.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    d_qk=some.sampled_from([192, 128]),
    options=some.fixed_dictionaries(
        {},
        optional={
            "is_causal": some.booleans(),
            "enable_pdl": some.booleans(),
            "bmm2_scale": some.floats(-2.0, 2.0) | some.just(torch.tensor(0.25)),
            "bmm1_scale": some.floats(0.01, 2.0) | some.just(torch.tensor([0.25])),
            "o_sf_scale": some.sampled_from([None, 1.0, -1.0, 1]),
            "workspace_buffer": some.none(),
            "seq_lens": some.none(),
            "backend": some.sampled_from(["auto", "trtllm-gen", "cute-dsl"]),
            "skip_softmax_threshold_scale_factor": some.sampled_from([None, 0.0]),
            "use_fp16_softmax": some.sampled_from([None, False]),
            "uses_spcompress": some.sampled_from([None, False]),
            "skip_all_rows_active_check": some.booleans(),
            "q_seq_lens_cpu": some.just(ints(10, 2)),
            "kv_seq_lens_cpu": some.just(ints(15, 5)),
            "sage_attn_sfs": some.just((None,) * 4),
            "num_elts_per_sage_attn_blk": some.just((0, 0, 0, 0)),
        },
    ),
    lse=some.booleans(),
    sinks=some.booleans(),
)
def test_ragged_prefill_launches_what_the_operator_does(recorder, dtype, d_qk, options, lse, sinks):
    face = ragged_inputs(dtype, d_qk, **options, return_lse=lse)
    if sinks:
        face["attention_sinks"] = torch.arange(8, dtype=torch.float32)
        if lse:
            face["backend"] = "cute-dsl"
    operator = {
        **{name: face[name] for name in ("query", "key", "value", "batch_size", "is_causal", "cum_seq_lens_q")},
        "seq_lens": None,
        "cum_seq_lens": face["cum_seq_lens_kv"],
        "max_seq_len": 15,
        "return_lse": lse,
        "softmax_scale": float(face["bmm1_scale"]),
        "v_scale": float(face["bmm2_scale"]),
        "enable_pdl": bool(face["enable_pdl"]),
        "sinks": face.get("attention_sinks"),
        "lse_includes_sink": sinks and lse,
        "lse_base": 2,
    }
    _, got, variant = launched(recorder, lambda: ragged(**face))
    _, want, wanted = launched(recorder, lambda: tsmla_prefill(**operator))
    assert variant == wanted
    alike(got, want)


@pytest.mark.parametrize("given", [False, True])
def test_the_lse_of_a_ragged_prefill_is_base_2(recorder, monkeypatch, given):
    natural = torch.arange(12 * 8, dtype=torch.float32).view(12, 8)
    natural[5] = -math.inf

    def kernel(*arguments):
        arguments[PREFILL_LSE].copy_(natural * arguments[PREFILL_FACTOR])

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    buffer = torch.full((12, 8), math.nan) if given else None
    _, lse = ragged(**ragged_inputs(return_lse=True, lse=buffer))
    assert not given or lse is buffer
    assert torch.allclose(lse, natural / math.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is 1.0"),
        ({"use_fp16_softmax": True}, "use_fp16_softmax is True"),
        ({"uses_spcompress": True}, "uses_spcompress is True"),
        ({"backend": "fa3"}, "backend is 'fa3'"),
        ({"sage_attn_sfs": (torch.ones(1), None, None, None)}, "sage_attn_sfs is given"),
        ({"num_elts_per_sage_attn_blk": (0, 16, 0, 0)}, "num_elts_per_sage_attn_blk is given"),
        ({"window_left": 128}, "window_left is 128; prefill has no sliding window"),
        ({"window_left": None}, "window_left is a NoneType"),
        ({"o_sf_scale": 2.0}, "o_sf_scale is 2.0"),
        ({"o_sf_scale": "x"}, "o_sf_scale is a str"),
        ({"lse": torch.zeros(12, 8)}, "lse is given and return_lse is False"),
        ({"return_lse": True, "lse": torch.zeros(12)}, r"lse has shape \[12\]"),
        ({"return_lse": True, "attention_sinks": torch.zeros(8)}, "attention_sinks are given with return_lse"),
        ({"attention_sinks": torch.zeros(7)}, r"sinks has shape \[7\].*sinks is attention_sinks here"),
        ({"bmm1_scale": -1.0}, "softmax_scale is -1.0 .*softmax_scale is bmm1_scale here"),
        ({"bmm2_scale": None}, "bmm2_scale is a NoneType"),
        ({"cum_seq_lens_kv": ints(0)}, r"cum_seq_lens has shape \[1\].*cum_seq_lens is cum_seq_lens_kv here"),
        ({"cum_seq_lens_q": ints(0)}, r"cum_seq_lens_q has shape \[1\]"),
        ({"cum_seq_lens_q": None}, "cum_seq_lens_q is None; it must be given"),
        ({"query": distinct(12, 8, 256), "key": distinct(20, 4, 256)}, "prefill head dims"),
        ({"out": torch.zeros(12, 8, 128).to(torch.float8_e4m3fn)}, "writes bf16, not e4m3"),
        ({"is_causal": 5}, "is_causal is 5"),
        ({"return_lse": None}, "return_lse is a NoneType"),
        ({"batch_size": 3}, r"cum_seq_lens.* has shape \[3\]; it must be \[4\]"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_ragged_prefill_refuses_by_name(recorder, changes, text):
    with pytest.raises(ArgumentError, match=f"^trtllm_ragged_attention_deepseek: .*{text}"):
        ragged(**ragged_inputs(**changes))
    assert not recorder.launches


def test_what_does_not_exist_is_told_from_what_is_wrong(recorder):
    with pytest.raises(UnsupportedError):
        decode(**decode_inputs(**CHOSEN, **DCP))
    with pytest.raises(UnsupportedError):
        ragged(**ragged_inputs(window_left=1))
