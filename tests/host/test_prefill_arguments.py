"""tsmla_prefill without a GPU: what it accepts, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import fractions

import numpy as np
import pytest
import torch
from another_gpu import on_another_gpu
from launches import SMS
from prefill_calls import D_QK, D_V, HEADS, HEADS_KV, LENGTHS, TOKENS_KV, TOKENS_Q, bf16, inputs
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PrefillVariant
from tsmla.loading import resolve
from tsmla.operators import prefill


@pytest.mark.parametrize("flags", [(False, False, False), (True, False, True), (True, True, False)], ids=str)
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, Dtype.BF16), (torch.float16, Dtype.FP16)])
def test_the_variant_follows_the_arguments(recorder, dtype, name, flags):
    causal, lse, pdl = flags
    prefill.tsmla_prefill(**inputs(dtype), is_causal=causal, return_lse=lse, enable_pdl=pdl)
    assert recorder.variants == [PrefillVariant(Arch.SM90A, name, name, D_QK, D_V, causal, lse)]
    assert recorder.launches[0][-1] == pdl


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_kernel_gets_its_arguments_in_contract_order(recorder, return_lse):
    given = inputs(k_scale=2, v_scale=np.float32(0.5), output_scale=-3.0)
    result = prefill.tsmla_prefill(**given, return_lse=return_lse)
    (arguments,) = recorder.launches
    out, lse = result if return_lse else (result, None)
    query, query_rope, key, key_rope, *rest = arguments
    assert query is given["query"] and key is given["key"] and rest[0] is given["value"]
    ends = [given[name] for name in ("cum_seq_lens_q", "cum_seq_lens")]
    assert all(got is want for got, want in zip(rest[1:5], [out, lse, *ends], strict=True))
    for rope in map(torch.from_dlpack, (query_rope, key_rope)):
        assert rope.shape == (0, 1, 64) and rope.dtype == torch.bfloat16
    assert torch.from_dlpack(rest[5]).shape == (0,) and torch.from_dlpack(rest[5]).dtype == torch.float32
    assert rest[6] is rest[7] is None, "a mask, and room for lists of tiles"
    assert rest[8:] == [0.25, -1.5, 0, 1.0, 0, 1, SMS, 0] and all(type(x) is float for x in rest[8:10])
    assert out.shape == (TOKENS_Q, HEADS, D_V) and out.dtype == torch.bfloat16 and out.is_contiguous()
    if return_lse:
        assert lse.shape == (TOKENS_Q, HEADS) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_key_lengths_serve_the_query_when_it_has_none(recorder):
    given = inputs(cum_seq_lens_q=None)
    prefill.tsmla_prefill(**given)
    assert recorder.launches[0][7] is given["cum_seq_lens"] is recorder.launches[0][8]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_a_given_output_is_written_and_returned(recorder, out_dtype):
    out = torch.empty(TOKENS_Q, HEADS, 2 * D_V, dtype=torch.bfloat16)[..., :D_V]
    assert prefill.tsmla_prefill(**inputs(), out=out, out_dtype=out_dtype) is out
    assert recorder.launches[0][5] is out


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    given = inputs()
    for call in range(3):
        prefill.tsmla_prefill(**given, output_scale=float(call))
    assert len(recorder.variants) == 1 and [launch[13] for launch in recorder.launches] == [0.0, 1.0, 2.0]
    out = torch.empty(TOKENS_Q, HEADS, D_V, dtype=torch.bfloat16)
    prefill.tsmla_prefill(**given, out=out)
    assert recorder.launches[-1][5] is out
    for flag in ("return_lse", "enable_pdl", "is_causal"):
        prefill.tsmla_prefill(**given, **{flag: flag != "is_causal"})
    flags = [(v.causal, v.lse) for v in recorder.variants[2:]]
    assert flags == [(True, True), (True, False), (False, False)]
    assert [launch[-1] for launch in recorder.launches[-3:]] == [0, 1, 0]
    resolve.forget()
    prefill.tsmla_prefill(**given)
    assert len(recorder.variants) == 6


def test_calls_of_a_kind_seen_before_differ_in_nothing_that_counts(recorder):
    """Each call follows one that differs from it in one thing, and launches what it would have launched first."""
    strided = torch.zeros(TOKENS_KV, HEADS_KV, 2 * D_V, dtype=torch.bfloat16)[..., D_V:]
    changes = [
        {},
        {"query": bf16(TOKENS_Q + 1, HEADS, D_QK)},
        {"query": bf16(TOKENS_Q, 2 * HEADS, D_QK)},
        {"value": strided},
        {"key": bf16(TOKENS_KV, HEADS, D_QK), "value": bf16(TOKENS_KV, HEADS, D_V)},
        {name: bf16(4, HEADS, 128) for name in ("query", "key", "value")},
        {name: inputs(torch.float16)[name] for name in ("query", "key", "value")},
        {"out_dtype": torch.bfloat16},
        {"batch_size": 1, "cum_seq_lens": LENGTHS[:2], "cum_seq_lens_q": LENGTHS[:2]},
        {"output_scale": -0.0},
        {"sinks": torch.zeros(HEADS)},
        {"sinks": torch.zeros(HEADS), "lse_includes_sink": True},
        {"query": (bf16(TOKENS_Q, HEADS, 128), bf16(TOKENS_Q, HEADS, 64))},
        {"key": (bf16(TOKENS_KV, HEADS_KV, 128), bf16(TOKENS_KV, 64))},
        {"key": (bf16(TOKENS_KV, HEADS_KV, 128), bf16(TOKENS_KV, 1, 64))},
        {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int32)},
        {"key_mask": torch.zeros(TOKENS_Q, 9, dtype=torch.int32)[:, 1:], "is_causal": False},
        {"lse": torch.zeros(TOKENS_Q, HEADS)},
        {"lse": torch.zeros(HEADS, TOKENS_Q).T},
        {"merge_into": (bf16(TOKENS_Q, HEADS, D_V), torch.zeros(TOKENS_Q, HEADS))},
        {"out": bf16(TOKENS_Q, HEADS, D_V), "lse": torch.zeros(TOKENS_Q, HEADS)},
    ]
    firsts = []
    for change in changes:
        resolve.forget()
        prefill.tsmla_prefill(**inputs(**change))
        firsts.append((recorder.launches.pop(), recorder.variants.pop()))
    resolve.forget()
    for _ in range(2):
        for change, (first, variant) in zip(changes, firsts, strict=True):
            prefill.tsmla_prefill(**inputs(**change))
            assert not recorder.variants or recorder.variants.pop() == variant
            for got, want in zip(recorder.launches.pop(), first, strict=True):
                if hasattr(got, "shape"):
                    tensors = (x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in (got, want))
                    got, want = ((x.shape, x.stride(), x.dtype) for x in tensors)
                assert repr(got) == repr(want)


def test_each_gpu_has_its_kernel(recorder):
    given = inputs(out=bf16(TOKENS_Q, HEADS, D_V))
    for arguments in (given, on_another_gpu(given)) * 2:
        prefill.tsmla_prefill(**arguments)
    assert len(recorder.variants) == 2 and len(recorder.launches) == 4


def test_what_fails_with_right_arguments_fails_as_it_does(recorder, monkeypatch):
    def kernel(*arguments):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^launch failed$"):
            prefill.tsmla_prefill(**inputs())


@pytest.mark.parametrize(
    "change", [{"query": torch.zeros(0, HEADS, D_QK, dtype=torch.bfloat16)}, {"batch_size": 0}], ids=["tokens", "batch"]
)
def test_nothing_to_do_launches_nothing(recorder, change):
    ends = torch.zeros(1 if "batch_size" in change else 3, dtype=torch.int32)
    out = prefill.tsmla_prefill(**inputs(cum_seq_lens=ends, cum_seq_lens_q=ends, **change))
    assert recorder.launches == [] and out.shape[1:] == (HEADS, D_V)


def test_an_odd_stride_over_a_single_row_is_not_an_error(recorder):
    odd = torch.zeros(D_QK, dtype=torch.bfloat16).as_strided((1, 1, D_QK), (1, 3, 1))
    one = torch.zeros(1, 1, D_V, dtype=torch.bfloat16)
    prefill.tsmla_prefill(**inputs(query=odd, key=odd, value=one))
    assert len(recorder.launches) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_read_where_no_gradient_is_asked_for(recorder, mode):
    given = inputs()
    with mode():
        prefill.tsmla_prefill(**{**given, "query": torch.nn.Parameter(given["query"])})
    assert len(recorder.launches) == 1


@pytest.mark.parametrize("out", [bf16(HEADS, TOKENS_Q, D_V).transpose(0, 1), bf16(TOKENS_Q, HEADS, 2 * D_V)[..., D_V:]])
def test_an_output_with_its_rows_apart_is_written(recorder, out):
    for _ in range(2):
        assert prefill.tsmla_prefill(**inputs(out=out)) is out
    assert len(recorder.variants) == 1


@pytest.mark.parametrize("two", [2, np.int32(2), np.uint8(2)])
def test_numbers_of_other_types_are_numbers(recorder, two):
    half = fractions.Fraction(1, two) if isinstance(two, int) else two.dtype.type(1) / two
    for flag in (True, 1, np.True_, 1.0):
        prefill.tsmla_prefill(**inputs(batch_size=two, softmax_scale=half), is_causal=flag)
    assert [launch[12:] for launch in recorder.launches] == [(0.5, 1.0, 0, 1.0, 0, 1, SMS, 0)] * 4
    assert len(recorder.variants) == 1 and recorder.variants[0].causal is True


@pytest.mark.parametrize("rope", [bf16(TOKENS_KV, 64), bf16(TOKENS_KV, 1, 64), bf16(TOKENS_KV, 3, 64)[:, 2:]], ids=str)
def test_pieces_reach_the_kernel_as_they_are(recorder, rope):
    query = bf16(TOKENS_Q, HEADS, 144)[..., :128], bf16(HEADS, TOKENS_Q, 64).transpose(0, 1)
    key = bf16(TOKENS_KV, HEADS_KV, 256)[..., :128], rope
    for _ in range(2):
        prefill.tsmla_prefill(**inputs(query=query, key=key))
    for q, q_pe, k, k_pe, *_ in recorder.launches:
        assert q is query[0] and q_pe is query[1] and k is key[0]
        assert k_pe.data_ptr() == rope.data_ptr() and k_pe.shape == (TOKENS_KV, 1, 64)
    assert [(v.d_qk, v.d_v) for v in recorder.variants] == [(D_QK, D_V)] and len(recorder.launches) == 2


def test_joined_and_in_pieces_share_a_kernel(recorder):
    pieces = {
        "query": (bf16(TOKENS_Q, HEADS, 128), bf16(TOKENS_Q, HEADS, 64)),
        "key": (bf16(TOKENS_KV, HEADS_KV, 128), bf16(TOKENS_KV, 64)),
    }
    for change in ({}, pieces, {"key": pieces["key"]}, {"query": pieces["query"]}):
        out = prefill.tsmla_prefill(**inputs(**change))
        assert out.shape == (TOKENS_Q, HEADS, D_V)
    assert len(set(recorder.variants)) == 1 and len(recorder.launches) == 4


@pytest.mark.parametrize("lse", [torch.zeros(TOKENS_Q, HEADS), torch.zeros(HEADS, TOKENS_Q).T], ids=["rows", "heads"])
@pytest.mark.parametrize("returned", [False, True])
def test_an_lse_that_is_given_is_written(recorder, lse, returned):
    result = prefill.tsmla_prefill(**inputs(lse=lse), return_lse=returned)
    assert recorder.launches[-1][6] is lse and recorder.variants[-1].lse
    assert result[1] is lse if returned else isinstance(result, torch.Tensor)


def test_masks_of_any_width_are_calls_of_one_kind(recorder):
    """One kernel serves causal calls and others, with an LSE that is returned or not."""
    for causal, returned in ((True, True), (False, True), (True, False)):
        before = len(recorder.variants)
        for words in (1, 2, 300):
            mask = torch.zeros(TOKENS_Q, words + 3, dtype=torch.int32)[:, 1 : 1 + words]
            result = prefill.tsmla_prefill(**inputs(key_mask=mask), is_causal=causal, return_lse=returned)
            launch = recorder.launches[-1]
            assert launch[10] is mask and launch[-3] == causal and launch[6].shape == (TOKENS_Q, HEADS)
            assert result[1] is launch[6] if returned else isinstance(result, torch.Tensor)
        assert len(recorder.variants) == before + 1
    assert set(recorder.variants) == {PrefillVariant(Arch.SM90A, *(Dtype.BF16,) * 2, D_QK, D_V, False, True, True)}


@pytest.mark.parametrize("returned", [False, True])
def test_an_earlier_result_is_what_is_written(recorder, returned):
    earlier = bf16(TOKENS_Q, HEADS, D_V), torch.zeros(HEADS, TOKENS_Q).T
    for _ in range(2):
        result = prefill.tsmla_prefill(**inputs(merge_into=earlier), return_lse=returned)
        out, lse = result if returned else (result, earlier[1])
        assert out is earlier[0] and lse is earlier[1]
        launch = recorder.launches[-1]
        assert launch[5] is out and launch[6] is lse and launch[-4] == 1
    plain = inputs(out=earlier[0], lse=earlier[1])
    prefill.tsmla_prefill(**plain)
    assert recorder.launches[-1][-4] == 0
