"""tsmla_decode without a GPU: what it accepts, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import tsmla
from another_gpu import on_another_gpu
from decode_calls import BATCH, FORMULA, HEADS, LENGTHS, PAGE, PAGES, Q_LEN, WIDTH, bf16, inputs, ints
from launches import SMS, processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.identity.call import DECODE
from tsmla.identity.plan import plan_decode
from tsmla.identity.row_format import latent_row
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.loading import resolve
from tsmla.operators import checks
from tsmla.operators.decode import tsmla_decode
from tsmla.operators.workspace import decode_workspace_size


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


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
    assert recorder.variants == [DecodeVariant(Arch.SM90A, ours, out, flags[0])]
    assert recorder.launches[0][-1] == flags[1]
    assert (result[0] if flags[0] else result).dtype == checks_dtype(out)


def checks_dtype(dtype: Dtype) -> torch.dtype:
    return checks.TORCH_DTYPE_OF[dtype]


def test_the_kernel_gets_its_arguments_in_contract_order(recorder):
    visible = torch.zeros(BATCH, Q_LEN, dtype=torch.int32)
    given = inputs(
        causal_seqs=ints(2, 4, 6),
        local_visible_lens=visible,
        window_left=7,
        cp_world=2,
        cp_rank=1,
        cp_interleave_size=16,
        output_scale=np.float32(0.5),
        causal_mask=False,
    )
    out, lse = tsmla_decode(**given, return_lse=True)
    (arguments,) = recorder.launches
    expected = [given[n] for n in ("query", "kv_cache", "block_tables", "seq_lens", "causal_seqs")]
    expected += [arguments[6], visible, arguments[8], out, lse]
    expected.insert(1, arguments[1])
    whole = torch.from_dlpack(arguments[1])
    assert whole.shape == (0, 0, 0, 64) and whole.dtype == torch.bfloat16
    assert all(got is want for got, want in zip(arguments, expected, strict=False))
    workspace = arguments[11]
    assert workspace.dtype == torch.int8 and workspace.data_ptr() == given["workspace_buffer"].data_ptr()
    workers = plan_decode(Arch.SM90A, SMS, BATCH, Q_LEN, HEADS, 300).workers
    assert arguments[12:] == (None, None, None, 0.125, 0.5, 0, 7, 2, 1, 16, 0, 1.0, 0, Q_LEN, PAGE, workers, 0)
    floats = *arguments[15:17], arguments[23]
    assert all(type(value) is float for value in floats)
    assert all(type(value) is int for value in (*arguments[17:23], *arguments[24:]))
    assert out.shape == (BATCH, Q_LEN, HEADS, 512) and out.is_contiguous()
    assert lse.shape == (BATCH, Q_LEN, HEADS) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_lengths_stand_in_for_what_is_not_given(recorder):
    given = inputs()
    tsmla_decode(**given)
    (arguments,) = recorder.launches
    assert arguments[4] is given["seq_lens"] is arguments[5]
    spans, visible, sinks = map(torch.from_dlpack, arguments[6:9])
    assert spans.shape == (0,) and spans.dtype == torch.int32
    assert visible.shape == (0, 0) and visible.dtype == torch.int32
    assert sinks.shape == (0,) and sinks.dtype == torch.float32
    assert arguments[10] is None and arguments[17:23] == (1, -1, 1, 0, 1, 0)


def test_lengths_of_64_bits_are_narrowed_to_the_nearest(recorder):
    lengths = torch.tensor([5, 2**32 + 3, -(2**32) + 7], dtype=torch.int64)
    bounds = torch.tensor([2**63 - 1, -(2**63), 2**31 - 1], dtype=torch.int64)
    tsmla_decode(**inputs(seq_lens=lengths, causal_seqs=bounds))
    (arguments,) = recorder.launches
    assert arguments[4].dtype == arguments[5].dtype == torch.int32
    assert arguments[4].tolist() == [5, 2**31 - 1, 0] and arguments[5].tolist() == [2**31 - 1, 0, 2**31 - 1]


def test_one_length_of_64_bits_with_an_odd_stride(recorder):
    lengths = torch.tensor([9, 1, 8], dtype=torch.int64)[::2][1:]
    given = inputs(query=bf16(1, 1, 1, 576), block_tables=torch.zeros(1, 1, dtype=torch.int32), seq_lens=lengths)
    tsmla_decode(**given)
    assert recorder.launches[0][4].tolist() == [8]


def test_caches_of_four_dimensions_and_free_page_strides(recorder):
    cache = torch.zeros(PAGES, 3, PAGE, 576, dtype=torch.bfloat16)
    for given in (cache[:, 1], cache[:, 1:2]):
        tsmla_decode(**inputs(kv_cache=given))
        got = recorder.launches[-1][2]
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
        assert recorder.launches[-1][9] is out


def test_a_natural_lse_can_be_asked_for(recorder):
    """The kernel multiplies logarithms of 2 by what it is given."""
    for base in (2, 2.0, math.e):
        tsmla_decode(**inputs(), return_lse=True, lse_base=base)
    assert [launch[23] for launch in recorder.launches] == [1.0, 1.0, math.log(2)]


def test_a_cache_without_pages_is_read_as_one_of_zeros(recorder):
    """No tensor map can be made of no memory. A page that a cache does not have reads as zeros, too."""
    tsmla_decode(**inputs(kv_cache=bf16(0, 64, 576)))
    (arguments,) = recorder.launches
    assert arguments[2].shape == (1, 64, 576) and not arguments[2].any()
    assert (arguments[3] == -1).all(), "no entry names the page that stands for the cache"


def test_a_table_without_columns_reaches_the_kernel(recorder):
    tables = torch.zeros(BATCH, 0, dtype=torch.int32)
    tsmla_decode(**inputs(block_tables=tables))
    assert recorder.launches[0][3] is tables


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for call in range(1, 4):
        tsmla_decode(**inputs(output_scale=float(call)))
    assert len(recorder.variants) == 1 and [launch[16] for launch in recorder.launches] == [1.0, 2.0, 3.0]
    tsmla_decode(**inputs(), return_lse=True)
    tsmla_decode(**inputs(), enable_pdl=True)
    assert [v.lse for v in recorder.variants[1:]] == [True, False]
    assert [launch[-1] for launch in recorder.launches] == [0, 0, 0, 0, 1]
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
        {"query": (bf16(BATCH, Q_LEN, HEADS, 512), bf16(BATCH, Q_LEN, HEADS, 64))},
        {"query": bf16(BATCH, Q_LEN, 2 * HEADS, 576)[:, :, ::2]},
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
        {"batch_invariant": True},
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
        workspace = recorder.launches[-1][11]
        assert workspace.numel() == needed and workspace.dtype == dtype
    message = f"tsmla_decode: workspace_buffer has {needed - 1} bytes; this call needs {needed}"
    with pytest.raises(ArgumentError, match=message):
        tsmla_decode(**inputs(workspace_buffer=torch.zeros(needed - 1, dtype=torch.int8)))


def test_a_workspace_beyond_32_bits_is_cut(recorder):
    needed = decode_workspace_size(BATCH, Q_LEN, HEADS, 300)
    huge = torch.empty(2**31, dtype=torch.int8)
    for _ in range(2):
        tsmla_decode(**inputs(workspace_buffer=huge))
        workspace = recorder.launches[-1][11]
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


def test_integers_of_other_types_are_integers(recorder):
    integers = {"max_seq_len": 300, "window_left": 5, "cp_world": 2, "cp_rank": 1, "cp_interleave_size": 16}
    for name, value in integers.items():
        tsmla_decode(**inputs(causal_seqs=LENGTHS.clone(), **{**integers, name: np.int64(value)}))
        given = recorder.launches[-1][18:22]
        assert given == (5, 2, 1, 16) and all(type(number) is int for number in given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_read_where_no_gradient_is_asked_for(recorder, mode):
    given = inputs()
    with mode():
        tsmla_decode(**{**given, "query": torch.nn.Parameter(given["query"])})
    assert len(recorder.launches) == 1


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(("dtype", "ours"), [(torch.bfloat16, Dtype.BF16), (torch.float8_e4m3fn, Dtype.E4M3)])
def test_rows_without_a_rope_piece(recorder, dtype, ours, flags):
    """qk_rope_head_dim tells them: query and cache have 512 columns, and the kernel gets None for the rope piece."""
    given = latent_inputs(dtype)
    tsmla_decode(**given, return_lse=flags[0], enable_pdl=flags[1])
    tsmla_decode(**given | {"kv_cache": given["kv_cache"][:, None]}, return_lse=flags[0], enable_pdl=flags[1])
    assert recorder.variants == [DecodeVariant(Arch.SM90A, ours, Dtype.BF16, flags[0], latent_row(ours))] * 2
    for launch in recorder.launches:
        names = dict(zip((x.name for x in DECODE.arguments), launch, strict=True))
        assert names["q_pe"] is None and names["kv_cache"].shape == (PAGES, PAGE, 512)


def latent_inputs(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    query, cache = bf16(BATCH, Q_LEN, HEADS, 512).to(dtype), bf16(PAGES, PAGE, 512).to(dtype)
    return inputs(dtype, **{"query": query, "kv_cache": cache, "qk_rope_head_dim": 0, **changes})


def test_pages_of_few_keys_and_chosen_keys_without_a_rope_piece_are_gathered(recorder):
    tsmla_decode(**latent_inputs(kv_cache=bf16(PAGES, 4, 512)))
    indices = torch.zeros(BATCH, Q_LEN, 7, dtype=torch.int32)
    lists = dict.fromkeys(("block_tables", "seq_lens", "max_seq_len"))
    tsmla_decode(**latent_inputs(indices=indices, **lists))
    wanted = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, latent_row(Dtype.BF16), gathers=True)
    assert recorder.variants == [wanted] * 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": bf16(BATCH, Q_LEN, HEADS, 576)}, r"query has shape \[3, 2, 4, 576\]; it must be .*512"),
        ({"kv_cache": bf16(PAGES, PAGE, 576)}, r"kv_cache has shape .*576\]; it must be .*512"),
        (
            {"query": (bf16(BATCH, Q_LEN, HEADS, 512), bf16(BATCH, Q_LEN, HEADS, 64))},
            r"query\[1\] is given; rows of latent bf16 512 have no rope piece",
        ),
        ({"qk_rope_head_dim": 64}, r"query has shape .*512\]; it must be .*576"),
        (
            {"query": bf16(BATCH, Q_LEN, HEADS, 576), "qk_rope_head_dim": 64},
            r"kv_cache has shape .*512\]; it must be .*576",
        ),
    ],
)
def test_what_does_not_fit_rows_without_a_rope_piece(recorder, changes, text):
    for _ in range(2):
        with pytest.raises(ArgumentError, match=text):
            tsmla_decode(**latent_inputs(**changes))
        tsmla_decode(**latent_inputs())


def test_rows_without_a_rope_piece_in_another_dtype(recorder):
    with pytest.raises(UnsupportedError, match="reads cache rows of .*, not of latent e5m2 512"):
        tsmla_decode(**latent_inputs(torch.float8_e5m2))
