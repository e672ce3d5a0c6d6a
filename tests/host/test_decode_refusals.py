"""tsmla_decode without a GPU: what it refuses, and in which words.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math
import re

import numpy as np
import other_facts
import pytest
import torch
from decode_calls import BATCH, FORMULA, HEADS, LENGTHS, PAGES, Q_LEN, WIDTH, bf16, inputs, ints
from launches import processors
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype
from tsmla.loading import resolve
from tsmla.operators.decode import tsmla_decode


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def test_what_is_no_cuda_tensor_is_refused():
    with pytest.raises(ArgumentError, match="tsmla_decode: query is a dict; it must be a CUDA tensor"):
        tsmla_decode(**inputs(query={}))
    with pytest.raises(ArgumentError, match="tsmla_decode: query is on cpu; it must be a CUDA tensor"):
        tsmla_decode(**inputs())


WRONG = {
    "query of three dimensions": (
        {"query": bf16(BATCH, HEADS, 576)},
        "query has shape [3, 4, 576]; it must be [batch, q_len, heads, columns]",
    ),
    "query width": (
        {"query": bf16(3, 2, 4, 512)},
        "query has shape [3, 2, 4, 512]; it must be [batch, q_len, heads, 576]",
    ),
    "query dtype": ({"query": bf16(3, 2, 4, 576).float()}, "query is torch.float32; accepted: torch.bfloat16"),
    "query with gaps": (
        {"query": bf16(3, 2, 4, 1152)[..., ::2]},
        "query has strides (9216, 4608, 1152, 2); its last dimension must have stride 1",
    ),
    "query strides": (
        {"query": bf16(3, 2, 4, 580)[..., :576]},
        "query has strides (4640, 2320, 580, 1) of 2-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "cache no tensor": ({"kv_cache": None}, "kv_cache is a NoneType; it must be a tensor on cpu"),
    "cache elsewhere": ({"kv_cache": bf16(2, 64, 576).to("meta")}, "kv_cache is on meta but query is on cpu"),
    "cache dtype": (
        {"kv_cache": bf16(2, 64, 576).half()},
        "kv_cache is torch.float16; accepted: torch.bfloat16 (as query)",
    ),
    "cache heads": (
        {"kv_cache": bf16(2, 2, 64, 576)},
        "kv_cache has shape [2, 2, 64, 576]; it must be [pages, page_size, 576] or [pages, 1, page_size, 576]",
    ),
    "cache width": ({"kv_cache": bf16(2, 64, 512)}, "kv_cache has shape [2, 64, 512]; it must be"),
    "cache of two dimensions": ({"kv_cache": bf16(64, 576)}, "kv_cache has shape [64, 576]; it must be"),
    "page size": (
        {"kv_cache": bf16(2, 48, 576)},
        "kv_cache has pages of 48 keys; accepted: 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    "cache rows": (
        {"kv_cache": bf16(PAGES, 64, 640)[..., :576]},
        "kv_cache has strides (40960, 640, 1); the rows of a page must follow each other without gaps",
    ),
    "page stride": (
        {"kv_cache": bf16(PAGES, 64 * 576 + 4)[:, : 64 * 576].unflatten(1, (64, 576))},
        "kv_cache has strides (36868, 576, 1) of 2-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "workspace dtype": (
        {"workspace_buffer": torch.zeros(FORMULA // 4)},
        "workspace_buffer is torch.float32; accepted: torch.int8, torch.uint8",
    ),
    "workspace of two dimensions": (
        {"workspace_buffer": torch.zeros(2, FORMULA, dtype=torch.int8)},
        "workspace_buffer has shape [2, ",
    ),
    "workspace with gaps": (
        {"workspace_buffer": torch.zeros(2 * FORMULA, dtype=torch.int8)[::2]},
        f"workspace_buffer has shape [{FORMULA}] and strides (2,); it must be contiguous",
    ),
    "workspace address": (
        {"workspace_buffer": torch.zeros(FORMULA + 4, dtype=torch.int8)[4:]},
        "workspace_buffer starts at address",
    ),
    "no workspace": ({"workspace_buffer": None}, "workspace_buffer is a NoneType"),
    "table dtype": (
        {"block_tables": torch.zeros(BATCH, WIDTH, dtype=torch.int64)},
        "block_tables is torch.int64; accepted: torch.int32",
    ),
    "table rows": (
        {"block_tables": torch.zeros(2, WIDTH, dtype=torch.int32)},
        "block_tables has shape [2, 6]; it must be [3, width], which is [requests, width]",
    ),
    "table with gaps": (
        {"block_tables": torch.zeros(3, 12, dtype=torch.int32)[:, ::2]},
        "block_tables has strides (12, 2); its last dimension must have stride 1",
    ),
    "lengths dtype": ({"seq_lens": LENGTHS.float()}, "seq_lens is torch.float32; accepted: torch.int32, torch.int64"),
    "lengths of another 64 bits": ({"seq_lens": LENGTHS.double()}, "seq_lens is torch.float64; accepted: torch.int32"),
    "global lengths of another 64 bits": (
        {"causal_seqs": LENGTHS.double()},
        "causal_seqs is torch.float64; accepted: torch.int32",
    ),
    "lengths batch": ({"seq_lens": LENGTHS[:2]}, "seq_lens has shape [2]; it must be [3]"),
    "lengths with gaps": ({"seq_lens": ints(1, 2, 3, 4, 5, 6)[::2]}, "seq_lens has shape [3] and strides (2,)"),
    "lengths on the host": ({"seq_lens": [1, 2, 3]}, "seq_lens is a list; it must be a tensor on cpu"),
    "global lengths batch": ({"causal_seqs": LENGTHS[:2]}, "causal_seqs has shape [2]; it must be [3]"),
    "global lengths with gaps": (
        {"causal_seqs": ints(1, 2, 3, 4, 5, 6)[::2]},
        "causal_seqs has shape [3] and strides (2,)",
    ),
    "visible dtype": (
        {"local_visible_lens": torch.zeros(3, 2, dtype=torch.int64)},
        "local_visible_lens is torch.int64; accepted: torch.int32",
    ),
    "visible shape": ({"local_visible_lens": torch.zeros(3, 1, dtype=torch.int32)}, "local_visible_lens has shape"),
    "out shape": ({"out": bf16(3, 2, 4, 576)}, "out has shape [3, 2, 4, 576]; it must be [3, 2, 4, 512]"),
    "out dtype": ({"out": bf16(3, 2, 4, 512).float()}, "out is torch.float32; accepted: torch.bfloat16"),
    "out with gaps": ({"out": bf16(3, 2, 8, 512)[:, :, ::2]}, "out has shape [3, 2, 4, 512] and strides"),
    "out address": (
        {"out": torch.zeros(BATCH * Q_LEN * HEADS * 512 + 1, dtype=torch.bfloat16)[1:].view(3, 2, 4, 512)},
        "out starts at address",
    ),
    "out no tensor": ({"out": "o"}, "out is a str; it must be a tensor on cpu"),
    "nothing to do, with lengths of another batch": (
        {"query": bf16(BATCH, 0, HEADS, 576), "seq_lens": LENGTHS[:2]},
        "seq_lens has shape [2]; it must be [3]",
    ),
    "longest": ({"max_seq_len": 0}, "max_seq_len is 0; it must be from 1 to 2147483647"),
    "longest beyond 32 bits": ({"max_seq_len": 2**31}, "max_seq_len is 2147483648; it must be from 1 to 2147483647"),
    "longest no integer": ({"max_seq_len": 300.0}, "max_seq_len is a float; it must be a Python integer"),
    "window no integer": ({"window_left": -1.0}, "window_left is a float; it must be a Python integer"),
    "world no integer": ({"cp_world": 1.0}, "cp_world is a float; it must be a Python integer"),
    "rank no integer": ({"cp_rank": 0.0}, "cp_rank is a float; it must be a Python integer"),
    "interleave no integer": ({"cp_interleave_size": 1.0}, "cp_interleave_size is a float; it must be"),
    "splits no integer": ({"min_split_kv": 1.0}, "min_split_kv is a float; it must be a Python integer"),
    "longest on the device": (
        {"max_seq_len": torch.tensor(3)},
        "max_seq_len is a Tensor; it must be a Python integer (reading a tensor here would wait for the GPU)",
    ),
    "window": ({"window_left": -2}, "window_left is -2; it must be from -1 to"),
    "world": ({"cp_world": 0}, "cp_world is 0; it must be from 1 to"),
    "rank": ({"cp_world": 2, "cp_rank": 2, "causal_seqs": ints(1, 2, 3)}, "cp_rank is 2; it must be from 0 to 1"),
    "interleave": ({"cp_interleave_size": 0}, "cp_interleave_size is 0; it must be from 1 to"),
    "world without global lengths": ({"cp_world": 2}, "cp_world is 2 but causal_seqs is not given"),
    "splits": ({"min_split_kv": 257}, "min_split_kv is 257; it must be from 1 to 256"),
    "lse base in words": ({"lse_base": "2"}, "lse_base is a str; it must be a Python number"),
    "lse base on the device": ({"lse_base": torch.ones(2)}, "lse_base is a Tensor; it must be a Python number"),
    "huge lse base": ({"lse_base": 10**400}, "lse_base is a number of more than 20 digits; accepted: 2 and math.e"),
    "rank on the device": ({"kv_lora_rank": torch.tensor([512, 1])}, "kv_lora_rank is a Tensor; it must be a Python"),
    "rope in a list": ({"qk_rope_head_dim": [64]}, "qk_rope_head_dim is a list; it must be a Python number"),
    "huge length": ({"max_seq_len": 10**5000}, "max_seq_len is a number of more than 20 digits; it must be from 1"),
    "flag for a length": ({"max_seq_len": True}, "max_seq_len is a bool; it must be a Python integer"),
    "causal in words": ({"causal_mask": "no"}, "causal_mask is 'no'; it must be True or False"),
    "causal on the device": ({"causal_mask": torch.ones(2)}, "causal_mask is a Tensor; it must be True or False"),
    "LSE in an array": ({"return_lse": np.ones(2)}, "return_lse is a ndarray; it must be True or False"),
    "PDL of a number": ({"enable_pdl": 2}, "enable_pdl is 2; it must be True or False"),
    "scale beyond floats": ({"softmax_scale": 10**400}, "softmax_scale is a number of more than 20 digits, beyond"),
    "flag for a scale": ({"output_scale": True}, "output_scale is a bool; it must be a Python number"),
    "sinks of another dtype": ({"sinks": torch.zeros(HEADS, dtype=torch.float64)}, "sinks is torch.float64; accepted"),
    "sinks of other heads": ({"sinks": torch.zeros(HEADS + 1)}, "sinks has shape [5]; it must be [4]"),
    "sinks with gaps": (
        {"sinks": torch.zeros(2 * HEADS)[::2]},
        "sinks has shape [4] and strides (2,); it must be contiguous",
    ),
    "batch invariance in words": ({"batch_invariant": "yes"}, "batch_invariant is 'yes'; it must be True or False"),
    "sinks in the LSE in words": ({"lse_includes_sink": "yes"}, "lse_includes_sink is 'yes'; it must be True or False"),
    "sinks on a rank": (
        {"sinks": torch.zeros(HEADS), "cp_world": 2, "causal_seqs": ints(2, 4, 6)},
        "sinks are given and cp_world is 2; every rank would count them: call without, merge the ranks' results, and",
    ),
    "lse base": ({"lse_base": 10}, "lse_base is 10; accepted: 2 and math.e"),
    "negative scale": (
        {"softmax_scale": -1.0},
        "softmax_scale is -1.0; it must be from 1.18e-38 (the smallest normal float32) to 1024",
    ),
    "infinite output scale": ({"output_scale": math.inf}, "output_scale is inf; it must be finite in float32"),
    "scale on the device": ({"softmax_scale": torch.ones(())}, "softmax_scale is a Tensor; it must be a Python number"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_use_names_the_argument(recorder, change, message, seen):
    if seen:
        optional = {
            "out": bf16(BATCH, Q_LEN, HEADS, 512),
            "local_visible_lens": torch.zeros(BATCH, Q_LEN, dtype=torch.int32),
            "causal_seqs": LENGTHS.clone(),
            "sinks": torch.zeros(HEADS),
        }
        for given in ({}, *({name: value} for name, value in optional.items()), {"max_seq_len": 2**31 - 1}):
            tsmla_decode(**inputs(**given))
        tsmla_decode(**inputs(causal_seqs=LENGTHS.clone(), cp_world=2))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
        tsmla_decode(**inputs(**change))
    assert recorder.launches == []


def test_what_no_kernel_exists_for(recorder, monkeypatch):
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="^tsmla_decode: kv_lora_rank and qk_rope_head_dim are 256 and 64; "):
            tsmla_decode(**inputs(kv_lora_rank=256))
        with pytest.raises(UnsupportedError, match="^tsmla_decode: kv_lora_rank and qk_rope_head_dim are 512 and 32; "):
            tsmla_decode(**inputs(qk_rope_head_dim=32))
        tsmla_decode(**inputs())
    other_facts.change(monkeypatch, Arch.SM90A, decode=(Dtype.FP16,))
    resolve.forget()
    with pytest.raises(UnsupportedError, match="^tsmla_decode: decode for sm_90a takes fp16, not bf16"):
        tsmla_decode(**inputs())
    other_facts.change(monkeypatch, Arch.SM90A, decode=())
    with pytest.raises(UnsupportedError, match="no kernel for sm_90a yet; it exists for sm_100a, sm_103a, sm_107a"):
        tsmla_decode(**inputs())


TENSORS = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "causal_seqs", "local_visible_lens")


def all_tensors() -> dict:
    return inputs(
        causal_seqs=LENGTHS.clone(),
        local_visible_lens=torch.zeros(BATCH, Q_LEN, dtype=torch.int32),
        out=bf16(BATCH, Q_LEN, HEADS, 512),
    )


@pytest.mark.parametrize("name", (*TENSORS, "out"))
@pytest.mark.parametrize("case", ODD)
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name):
    make, message = ODD[case]
    given = all_tensors()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {name} {message.format(name=name)}"):
        tsmla_decode(**{**given, name: make(given[name])})
    assert recorder.launches == []


def test_a_nested_query_of_as_many_dimensions_as_packed_ones_is_named(recorder):
    """It has no shape that could be told."""
    make, message = ODD["nested"]
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: query {message.format(name='query')}"):
        tsmla_decode(**inputs(query=make(bf16(HEADS, 576))))


@pytest.mark.parametrize("name", ["query", "kv_cache", "out"])
@pytest.mark.parametrize("case", ["negated", "fake", "needs a gradient"])
def test_they_are_named_after_calls_that_are_alike(recorder, case, name):
    make, message = {**ODD, **FLOATS_ONLY}[case]
    given = all_tensors()
    changed = {**given, name: make(given[name])}
    if case == "fake":
        changed = {n: make(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        name = "query"
    tsmla_decode(**given)
    recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {name} {message.format(name=name)}"):
        tsmla_decode(**changed)
    assert recorder.launches == []


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_an_output_whose_rows_share_memory_is_named(recorder, case, seen):
    out = bf16(BATCH, Q_LEN, HEADS, 512)
    for _ in range(seen):
        tsmla_decode(**inputs(out=out))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match="^tsmla_decode: out has shape .* and strides .*; it must be contiguous"):
        tsmla_decode(**inputs(out=OVERLAPPING[case](out)))
    assert recorder.launches == []


def test_a_workspace_whose_bytes_are_one_is_named(recorder):
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"workspace_buffer has shape .* and strides \(0,\); it must be contig"):
            tsmla_decode(**inputs(workspace_buffer=torch.zeros(1, dtype=torch.int8).expand(FORMULA)))
        tsmla_decode(**inputs())
    assert len(recorder.launches) == 2
