"""tsmla_decode without a GPU: what it accepts, what it says about the rest, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math
import re
import types

import numpy as np
import pytest
import torch
import tsmla
from another_gpu import on_another_gpu
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError, checks, resolve, support
from tsmla.decode import tsmla_decode
from tsmla.plan import plan_decode
from tsmla.variant import Arch, DecodeVariant, Dtype
from tsmla.workspace import decode_workspace_size

BATCH, Q_LEN, HEADS, PAGES, PAGE, WIDTH, SMS = 3, 2, 4, 10, 64, 6, 132
FORMULA = SMS * HEADS * 8 * 513 * 4


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    """Of calls on a GPU of `SMS` SMs, where every dtype is decoded on sm_90a only."""
    monkeypatch.setattr(support, "DECODE_DTYPES", {Arch.SM90A: tuple(support.DECODE_OUT_DTYPES)})
    properties = types.SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return recorder


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": torch.zeros(BATCH, Q_LEN, HEADS, 576, dtype=dtype),
        "kv_cache": torch.zeros(PAGES, PAGE, 576, dtype=dtype),
        "workspace_buffer": torch.zeros(FORMULA, dtype=torch.int8),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(BATCH, WIDTH, dtype=torch.int32),
        "seq_lens": ints(1, 2, 3),
        "max_seq_len": 300,
        "softmax_scale": 0.125,
    }
    return {**given, **changes}


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "ours", "out"),
    [
        (torch.bfloat16, Dtype.BF16, Dtype.BF16),
        (torch.float16, Dtype.FP16, Dtype.FP16),
        (torch.float8_e4m3fn, Dtype.E4M3, Dtype.BF16),
        (torch.float8_e5m2, Dtype.E5M2, Dtype.BF16),
    ],
)
def test_the_variant_follows_the_arguments(recorder, dtype, ours, out, flags):
    result = tsmla_decode(**inputs(dtype), return_lse=flags[0], enable_pdl=flags[1])
    assert recorder.variants == [DecodeVariant(Arch.SM90A, ours, out, *flags)]
    assert (result[0] if flags[0] else result).dtype == checks_dtype(out)


def checks_dtype(dtype: Dtype) -> torch.dtype:
    return checks.TORCH_DTYPE_OF[dtype]


def test_the_kernel_gets_its_arguments_in_contract_order(recorder):
    visible = torch.zeros(BATCH, Q_LEN, dtype=torch.int32)
    given = inputs(
        causal_seqs=ints(2, 4, 6), local_visible_lens=visible, window_left=7, cp_world=2, cp_rank=1,
        cp_interleave_size=16, output_scale=np.float32(0.5), causal_mask=False,
    )  # fmt: skip
    out, lse = tsmla_decode(**given, return_lse=True)
    (arguments,) = recorder.launches
    expected = [given[n] for n in ("query", "kv_cache", "block_tables", "seq_lens", "causal_seqs")]
    expected += [visible, arguments[6], out, lse]
    assert all(got is want for got, want in zip(arguments, expected, strict=False))
    workspace = arguments[9]
    assert workspace.dtype == torch.int8 and workspace.data_ptr() == given["workspace_buffer"].data_ptr()
    parts = plan_decode(Arch.SM90A, SMS, BATCH, Q_LEN, HEADS, 300).parts
    assert arguments[10:] == (0.125, 0.5, 0, 7, 2, 1, 16, 0, parts)
    assert all(type(value) is float for value in arguments[10:12]) and all(type(v) is int for v in arguments[12:])
    assert out.shape == (BATCH, Q_LEN, HEADS, 512) and out.is_contiguous()
    assert lse.shape == (BATCH, Q_LEN, HEADS) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_lengths_stand_in_for_what_is_not_given(recorder):
    given = inputs()
    tsmla_decode(**given)
    (arguments,) = recorder.launches
    assert arguments[3] is given["seq_lens"] is arguments[4]
    assert arguments[5].shape == (0, 0) and arguments[5].dtype == torch.int32
    assert arguments[6].shape == (0,) and arguments[6].dtype == torch.float32
    assert arguments[8] is None and arguments[12:18] == (1, -1, 1, 0, 1, 0)


def test_lengths_of_64_bits_are_narrowed_to_the_nearest(recorder):
    lengths = torch.tensor([5, 2**32 + 3, -(2**32) + 7], dtype=torch.int64)
    bounds = torch.tensor([2**63 - 1, -(2**63), 2**31 - 1], dtype=torch.int64)
    tsmla_decode(**inputs(seq_lens=lengths, causal_seqs=bounds))
    (arguments,) = recorder.launches
    assert arguments[3].dtype == arguments[4].dtype == torch.int32
    assert arguments[3].tolist() == [5, 2**31 - 1, 0] and arguments[4].tolist() == [2**31 - 1, 0, 2**31 - 1]


def test_one_length_of_64_bits_with_an_odd_stride(recorder):
    lengths = torch.tensor([9, 1, 8], dtype=torch.int64)[::2][1:]
    given = inputs(query=bf16(1, 1, 1, 576), block_tables=torch.zeros(1, 1, dtype=torch.int32), seq_lens=lengths)
    tsmla_decode(**given)
    assert recorder.launches[0][3].tolist() == [8]


def test_caches_of_four_dimensions_and_free_page_strides(recorder):
    cache = torch.zeros(PAGES, 3, PAGE, 576, dtype=torch.bfloat16)
    for given in (cache[:, 1], cache[:, 1:2]):
        tsmla_decode(**inputs(kv_cache=given))
        got = recorder.launches[-1][1]
        assert got.shape == (PAGES, PAGE, 576) and got.data_ptr() == given.data_ptr()
        assert got.stride() == (3 * PAGE * 576, 576, 1)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(recorder, page_size):
    tsmla_decode(**inputs(kv_cache=bf16(PAGES, page_size, 576)))
    assert len(recorder.launches) == 1


def test_a_given_output_is_written_and_returned(recorder):
    out = bf16(BATCH, Q_LEN, HEADS, 512)
    for _ in range(2):
        assert tsmla_decode(**inputs(out=out)) is out
        assert recorder.launches[-1][7] is out


def test_a_natural_lse_can_be_asked_for(recorder, monkeypatch):
    monkeypatch.setattr(resolve, "kernel", lambda variant: lambda *arguments: arguments[8].fill_(3.0))
    _, lse = tsmla_decode(**inputs(), return_lse=True, lse_base=math.e)
    assert torch.allclose(lse, torch.full_like(lse, 3 * math.log(2)))


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for call in range(1, 4):
        tsmla_decode(**inputs(output_scale=float(call)))
    assert len(recorder.variants) == 1 and [launch[11] for launch in recorder.launches] == [1.0, 2.0, 3.0]
    tsmla_decode(**inputs(), return_lse=True)
    tsmla_decode(**inputs(), enable_pdl=True)
    assert [(v.lse, v.pdl) for v in recorder.variants[1:]] == [(True, False), (False, True)]
    resolve.forget()
    tsmla_decode(**inputs())
    assert len(recorder.variants) == 4


def test_calls_of_a_kind_seen_before_differ_in_nothing_that_counts(recorder):
    """Each call follows one that differs from it in one thing, and launches what it would have launched first."""
    changes = [
        {},
        {"seq_lens": torch.tensor([1, 2, 3])},
        {"causal_seqs": ints(4, 5, 6)},
        {"causal_seqs": torch.tensor([4, 5, 6])},
        {"local_visible_lens": torch.ones(BATCH, Q_LEN, dtype=torch.int32)},
        {"kv_cache": bf16(PAGES, 1, PAGE, 576)},
        {"kv_cache": bf16(PAGES, 2 * PAGE, 576)[:, :PAGE]},
        {"workspace_buffer": torch.zeros(FORMULA, dtype=torch.uint8)},
        {"query": bf16(BATCH, 1, HEADS, 576)},
        {name: inputs(torch.float16)[name] for name in ("query", "kv_cache")},
        {"max_seq_len": 257},
        {"max_seq_len": 512},
        {"max_seq_len": 513},
        {"max_seq_len": 100000},
        {"window_left": 3},
        {"output_scale": -0.0},
        {"causal_mask": False},
        {"sinks": torch.zeros(HEADS)},
        {"sinks": torch.zeros(HEADS), "lse_includes_sink": True},
    ]
    firsts = []
    for change in changes:
        resolve.forget()
        tsmla_decode(**inputs(**change))
        firsts.append(recorder.launches.pop())
    resolve.forget()
    for _ in range(2):
        for change, first in zip(changes, firsts, strict=True):
            tsmla_decode(**inputs(**change))
            for got, want in zip(recorder.launches.pop(), first, strict=True):
                assert type(got) is type(want)
                if isinstance(got, torch.Tensor):
                    got, want = ((x.shape, x.stride(), x.dtype) for x in (got, want))
                assert repr(got) == repr(want)


def test_a_longer_call_of_a_kind_seen_before_needs_its_own_workspace(recorder):
    small, large = (decode_workspace_size(1, 1, 16, longest) for longest in (1024, 100000))
    given = inputs(query=bf16(1, 1, 16, 576), block_tables=torch.zeros(1, 1, dtype=torch.int32), seq_lens=ints(1))
    given["workspace_buffer"] = torch.zeros(small, dtype=torch.int8)
    tsmla_decode(**{**given, "max_seq_len": 1024})
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"has {small} bytes; this call needs {large}"):
            tsmla_decode(**{**given, "max_seq_len": 100000})


def test_each_gpu_has_its_kernel(recorder):
    given = inputs(out=bf16(BATCH, Q_LEN, HEADS, 512))
    for arguments in (given, on_another_gpu(given)) * 2:
        tsmla_decode(**arguments)
    assert len(recorder.variants) == 2 and len(recorder.launches) == 4


def test_what_fails_with_right_arguments_fails_as_it_does(recorder, monkeypatch):
    def kernel(*arguments):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^launch failed$"):
            tsmla_decode(**inputs())


@pytest.mark.parametrize("shape", [(0, 2, 4, 576), (3, 0, 4, 576), (3, 2, 0, 576)], ids=str)
def test_nothing_to_do_launches_nothing(recorder, shape):
    lengths = torch.zeros(shape[0], dtype=torch.int32)
    tables = torch.zeros(shape[0], WIDTH, dtype=torch.int32)
    out = tsmla_decode(**inputs(query=bf16(*shape), seq_lens=lengths, block_tables=tables))
    assert recorder.launches == [] and out.shape == (*shape[:3], 512)


def test_the_workspace_may_be_just_large_enough(recorder):
    needed = decode_workspace_size(BATCH, Q_LEN, HEADS, 300)
    assert 0 < needed <= FORMULA
    for dtype in (torch.int8, torch.uint8):
        tsmla_decode(**inputs(workspace_buffer=torch.zeros(needed, dtype=dtype)))
        workspace = recorder.launches[-1][9]
        assert workspace.numel() == needed and workspace.dtype == dtype
    message = f"tsmla_decode: workspace_buffer has {needed - 1} bytes; this call needs {needed}"
    with pytest.raises(ArgumentError, match=message):
        tsmla_decode(**inputs(workspace_buffer=torch.zeros(needed - 1, dtype=torch.int8)))


def test_a_workspace_beyond_32_bits_is_cut(recorder):
    needed = decode_workspace_size(BATCH, Q_LEN, HEADS, 300)
    huge = torch.empty(2**31, dtype=torch.int8)
    for _ in range(2):
        tsmla_decode(**inputs(workspace_buffer=huge))
        workspace = recorder.launches[-1][9]
        assert workspace.numel() == needed and workspace.data_ptr() == huge.data_ptr()


def test_workspace_size(recorder):
    assert tsmla.decode_workspace_size is decode_workspace_size
    assert decode_workspace_size(128, 1, 128) <= SMS * 128 * 8 * 513 * 4
    assert decode_workspace_size(1, 1, 16, 1024) < decode_workspace_size(1, 1, 16, 100000)
    assert decode_workspace_size(0, 1, 16) == 0
    with pytest.raises(ArgumentError, match="^decode_workspace_size: heads is a str; it must be a Python integer"):
        decode_workspace_size(1, 1, "16")


@pytest.mark.parametrize("device", [-1, 10**5, 10**30, True, "cpu", "gpu", 0.0, [0], torch.device("meta")])
def test_workspace_size_on_what_is_no_cuda_device(device):
    with pytest.raises(ArgumentError, match="^decode_workspace_size: device is .*; it must be a CUDA device, such as"):
        decode_workspace_size(1, 1, 16, device=device)


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:3", torch.device("cuda", 1)])
def test_workspace_size_where_torch_has_no_gpu(device, monkeypatch):
    monkeypatch.setattr(checks, "_arch_by_index", {})
    with pytest.raises(UnsupportedError, match="^decode_workspace_size: torch cannot use cuda.* ask where the decode"):
        decode_workspace_size(1, 1, 16, device=device)
    assert decode_workspace_size(0, 1, 16, device=device) == 0


def test_what_is_no_cuda_tensor_is_refused():
    with pytest.raises(ArgumentError, match="tsmla_decode: query is a list; it must be a CUDA tensor"):
        tsmla_decode(**inputs(query=[1.0]))
    with pytest.raises(ArgumentError, match="tsmla_decode: query is on cpu; it must be a CUDA tensor"):
        tsmla_decode(**inputs())


LENGTHS = ints(1, 2, 3)
WRONG = {
    "query of three dimensions": (
        {"query": bf16(BATCH, HEADS, 576)},
        "query has shape [3, 4, 576]; it must be [batch, q_len, heads, 576]",
    ),
    "query width": (
        {"query": bf16(3, 2, 4, 512)},
        "query has shape [3, 2, 4, 512]; it must be [batch, q_len, heads, 576]",
    ),
    "query dtype": ({"query": bf16(3, 2, 4, 576).float()}, "query is torch.float32; accepted: torch.bfloat16"),
    "query with gaps": ({"query": bf16(3, 2, 8, 576)[:, :, ::2]}, "query has shape [3, 2, 4, 576] and strides"),
    "query address": (
        {"query": torch.zeros(BATCH * Q_LEN * HEADS * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 2, 4, 576)},
        "query starts at address",
    ),
    "cache no tensor": ({"kv_cache": None}, "kv_cache is a NoneType; it must be a tensor on cpu"),
    "cache elsewhere": ({"kv_cache": bf16(2, 64, 576).to("meta")}, "kv_cache is on meta but query is on cpu"),
    "cache dtype": ({"kv_cache": bf16(2, 64, 576).half()}, "kv_cache is torch.float16; accepted: torch.bfloat16"),
    "cache heads": (
        {"kv_cache": bf16(2, 2, 64, 576)},
        "kv_cache has shape [2, 2, 64, 576]; it must be [pages, page_size, 576] or [pages, 1, page_size, 576]",
    ),
    "cache width": ({"kv_cache": bf16(2, 64, 512)}, "kv_cache has shape [2, 64, 512]; it must be"),
    "cache of two dimensions": ({"kv_cache": bf16(64, 576)}, "kv_cache has shape [64, 576]; it must be"),
    "no pages": ({"kv_cache": bf16(0, 64, 576)}, "kv_cache has shape [0, 64, 576]; it must have at least one page"),
    "page size": ({"kv_cache": bf16(2, 48, 576)}, "kv_cache has pages of 48 keys; accepted: (16, 32, 64, 128)"),
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
    "workspace elsewhere": (
        {"workspace_buffer": torch.zeros(FORMULA, dtype=torch.int8, device="meta")},
        "workspace_buffer is on meta but query is on cpu",
    ),
    "no workspace": ({"workspace_buffer": None}, "workspace_buffer is a NoneType"),
    "table dtype": (
        {"block_tables": torch.zeros(BATCH, WIDTH, dtype=torch.int64)},
        "block_tables is torch.int64; accepted: torch.int32",
    ),
    "table rows": (
        {"block_tables": torch.zeros(2, WIDTH, dtype=torch.int32)},
        "block_tables has shape [2, 6]; it must be [3, width]",
    ),
    "table without columns": (
        {"block_tables": torch.zeros(3, 0, dtype=torch.int32)},
        "block_tables has shape [3, 0]; it must have at least one column",
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
    "lengths without sign": (
        {"seq_lens": LENGTHS.view(torch.uint32)},
        "seq_lens is torch.uint32; accepted: torch.int32, torch.int64",
    ),
    "global lengths with gaps": (
        {"causal_seqs": ints(1, 2, 3, 4, 5, 6)[::2]},
        "causal_seqs has shape [3] and strides (2,)",
    ),
    "table without sign": (
        {"block_tables": torch.zeros(BATCH, WIDTH, dtype=torch.uint32)},
        "block_tables is torch.uint32; accepted: torch.int32",
    ),
    "visible without sign": (
        {"local_visible_lens": torch.zeros(3, 2, dtype=torch.uint32)},
        "local_visible_lens is torch.uint32; accepted: torch.int32",
    ),
    "visible elsewhere": (
        {"local_visible_lens": torch.zeros(3, 2, dtype=torch.int32, device="meta")},
        "local_visible_lens is on meta but query is on cpu",
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
    "out elsewhere": ({"out": bf16(3, 2, 4, 512).to("meta")}, "out is on meta but query is on cpu"),
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
    "huge lse base": ({"lse_base": 10**400}, "lse_base is a number of more than 20 digits, beyond what a float holds"),
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
    "sinks on another device": ({"sinks": torch.zeros(HEADS, device="meta")}, "sinks"),
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


def test_integers_of_other_types_are_integers(recorder):
    integers = {"max_seq_len": 300, "window_left": 5, "cp_world": 2, "cp_rank": 1, "cp_interleave_size": 16}
    for name, value in integers.items():
        tsmla_decode(**inputs(causal_seqs=LENGTHS.clone(), **{**integers, name: np.int64(value)}))
        given = recorder.launches[-1][13:17]
        assert given == (5, 2, 1, 16) and all(type(number) is int for number in given)


def test_what_no_kernel_exists_for(recorder, monkeypatch):
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="^tsmla_decode: kv_lora_rank and qk_rope_head_dim are 256 and 64; "):
            tsmla_decode(**inputs(kv_lora_rank=256))
        with pytest.raises(UnsupportedError, match="^tsmla_decode: kv_lora_rank and qk_rope_head_dim are 512 and 0; "):
            tsmla_decode(**inputs(qk_rope_head_dim=0))
        tsmla_decode(**inputs())
    monkeypatch.setattr(support, "DECODE_DTYPES", {Arch.SM90A: (Dtype.FP16,)})
    resolve.forget()
    with pytest.raises(UnsupportedError, match="^tsmla_decode: decode for sm_90a takes fp16, not bf16"):
        tsmla_decode(**inputs())
    monkeypatch.setattr(support, "DECODE_DTYPES", {Arch.SM100A: (Dtype.FP16,)})
    with pytest.raises(UnsupportedError, match="no kernel for sm_90a yet; it exists for sm_100a"):
        tsmla_decode(**inputs())


TENSORS = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "causal_seqs", "local_visible_lens")


def all_tensors() -> dict:
    return inputs(
        causal_seqs=LENGTHS.clone(), local_visible_lens=torch.zeros(BATCH, Q_LEN, dtype=torch.int32),
        out=bf16(BATCH, Q_LEN, HEADS, 512),
    )  # fmt: skip


@pytest.mark.parametrize("name", (*TENSORS, "out"))
@pytest.mark.parametrize("case", ODD)
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name):
    make, message = ODD[case]
    given = all_tensors()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {name} {message.format(name=name)}"):
        tsmla_decode(**{**given, name: make(given[name])})
    assert recorder.launches == []


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_read_where_no_gradient_is_asked_for(recorder, mode):
    given = inputs()
    with mode():
        tsmla_decode(**{**given, "query": torch.nn.Parameter(given["query"])})
    assert len(recorder.launches) == 1


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
