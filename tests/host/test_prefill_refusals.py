"""tsmla_prefill without a GPU: what it refuses, and in which words.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from prefill_calls import D_QK, D_V, HEADS, HEADS_KV, LENGTHS, TOKENS_KV, TOKENS_Q, bf16, inputs
from tsmla import ArgumentError, UnsupportedError
from tsmla.operators import prefill


def test_what_is_no_cuda_tensor_is_refused():
    with pytest.raises(ArgumentError, match="tsmla_prefill: query is a list; it must be a CUDA tensor"):
        prefill.tsmla_prefill(**inputs(query=[1.0]))
    with pytest.raises(ArgumentError, match="tsmla_prefill: query is on cpu; it must be a CUDA tensor"):
        prefill.tsmla_prefill(**inputs())


WRONG = {
    "query of two dimensions": (
        {"query": bf16(TOKENS_Q, D_QK)},
        r"query has shape \[5, 192\]; it must be \[tokens_q, heads_q, d_query\]",
    ),
    "value of two dimensions": (
        {"value": bf16(TOKENS_KV, D_V)},
        r"value has shape \[7, 128\]; it must be \[tokens_kv, heads_kv, d_v\]",
    ),
    "key no tensor": ({"key": None}, "key is a NoneType; it must be a tensor on cpu"),
    "value no tensor": ({"value": None}, "value is a NoneType; it must be a tensor on cpu"),
    "key elsewhere": (
        {"key": torch.zeros(TOKENS_KV, HEADS_KV, D_QK, dtype=torch.bfloat16, device="meta")},
        "key is on meta but query is on cpu; all tensors must share a device",
    ),
    "query of another dtype": ({"query": torch.zeros(TOKENS_Q, HEADS, D_QK)}, "query is torch.float32; accepted: "),
    "key of another dtype": ({"key": bf16(TOKENS_KV, HEADS_KV, D_QK).half()}, "key is torch.float16; accepted: torch"),
    "key of other tokens": (
        {"key": bf16(TOKENS_KV - 1, HEADS_KV, D_QK)},
        r"key has shape \[6, 2, 192\]; it must be \[7, 2, 192\]",
    ),
    "key of two dimensions": ({"key": bf16(7, D_QK)}, r"key has shape \[7, 192\]; it must be \[7, 2, 192\]"),
    "heads": ({"query": bf16(TOKENS_Q, 3, D_QK)}, "query has 3 heads and key 2; query's must be a multiple of key's"),
    "no key heads": (
        {"key": bf16(TOKENS_KV, 0, D_QK), "value": bf16(TOKENS_KV, 0, D_V)},
        "query has 4 heads and key 0",
    ),
    "value with gaps": (
        {"value": bf16(TOKENS_KV, HEADS_KV, 2 * D_V)[..., ::2]},
        r"value has strides \(512, 256, 2\); its last dimension must have stride 1",
    ),
    "key address": (
        {"key": bf16(TOKENS_KV, HEADS_KV, D_QK + 8)[..., 1 : 1 + D_QK]},
        "key starts at address 0x[0-9a-f]+; it must be aligned to 16 bytes",
    ),
    "query strides": (
        {"query": bf16(TOKENS_Q, HEADS, D_QK + 4)[..., :D_QK]},
        r"query has strides \(784, 196, 1\) of 2-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "lengths of 64 bits": ({"cum_seq_lens": LENGTHS.long()}, "cum_seq_lens is torch.int64; accepted: torch.int32"),
    "lengths of two dimensions": (
        {"cum_seq_lens": torch.zeros(3, 1, dtype=torch.int32)},
        r"cum_seq_lens has shape \[3, 1\]; it must be \[3\]",
    ),
    "nothing to do, with a key of another dtype": (
        {"query": bf16(0, HEADS, D_QK), "key": bf16(TOKENS_KV, HEADS_KV, D_QK).half()},
        "key is torch.float16; accepted: torch.bfloat16",
    ),
    "lengths on the host": ({"cum_seq_lens": [0, 3, 7]}, "cum_seq_lens is a list; it must be a tensor on cpu"),
    "batch size of no integer": ({"batch_size": 2.0}, "batch_size is a float; it must be a Python integer"),
    "batch size in words": ({"batch_size": "2"}, "batch_size is a str; it must be a Python integer"),
    "no batch size": ({"batch_size": None}, "batch_size is a NoneType; it must be a Python integer"),
    "batch size on the device": ({"batch_size": torch.tensor(2)}, "batch_size is a Tensor; it must be a Python"),
    "batch size of a flag": (
        {"batch_size": True, "cum_seq_lens": LENGTHS[:2], "cum_seq_lens_q": LENGTHS[:2]},
        "batch_size is a bool; it must be a Python integer",
    ),
    "negative batch size": (
        {"batch_size": -1, "cum_seq_lens": LENGTHS[:0], "cum_seq_lens_q": LENGTHS[:0]},
        "batch_size is -1; it must be from 0 to 2147483646",
    ),
    "huge batch size": ({"batch_size": 10**5000}, "batch_size is a number of more than 20 digits; it must be from 0"),
    "batch size": ({"batch_size": 3}, r"cum_seq_lens_q has shape \[3\]; it must be \[4\]"),
    "query lengths of another batch": (
        {"cum_seq_lens_q": LENGTHS[:2]},
        r"cum_seq_lens_q has shape \[2\]; it must be \[3\]",
    ),
    "lengths with gaps": (
        {"cum_seq_lens": torch.zeros(6, dtype=torch.int32)[::2]},
        r"cum_seq_lens has shape \[3\] and strides \(2,\); it must be contiguous",
    ),
    "sinks of the key's heads": ({"sinks": torch.zeros(HEADS_KV)}, r"sinks has shape \[2\]; it must be \[4\]"),
    "LSE with sinks of a number": ({"lse_includes_sink": 2}, "lse_includes_sink is 2; it must be True or False"),
    "out of another shape": (
        {"out": bf16(TOKENS_Q, HEADS, D_V + 8)},
        r"out has shape \[5, 4, 136\]; it must be \[5, 4, 128\]",
    ),
    "out of a dtype that is none of ours": (
        {"out": torch.zeros(TOKENS_Q, HEADS, D_V)},
        "out is torch.float32; accepted: torch.bfloat16",
    ),
    "out against out_dtype": (
        {"out": bf16(TOKENS_Q, HEADS, D_V), "out_dtype": torch.float16},
        "out_dtype is torch.float16 but out is torch.bfloat16; out_dtype may be left out",
    ),
    "out no tensor": ({"out": "o"}, "out is a str; it must be a tensor on cpu"),
    "out strides": (
        {"out": bf16(TOKENS_Q, HEADS, D_V + 4)[..., :D_V]},
        r"out has strides \(528, 132, 1\) of 2-byte elements",
    ),
    "out_dtype": ({"out_dtype": torch.float32}, "out_dtype is torch.float32; accepted: torch.bfloat16"),
    "out_dtype in a list": ({"out_dtype": [1]}, "out_dtype is a list; accepted: torch.bfloat16"),
    "out_dtype in words": ({"out_dtype": "bf16"}, "out_dtype is a str; accepted: torch.bfloat16"),
    "causal in words": ({"is_causal": "no"}, "is_causal is 'no'; it must be True or False"),
    "LSE on the device": ({"return_lse": torch.ones(2)}, "return_lse is a Tensor; it must be True or False"),
    "PDL in an array": ({"enable_pdl": np.ones(2)}, "enable_pdl is a ndarray; it must be True or False"),
    "causal of a number": ({"is_causal": 2}, "is_causal is 2; it must be True or False"),
    "scale beyond floats": (
        {"softmax_scale": 10**400},
        "softmax_scale is a number of more than 20 digits, beyond what a float holds",
    ),
    "fraction beyond floats": (
        {"k_scale": fractions.Fraction(10**400, 3)},
        "k_scale is a number of more than 20 digits, beyond what a float holds",
    ),
    "sinks of another dtype": ({"sinks": torch.zeros(HEADS, dtype=torch.float64)}, "sinks is torch.float64; accepted"),
    "sinks with gaps": ({"sinks": torch.zeros(2 * HEADS)[::2]}, "sinks .* must be contiguous"),
    "mask of 64 bits": (
        {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int64)},
        "key_mask is torch.int64; accepted: torch.int32",
    ),
    "mask of other tokens": (
        {"key_mask": torch.zeros(TOKENS_Q + 1, 1, dtype=torch.int32)},
        r"key_mask has shape \[6, 1\]; it must be \[5, mask_words\]",
    ),
    "mask of one dimension": (
        {"key_mask": torch.zeros(TOKENS_Q, dtype=torch.int32)},
        r"key_mask has shape \[5\]; it must be \[5, mask_words\]",
    ),
    "mask with gaps": (
        {"key_mask": torch.zeros(TOKENS_Q, 4, dtype=torch.int32)[:, ::2]},
        r"key_mask has strides \(4, 2\); its last dimension must have stride 1",
    ),
    "mask of too few words": (
        {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int32), "max_seq_len": 33},
        r"key_mask has shape \[5, 1\] and max_seq_len is 33; each query must have at least 2 words, one for 32 keys",
    ),
    "mask of too few words for a length of NumPy's": (
        {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int32), "max_seq_len": np.int64(33)},
        r"key_mask has shape \[5, 1\] and max_seq_len is 33; each query must have at least 2 words, one for 32 keys",
    ),
    **{
        f"the length beside a mask is {what}": (
            {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int32), "max_seq_len": length},
            f"max_seq_len is {said}",
        )
        for what, length, said in (
            ("a tensor", torch.tensor(33), r"a Tensor; it must be a Python integer \(reading a tensor here would wait"),
            ("a float", 33.0, "a float; it must be a Python integer"),
            ("in words", "33", "a str; it must be a Python integer"),
            ("negative", -1, "-1; it must be from 0 to 2147483647"),
            ("none", None, "a NoneType; it must be a Python integer"),
        )
    },
    "mask elsewhere": (
        {"key_mask": torch.zeros(TOKENS_Q, 1, dtype=torch.int32, device="meta")},
        "key_mask is on meta but query is on cpu; all tensors must share a device",
    ),
    **{
        f"mask nested as {layout}": (
            {"key_mask": torch.nested.as_nested_tensor([torch.zeros(4), torch.zeros(3)], layout=layout)},
            "key_mask is a nested tensor; it must be a tensor on cpu of one shape",
        )
        for layout in (torch.strided, torch.jagged)
    },
    "mask no tensor": ({"key_mask": [1]}, "key_mask is a list; it must be a tensor on cpu"),
    "sinks in the LSE in words": ({"lse_includes_sink": "yes"}, "lse_includes_sink is 'yes'; it must be True or False"),
    "a base of LSEs that there is not": ({"lse_base": 10}, "lse_base is 10; accepted: 2 and math.e"),
    "a base of LSEs in words": ({"lse_base": "e"}, "lse_base is a str; it must be a Python number"),
    "base 2 into an earlier result": (
        {"lse_base": 2, "merge_into": (bf16(TOKENS_Q, HEADS, D_V), torch.zeros(TOKENS_Q, HEADS))},
        "lse_base is 2 and merge_into is given, which holds natural logarithms; leave lse_base out",
    ),
    "flag for a scale": ({"output_scale": True}, "output_scale is a bool; it must be a Python number"),
    "negative scale": (
        {"softmax_scale": -1.0},
        r"softmax_scale is -1.0 and k_scale 1.0; their product must be from 1.18e-38 \(the smallest normal .* to 1024",
    ),
    "zero key scale": ({"k_scale": 0}, "softmax_scale is 0.125 and k_scale 0.0; their product"),
    "no scale": ({"softmax_scale": math.nan}, "softmax_scale is nan"),
    "subnormal scale": ({"softmax_scale": 1e-30, "k_scale": 1e-10}, "softmax_scale is 1e-30 and k_scale 1e-10"),
    "large scale": ({"softmax_scale": 64.0, "k_scale": 17.0}, "softmax_scale is 64.0 and k_scale 17.0; their product"),
    "infinite scale": ({"softmax_scale": math.inf}, "softmax_scale is inf"),
    "scale on the device": (
        {"k_scale": torch.ones(())},
        r"k_scale is a Tensor; it must be a Python number \(reading a tensor here would wait for the GPU\)",
    ),
    "scale that is no number": ({"softmax_scale": None}, "softmax_scale is a NoneType; it must be a Python number"),
    "value scale": ({"v_scale": math.nan}, "v_scale is nan and output_scale 1.0; their product must be finite"),
    "output scale": ({"v_scale": 1e30, "output_scale": -1e30}, r"v_scale is 1e\+30 and output_scale -1e\+30"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_use_names_the_argument(recorder, change, message, seen):
    if seen:
        for out in (None, bf16(TOKENS_Q, HEADS, D_V)):
            prefill.tsmla_prefill(**inputs(out=out))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {message}"):
        prefill.tsmla_prefill(**inputs(**change))
    assert recorder.launches == []


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
def test_query_tiles_are_counted_in_32_bits(recorder, seen):
    most = (2**31 - 2**26) // HEADS
    lengths = torch.empty(most + 2, dtype=torch.int32)  # 2 GB that nobody touches
    if seen:
        given = inputs(batch_size=most, cum_seq_lens=lengths[:-1], cum_seq_lens_q=lengths[:-1])
        prefill.tsmla_prefill(**given)
        prefill.tsmla_prefill(**given)
        assert len(recorder.launches) == 2
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"batch_size is {most + 1} and query has 4 heads; their product must be"):
        prefill.tsmla_prefill(**inputs(batch_size=most + 1, cum_seq_lens=lengths, cum_seq_lens_q=lengths))
    assert recorder.launches == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"value": bf16(TOKENS_KV, HEADS_KV, 64)}, r"head dims \(qk, v\) are .*, not \(192, 64\)"),
        ({"out_dtype": torch.float16}, "of bf16 for sm_90a writes bf16, not fp16"),
        ({"out": bf16(TOKENS_Q, HEADS, D_V).half()}, "of bf16 for sm_90a writes bf16, not fp16"),
    ],
    ids=["head dims", "out_dtype", "out"],
)
def test_what_no_kernel_exists_for(recorder, change, message):
    with pytest.raises(UnsupportedError, match=f"^tsmla_prefill: prefill .*{message}"):
        prefill.tsmla_prefill(**inputs(**change))


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("batch_size", [10**9, 2**31 - 2])
def test_lengths_are_compared_before_room_is_made_for_so_many(recorder, batch_size, seen):
    """The lists that a mask is made into would take 40 GB and more."""
    call = inputs(key_mask=torch.zeros(TOKENS_Q, 4, dtype=torch.int32))
    if seen:
        prefill.tsmla_prefill(**call)
        recorder.launches.clear()
    message = rf"cum_seq_lens(_q)? has shape \[3\]; it must be \[{batch_size + 1}\], which is \[batch_size \+ 1\]"
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {message}"):
        prefill.tsmla_prefill(**{**call, "batch_size": batch_size})
    assert recorder.launches == []


TENSORS = ("query", "key", "value", "cum_seq_lens", "cum_seq_lens_q", "out", "lse", "sinks", "key_mask")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("case", ODD)
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name):
    make, message = ODD[case]
    given = inputs(
        out=bf16(TOKENS_Q, HEADS, D_V),
        lse=torch.zeros(TOKENS_Q, HEADS),
        sinks=torch.zeros(HEADS),
        key_mask=torch.zeros(TOKENS_Q, 1, dtype=torch.int32),
    )
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {name} {message.format(name=name)}"):
        prefill.tsmla_prefill(**{**given, name: make(given[name])})
    assert recorder.launches == []


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
@pytest.mark.parametrize("case", ["negated", "fake", "needs a gradient"])
def test_they_are_named_after_calls_that_are_alike(recorder, case, name):
    make, message = {**ODD, **FLOATS_ONLY}[case]
    given = inputs(out=bf16(TOKENS_Q, HEADS, D_V))
    changed = {**given, name: make(given[name])}
    if case == "fake":
        changed = {n: make(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        name = "query"
    prefill.tsmla_prefill(**given)
    recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {name} {message.format(name=name)}"):
        prefill.tsmla_prefill(**changed)
    assert recorder.launches == []


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_an_output_whose_rows_share_memory_is_named(recorder, case, seen):
    out = bf16(TOKENS_Q, HEADS, D_V)
    for _ in range(seen):
        prefill.tsmla_prefill(**inputs(out=out))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match="^tsmla_prefill: out has shape .* so some of its elements share memory"):
        prefill.tsmla_prefill(**inputs(out=OVERLAPPING[case](out)))
    assert recorder.launches == []
