"""tsmla_decode without a GPU: caches whose rows have scales, and the queries that they take.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import re

import other_facts
import pytest
import torch
from decode_calls import BATCH, HEADS, PAGE, PAGES, Q_LEN, bf16, inputs
from launches import processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.operators.decode import tsmla_decode

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def query(*outer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(*outer, 512, dtype=E4M3), bf16(*outer, 64), torch.ones(outer)


def cache(page: int = PAGE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(PAGES, page, 512, dtype=E4M3), bf16(PAGES, page, 64), torch.ones(PAGES, page)


def scaled(**changes) -> dict:
    return inputs(**{"query": query(BATCH, Q_LEN, HEADS), "kv_cache": cache(), **changes})


def test_three_tensors_each_are_launched_as_they_are(recorder):
    given = scaled()
    for _ in range(2):
        out = tsmla_decode(**given)
        launch = recorder.launches.pop()
        assert launch[:2] == given["query"][:2] and launch[2] is given["kv_cache"][0]
        assert launch[12] is given["query"][2] and launch[13:15] == given["kv_cache"][1:]
        assert out.dtype == torch.bfloat16 and out.shape == (BATCH, Q_LEN, HEADS, 512)
    row = ROWS["snapmla"]
    assert recorder.variants == [DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, False, row)]


def test_bytes_views_and_one_scale_of_all_heads(recorder):
    rows = torch.zeros(PAGES, PAGE, 640, dtype=torch.uint8)
    latent, rope, _ = query(BATCH, Q_LEN, HEADS)
    scales = torch.ones(BATCH, Q_LEN, 1)
    views = rows[..., :512], rows[..., 512:].view(torch.bfloat16), torch.ones(PAGES, 2 * PAGE)[:, ::2]
    tsmla_decode(**scaled(query=(latent, rope, scales), kv_cache=views))
    launch = recorder.launches[0]
    assert launch[2].dtype == E4M3 and launch[2].data_ptr() == rows.data_ptr() and launch[2].stride(1) == 640
    assert launch[12].shape == (BATCH, Q_LEN, HEADS) and launch[12].data_ptr() == scales.data_ptr()


def test_a_pack(recorder):
    given = scaled(query=query(5, HEADS), cum_seq_lens_q=torch.tensor([0, 1, 2, 5], dtype=torch.int32), max_q_len=3)
    tsmla_decode(**given)
    launch = recorder.launches[0]
    assert launch[12].shape == (1, 5, HEADS) and launch[12].data_ptr() == given["query"][2].data_ptr()


@pytest.mark.parametrize("pieces", [False, True])
def test_a_bf16_query_is_quantised_first(recorder, pieces):
    """In a launch of its own, whose results decode takes, with the same PDL."""
    whole = bf16(BATCH, Q_LEN, HEADS, 576)
    given = scaled(query=(whole[..., :512], whole[..., 512:]) if pieces else whole, enable_pdl=True)
    tsmla_decode(**given)
    quantised, launch = recorder.launches
    assert [variant.family for variant in recorder.variants] == ["quantize_q", "decode"]
    assert quantised[0].data_ptr() == whole.data_ptr() and quantised[-2:] == (1, 1)
    for made, taken in zip(quantised[2:5], (*launch[:2], launch[12]), strict=True):
        assert made.data_ptr() == taken.data_ptr() and made.shape == taken.shape and made.dtype == taken.dtype


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
def test_rows_of_656_bytes_are_one_tensor(recorder, dtype, flat):
    """Bytes or elements, pages apart, query in one or two pieces; nothing else but what a plain cache has."""
    cache = torch.zeros(PAGES, PAGE + 1, 656, dtype=dtype)[:, :PAGE]
    whole = bf16(BATCH, Q_LEN, HEADS, 576)
    for query in (whole, (whole[..., :512], whole[..., 512:])):
        out = tsmla_decode(**inputs(query=query, kv_cache=cache[:, None] if flat else cache))
        launch = recorder.launches.pop()
        assert launch[2].dtype == E4M3 and launch[2].shape == (PAGES, PAGE, 656)
        assert launch[2].data_ptr() == cache.data_ptr() and launch[2].stride() == cache.stride()
        assert launch[12:15] == (None, None, None) and out.dtype == torch.bfloat16
    row = ROWS["fp8_ds_mla"]
    assert set(recorder.variants) == {DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, False, row)}


REFUSED = {
    "a query of 8 bits in one tensor": (
        {"query": torch.zeros(BATCH, Q_LEN, HEADS, 576, dtype=E4M3)},
        "query is one tensor, and kv_cache has a scale for each key; it must be bf16 or (q_nope, q_pe, query_scales)",
    ),
    "a query without scales": (
        {"query": query(BATCH, Q_LEN, HEADS)[:2]}, "query is a tuple of 2, and kv_cache has a scale for each key"
    ),
    "scales for a plain cache": (
        {"kv_cache": torch.zeros(PAGES, PAGE, 576, dtype=E4M3)}, "query is a tuple of 3, and kv_cache is not"
    ),
    "no scale_cache": ({"kv_cache": (*cache()[:2], None)}, "kv_cache is a tuple without the third piece"),
    "an e4m3 rope": (
        {"kv_cache": (cache()[0], cache()[1].to(E4M3), cache()[2])}, "kv_cache[1] is torch.float8_e4m3fn; accepted"
    ),
    "whole rows": (
        {"kv_cache": (torch.zeros(PAGES, PAGE, 576, dtype=E4M3), *cache()[1:])}, "kv_cache[0] has shape [10, 64, 576]"
    ),
    "scales of other pages": (
        {"kv_cache": (*cache()[:2], torch.ones(PAGES, PAGE + 1))}, "kv_cache[2] has shape [10, 65]"
    ),
    "scales of other heads": (
        {"query": (*query(BATCH, Q_LEN, HEADS)[:2], torch.ones(BATCH, Q_LEN, 3))}, "query[2] has shape [3, 2, 3]"
    ),
    "a bf16 cache of 656": (
        {"query": bf16(BATCH, Q_LEN, HEADS, 576), "kv_cache": bf16(PAGES, PAGE, 656)},
        "kv_cache has shape [10, 64, 656]; it must be [pages, page_size, 576] or [pages, 1, page_size, 576]",
    ),
    "bytes of another width": (
        {"query": bf16(BATCH, Q_LEN, HEADS, 576), "kv_cache": torch.zeros(PAGES, PAGE, 576, dtype=torch.uint8)},
        "kv_cache is torch.uint8; accepted: torch.bfloat16",
    ),
    "scales beside rows that hold theirs": (
        {"kv_cache": torch.zeros(PAGES, PAGE, 656, dtype=E4M3)}, "query is a tuple of 3, and kv_cache is not"
    ),
    "rows of 656 bytes among three": (
        {"kv_cache": (torch.zeros(PAGES, PAGE, 656, dtype=E4M3), *cache()[1:])}, "kv_cache[0] has shape [10, 64, 656]"
    ),
    "gaps between rows of 656 bytes": (
        {
            "query": bf16(BATCH, Q_LEN, HEADS, 576),
            "kv_cache": torch.zeros(PAGES, PAGE, 672, dtype=torch.uint8)[..., :656],
        },
        "kv_cache has strides (43008, 672, 1)",
    ),
    "rows of odd strides": (
        {"kv_cache": (torch.zeros(PAGES, PAGE, 520, dtype=E4M3)[..., :512], *cache()[1:])},
        "kv_cache[0] has strides (33280, 520, 1) of 1-byte elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(recorder, changes, message):
    """On the first call of a kind, and after a right one."""
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
            tsmla_decode(**scaled(**changes))
        assert not recorder.launches
        tsmla_decode(**scaled())
        recorder.launches.clear()


def test_an_architecture_without_the_kernel_says_so(recorder, monkeypatch):
    other_facts.change(monkeypatch, Arch.SM90A, decode_rows={})
    with pytest.raises(UnsupportedError, match="decode of e4m3 for sm_90a reads cache rows of latent e4m3 512, rope"):
        tsmla_decode(**scaled())


@pytest.mark.parametrize("dtype", [torch.float16, E4M3, torch.float8_e5m2])
def test_a_query_of_another_dtype_for_rows_of_656_bytes(recorder, dtype):
    message = "(a float32 scale for every 128, in the row), rope bf16 64, which take a query of bf16"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        tsmla_decode(**inputs(dtype, kv_cache=torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8)))


def test_an_architecture_without_decode_of_656_bytes_says_so(recorder, monkeypatch):
    other_facts.change(monkeypatch, Arch.SM90A, decode_rows={})
    cache = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="decode of bf16 for sm_90a reads cache rows of latent bf16 512,"):
        tsmla_decode(**inputs(kv_cache=cache))
