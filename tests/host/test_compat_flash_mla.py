"""FlashMLA's face: what it launches is what tsmla_decode called directly launches; results as FlashMLA gives them."""

from __future__ import annotations

import math

import decode_calls
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from launches import ROOM, alike, distinct, launched, place_of, processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.compat import flash_mla
from tsmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from tsmla.loading import resolve
from tsmla.operators import checks, workspace
from tsmla.operators.decode import tsmla_decode

BATCH, S_Q, HEADS, PAGES, PAGE, WIDTH = 3, 2, 4, 10, 64, 6
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def inputs(dtype: torch.dtype = torch.bfloat16, s_q: int = S_Q, page: int = PAGE, **changes) -> dict:
    metadata, splits = get_mla_metadata()
    given = {
        "q": distinct(BATCH, s_q, HEADS, 576, dtype=dtype),
        "k_cache": distinct(PAGES, page, 1, 576, dtype=dtype),
        "block_table": torch.arange(BATCH * WIDTH, dtype=torch.int32).view(BATCH, WIDTH) % PAGES,
        "cache_seqlens": torch.tensor([1, 200, 0], dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "num_splits": splits,
    }
    return {**given, **changes}


def directly(face: dict, **changes) -> dict:
    """The operator's arguments that mean the same."""
    page = face["k_cache"].shape[1]
    given = {
        "query": face["q"],
        "kv_cache": face["k_cache"][:, :, 0],
        "workspace_buffer": ROOM,
        "block_tables": face["block_table"],
        "seq_lens": face["cache_seqlens"],
        "max_seq_len": WIDTH * page,
        "softmax_scale": 576**-0.5,
        "causal_mask": False,
        "return_lse": True,
        "lse_base": math.e,
    }
    return decode_calls.inputs(**{**given, **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("chosen", [False, True])
def test_rows_without_rope_parts(recorder, dtype, chosen):
    """Query and cache of 512 columns; the factor of the scores follows from these."""
    rows = {
        "q": distinct(BATCH, S_Q, HEADS, 512, dtype=dtype),
        "k_cache": distinct(PAGES, PAGE, 1, 512, dtype=dtype),
    }
    face, operator = inputs(dtype, **rows), {"qk_rope_head_dim": 0, "softmax_scale": 512**-0.5}
    if chosen:
        indices = torch.arange(BATCH * S_Q * 5, dtype=torch.int32).view(BATCH, S_Q, 5)
        face |= {"block_table": None, "cache_seqlens": None, "indices": indices}
        lists = dict.fromkeys(("block_tables", "seq_lens", "max_seq_len"))
        operator |= {**lists, "indices": indices, "causal_mask": True}
    compare(recorder, face, **operator)


def compare(recorder: Recorder, face: dict, **operator) -> None:
    _, got, variant = launched(recorder, lambda: flash_mla_with_kvcache(**face))
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**directly(face, **operator)))
    assert variant == wanted
    alike(got, want, any_workspace=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=some.sampled_from([torch.bfloat16, torch.float16, *EIGHT_BITS]),
    s_q=some.integers(1, 3),
    page=some.sampled_from([16, 64, 128]),
    scale=some.none() | some.floats(0.01, 1.0),
    causal=some.booleans(),
    is_fp8=some.sampled_from(["left out", None, "true"]),
    descale_q=some.none() | some.floats(0.1, 4.0),
    descale_k=some.none() | some.floats(0.1, 4.0),
    as_tensor=some.booleans(),
    sink=some.booleans(),
    legacy=some.none() | some.booleans(),
    invariant=some.booleans(),
)
def test_it_launches_what_the_operator_does(
    recorder, dtype, s_q, page, scale, causal, is_fp8, descale_q, descale_k, as_tensor, sink, legacy, invariant
):
    eight_bits = dtype in EIGHT_BITS
    face = inputs(dtype, s_q, page, causal=causal, softmax_scale=scale)
    if is_fp8 != "left out":
        face["is_fp8_kvcache"] = None if is_fp8 is None else eight_bits
    if legacy is not None:
        face["use_legacy"] = legacy
    if sink:
        face["attn_sink"] = torch.arange(HEADS, dtype=torch.float32)
    if invariant:
        face["enable_batch_invariant"] = True
    factor, out_factor = 576**-0.5 if scale is None else scale, 1.0
    for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
        if eight_bits and value is not None:
            given = torch.tensor([value]) if as_tensor else value
            face[name], value = given, float(given)
            factor, out_factor = factor * value, value if name == "descale_k" else out_factor
    compare(
        recorder,
        face,
        softmax_scale=factor,
        output_scale=out_factor,
        causal_mask=causal,
        sinks=face.get("attn_sink"),
        batch_invariant=invariant,
    )


def test_the_first_version_s_positional_call(recorder):
    """414a2f3: two tensors of metadata, which are not read."""
    face = inputs()
    metadata = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(BATCH + 1, dtype=torch.int32)
    arguments = [face[n] for n in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")]
    _, got, _ = launched(recorder, lambda: flash_mla_with_kvcache(*arguments, *metadata, 0.25, True))
    _, want, _ = launched(recorder, lambda: tsmla_decode(**directly(face, softmax_scale=0.25, causal_mask=True)))
    alike(got, want, any_workspace=True)


def test_metadata_of_any_version_s_arguments():
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    for arguments in ((), (lengths, 128, 1), (lengths, 128, 1, 128, True, 2048)):
        metadata, splits = get_mla_metadata(*arguments)
        assert metadata is not None and splits is None
    assert get_mla_metadata(cache_seqlens=lengths)[1] is None


@pytest.mark.parametrize("s_q", [1, 3])
def test_results_have_flashmla_s_layout_and_empty_rows(recorder, monkeypatch, s_q):
    """The kernel's LSE is base 2, [batch, s_q, heads], -inf where there are no keys."""
    base_2 = torch.arange(BATCH * s_q * HEADS, dtype=torch.float32).view(BATCH, s_q, HEADS)
    base_2[2] = -math.inf
    base_2[0, 0, 1] = math.nan

    def kernel(*arguments):
        arguments[place_of("out", "decode")].fill_(2.0)
        arguments[place_of("lse", "decode")].copy_(base_2 * arguments[place_of("lse_factor", "decode")])

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    out, lse = flash_mla_with_kvcache(**inputs(s_q=s_q))
    assert out.shape == (BATCH, s_q, HEADS, 512) and out.dtype == torch.bfloat16 and (out == 2).all()
    assert lse.shape == (BATCH, HEADS, s_q) and lse.dtype == torch.float32 and lse.is_contiguous()
    want = (base_2 * math.log(2)).transpose(1, 2)
    assert (lse[2] == math.inf).all() and lse[0, 1, 0].isnan()
    finite = want.isfinite()
    assert torch.allclose(lse[finite], want[finite], rtol=1e-6)
    assert lse[~finite].isfinite().sum() == 0


@pytest.mark.parametrize("width", [640, 577])
def test_strided_queries_are_copied_where_they_must_be_and_caches_are_not(recorder, width):
    wide = distinct(BATCH, S_Q, HEADS, width)
    pool = distinct(PAGES, PAGE + 1, 1, 576)
    face = inputs(q=wide[..., :576], k_cache=pool[:, :PAGE])
    _, launch, _ = launched(recorder, lambda: flash_mla_with_kvcache(**face))
    assert (launch["query"].data_ptr() == wide.data_ptr()) == (width % 8 == 0)
    assert torch.equal(launch["query"], wide[..., :576])
    cache = launch["kv_cache"]
    assert cache.data_ptr() == pool.data_ptr() and cache.stride() == ((PAGE + 1) * 576, 576, 1)


@pytest.mark.parametrize("lengths", [None, torch.tensor([1, 70, 9], dtype=torch.int32)], ids=["whole", "lengths"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [2, 61])
def test_chosen_keys_launch_what_the_operator_does(recorder, dtype, page, lengths):
    """FlashMLA's callers give None for tables and lengths, or what they have; neither is read."""
    sink = torch.arange(HEADS, dtype=torch.float32)
    face = inputs(dtype, page=page, indices=LISTS, topk_length=lengths, attn_sink=sink, enable_batch_invariant=True)
    if page == 2:
        face |= {"block_table": None, "cache_seqlens": None}
    if dtype is not torch.bfloat16:
        face["descale_k"] = 0.5
    (out, lse), got, variant = launched(recorder, lambda: flash_mla_with_kvcache(**face))
    assert out.shape == (BATCH, S_Q, HEADS, 512) and lse.shape == (BATCH, HEADS, S_Q) and lse.is_contiguous()
    factor = face.get("descale_k", 1.0)
    operator = directly(
        face, block_tables=None, seq_lens=None, max_seq_len=None, indices=LISTS, topk_length=lengths, sinks=sink,
        batch_invariant=True, softmax_scale=576**-0.5 * factor, output_scale=factor, causal_mask=True,
    )  # fmt: skip
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**operator))
    assert variant == wanted and variant.gathers
    alike(got, want, any_workspace=True)


@pytest.mark.parametrize("is_fp8", [None, True])
def test_rows_of_656_bytes_go_with_indices(monkeypatch, is_fp8):
    """What the operator is given; which rows its kernels have is its own to say."""
    given = []
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(workspace, "scratch", lambda *sizes: sizes)
    monkeypatch.setattr(flash_mla, "tsmla_decode", lambda **arguments: given.append(arguments))
    for cache in (SCALED, SCALED.view(torch.float8_e4m3fn)):
        flash_mla_with_kvcache(**inputs(k_cache=cache, indices=LISTS, is_fp8_kvcache=is_fp8))
        assert given[-1]["kv_cache"].shape == (PAGES, PAGE, 656) and given[-1]["indices"] is LISTS
        assert given[-1]["workspace_buffer"][1:] == (BATCH * S_Q, 1, HEADS, 70)
        assert (given[-1]["softmax_scale"], given[-1]["output_scale"]) == (576**-0.5, 1.0)


def test_no_requests_and_no_heads(recorder):
    empty = inputs(
        q=distinct(0, 1, HEADS, 576),
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        cache_seqlens=torch.zeros(0, dtype=torch.int32),
    )
    out, lse = flash_mla_with_kvcache(**empty)
    assert out.shape == (0, 1, HEADS, 512) and lse.shape == (0, HEADS, 1) and not recorder.launches
    out, lse = flash_mla_with_kvcache(**inputs(q=distinct(BATCH, 1, 0, 576)))
    assert out.shape == (BATCH, 1, 0, 512) and lse.shape == (BATCH, 0, 1)


INTS = torch.zeros(BATCH, dtype=torch.int32)
BYTES = torch.zeros(PAGES, PAGE, 1, 576, dtype=torch.uint8)
LISTS = torch.arange(BATCH * S_Q * 70, dtype=torch.int32).view(BATCH, S_Q, 70) - 30
SCALED = torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8)
REFUSED = [
    ({"extra_k_cache": torch.zeros(1)}, "extra_k_cache is a Tensor; keys come from one cache here"),
    ({"extra_indices_in_kvcache": torch.zeros(1)}, "extra_indices_in_kvcache is a Tensor; keys come from one cache"),
    ({"extra_topk_length": INTS}, "extra_topk_length is a Tensor; keys come from one cache"),
    ({"topk_length": INTS}, "topk_length is given but indices is not"),
    ({"indices": LISTS, "causal": True}, "causal is True beside indices; it must be False: the lists"),
    ({"indices": LISTS[:, :1]}, r"indices has shape \[3, 1, 70\]; it must be \[3, 2, top_k\]"),
    ({"indices": LISTS.long()}, "indices is torch.int64; accepted: torch.int32"),
    ({"indices": 7}, "indices is a int; it must be a tensor"),
    ({"indices": LISTS, "topk_length": INTS[:1]}, r"topk_length has shape \[1\]; it must be \[3, 2\], or \[3\]"),
    ({"indices": LISTS, "extra_k_cache": torch.zeros(1)}, "extra_k_cache is a Tensor; keys come from one cache here"),
    ({"indices": LISTS, "k_cache": distinct(PAGES, PAGE, 1, 512)}, r"k_cache has shape .*, 1, 576\] or .*, 1, 656\]"),
    ({"indices": LISTS, "k_cache": SCALED, "descale_k": 1.0}, "descale_k is 1.0; .* 656 bytes with scales of their"),
    ({"indices": LISTS, "k_cache": SCALED, "is_fp8_kvcache": False}, "is_fp8_kvcache is False and k_cache is torch"),
    ({"kv_format": "v32"}, "kv_format is 'v32'"),
    ({"is_fp8_kvcache": True}, "is_fp8_kvcache is True and k_cache is torch.bfloat16"),
    ({**inputs(torch.float8_e4m3fn), "is_fp8_kvcache": False}, "is_fp8_kvcache is False and k_cache is torch.float8"),
    ({"k_cache": torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8)}, r"k_cache has shape \[10, 64, 1, 656\]"),
    ({"k_cache": BYTES, "is_fp8_kvcache": True}, "is_fp8_kvcache is True and k_cache is torch.uint8"),
    ({"k_cache": distinct(PAGES, PAGE, 2, 576)}, r"k_cache has shape \[10, 64, 2, 576\]; .*page_size, 1, 576"),
    ({"k_cache": distinct(PAGES, PAGE, 576)}, r"k_cache has shape \[10, 64, 576\]"),
    ({"k_cache": distinct(PAGES, 48, 1, 576)}, r"kv_cache has pages of 48 keys.*kv_cache is k_cache here"),
    ({"k_cache": distinct(PAGES, PAGE, 1, 576, dtype=torch.float16)}, "kv_cache is torch.float16.*k_cache here"),
    ({"descale_q": 1.0}, "descale_q is 1.0; it belongs to 8-bit caches"),
    ({"descale_k": torch.ones(1)}, "descale_k is a Tensor; it belongs to 8-bit caches"),
    ({**inputs(torch.float8_e4m3fn), "descale_k": torch.ones(2)}, r"descale_k has shape \[2\].*number, or"),
    ({**inputs(torch.float8_e4m3fn), "descale_q": torch.ones(1, dtype=torch.int32)}, "descale_q .* is torch.int32;"),
    ({**inputs(torch.float8_e4m3fn), "descale_q": "1"}, "descale_q is a str"),
    ({"block_table": None}, "block_table is None; it must be given"),
    ({"cache_seqlens": None}, "cache_seqlens is None; it must be given"),
    ({"block_table": torch.zeros(BATCH, WIDTH)}, "block_tables is torch.float32.*block_tables is block_table here"),
    ({"block_table": INTS}, r"block_table has shape \[3\]"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, r"seq_lens has shape \[2\].*seq_lens is cache_seqlens here"),
    ({"head_dim_v": 448}, "kv_lora_rank and qk_rope_head_dim are 448 and 128.*kv_lora_rank is head_dim_v here"),
    ({"head_dim_v": None}, "head_dim_v is a NoneType"),
    ({"q": distinct(BATCH, HEADS, 576)}, r"q has shape \[3, 4, 576\]"),
    ({"k_cache": distinct(PAGES, PAGE, 1, 448), "q": distinct(BATCH, S_Q, HEADS, 448)}, "are 512 and -64"),
    ({"q": None}, "q is a NoneType; it must be a"),
    ({"softmax_scale": math.nan}, "softmax_scale is nan"),
    ({"softmax_scale": torch.ones(1)}, "softmax_scale is a Tensor; it must be a Python number"),
    ({"causal": 2}, "causal_mask is 2; it must be True or False.*causal_mask is causal here"),
    ({"use_legacy": "yes"}, "use_legacy is 'yes'"),
    ({"enable_batch_invariant": "yes"}, "enable_batch_invariant is 'yes'"),
    ({"attn_sink": torch.zeros(HEADS + 1)}, r"sinks has shape \[5\].*sinks is attn_sink here"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[next(reversed(changes)) for changes, _ in REFUSED])
def test_refusals_name_the_argument(recorder, changes, text):
    with pytest.raises(ArgumentError, match=f"^flash_mla_with_kvcache: .*{text}"):
        flash_mla_with_kvcache(**inputs(**changes))
    assert not recorder.launches


def test_what_does_not_exist_is_told_from_what_is_wrong(recorder):
    with pytest.raises(UnsupportedError):
        flash_mla_with_kvcache(**inputs(extra_k_cache=BYTES))
    with pytest.raises(UnsupportedError):
        flash_mla_with_kvcache(**inputs(head_dim_v=448))


def test_scales_on_the_gpu_are_refused_in_a_capture(recorder, monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    scale = torch.ones(1).as_subclass(OnGpu)
    face = inputs(torch.float8_e4m3fn, descale_k=scale)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    flash_mla_with_kvcache(**face)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="descale_k is a CUDA tensor, and a CUDA graph is being captured"):
        flash_mla_with_kvcache(**face)
