"""tsmla_sparse_prefill without a GPU: it launches what tsmla_decode does with the same lists, in the words of its own.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import decode_calls
import pytest
import torch
from decode_calls import FORMULA, HEADS, ints
from launches import SMS, alike, distinct, launched, place_of, processors
from odd_tensors import ODD
from refusing import Recorder
from torch._dynamo.testing import CompileCounterWithBackend
from tsmla import ArgumentError, UnsupportedError, tsmla_decode, tsmla_sparse_prefill
from tsmla.compat.flash_mla import flash_mla_sparse_fwd
from tsmla.identity.arch import Arch
from tsmla.loading import resolve
from tsmla.operators import chosen_keys, max_logits, workspace

TOKENS, KEYS, TOP_K = 5, 40, 70
E4M3 = torch.float8_e4m3fn
LISTS = torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K) - 30


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    monkeypatch.setattr(chosen_keys, "_every_key", {})
    return recorder


def inputs(dtype: torch.dtype = torch.bfloat16, columns: int = 576, **changes) -> dict:
    given = {
        "query": distinct(TOKENS, HEADS, columns, dtype=dtype),
        "kv": distinct(KEYS, columns, dtype=dtype),
        "indices": LISTS,
        "softmax_scale": 0.125,
    }
    return {**given, **changes}


def directly(call: dict, **changes) -> dict:
    """The operator's arguments that mean the same."""
    kv = call["kv"]
    given = {
        "query": call["query"],
        "kv_cache": kv.unsqueeze(1) if isinstance(kv, torch.Tensor) and kv.ndim == 2 else kv,
        "indices": call["indices"],
        "qk_rope_head_dim": 64,
        "softmax_scale": call["softmax_scale"],
        "lse_base": math.e,
        **dict.fromkeys(("block_tables", "seq_lens", "max_seq_len")),
    }
    return decode_calls.inputs(**{**given, **changes})


ROWS = distinct(KEYS, 576)
CALLS = {
    "rows": ({}, {}),
    "rows of e4m3": (inputs(E4M3), {}),
    "rows without rope parts": (inputs(columns=512), {"qk_rope_head_dim": 0}),
    "rows of 656 bytes": ({"kv": torch.zeros(KEYS, 656, dtype=torch.uint8)}, {}),
    "rows of a wider tensor": ({"kv": distinct(KEYS, 640)[:, :576]}, {}),
    "a paged cache": ({"kv": distinct(4, 61, 576)}, {}),
    "pieces": (
        {"query": (distinct(TOKENS, HEADS, 512), distinct(TOKENS, HEADS, 64)), "kv": (ROWS[:, :512], ROWS[:, 512:])},
        {"kv_cache": (ROWS[:, None, :512], ROWS[:, None, 512:])},
    ),
    "lengths": ({"topk_length": ints(0, 7, -3, 70, 99)}, {}),
    "sinks, base 2": (
        {"sinks": torch.ones(HEADS), "lse_includes_sink": True, "lse_base": 2.0, "output_scale": 0.5},
        {"lse_base": 2.0},
    ),
    "options": ({"batch_invariant": True, "enable_pdl": True}, {}),
}
SHARED = ("topk_length", "sinks", "lse_includes_sink", "output_scale", "batch_invariant", "enable_pdl")


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_it_launches_what_a_decode_does(recorder, case):
    changes, operator = case
    call = {**inputs(), **changes}
    (out, lse), got, variant = launched(recorder, lambda: tsmla_sparse_prefill(**call, return_lse=True))
    operator = {name: call[name] for name in SHARED if name in call} | operator
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**directly(call, **operator), return_lse=True))
    assert variant == wanted and variant.gathers
    alike(got, want, any_workspace=True)
    assert out.shape == (TOKENS, HEADS, 512) and lse.shape == (TOKENS, HEADS)
    assert got["workspace"].numel() == workspace_size(TOKENS, HEADS, TOP_K)


def workspace_size(tokens: int, heads: int, top_k: int) -> int:
    return workspace.plan_decode(Arch.SM90A, SMS, tokens, 1, heads, top_k).workspace_bytes


def test_results_and_a_workspace_that_are_given(recorder):
    given = {
        "out": distinct(TOKENS, HEADS, 512),
        "lse": torch.zeros(HEADS, TOKENS).T,
        "workspace_buffer": torch.zeros(FORMULA, dtype=torch.int8),
    }
    (out, lse), got, _ = launched(recorder, lambda: tsmla_sparse_prefill(**inputs(), **given, return_lse=True))
    assert out is given["out"] and lse is given["lse"]
    assert got["workspace"].data_ptr() == given["workspace_buffer"].data_ptr()
    assert tsmla_sparse_prefill(**inputs(), **given) is out


@pytest.mark.parametrize("tokens, keys", [(0, KEYS), (TOKENS, 0)])
def test_no_tokens_and_no_keys(recorder, tokens, keys):
    call = inputs(query=distinct(tokens, HEADS, 576), kv=distinct(keys, 576), indices=LISTS[:tokens])
    out, lse, largest = tsmla_sparse_prefill(**call, return_lse=True, return_max_logits=True)
    assert out.shape == (tokens, HEADS, 512) and lse.shape == largest.shape == (tokens, HEADS)
    assert (largest == -math.inf).all()
    assert len(recorder.launches) == (tokens > 0)
    for launch in recorder.launches:
        assert launch[-1] == 0


@pytest.mark.parametrize("at_once", [1, 2, TOKENS])
@pytest.mark.parametrize("name", ["rows", "rows without rope parts", "a paged cache", "pieces", "lengths"])
def test_the_largest_logits_are_those_of_chosen_keys(recorder, monkeypatch, name, at_once):
    """However many tokens are computed together, and with NaN in the keys that nobody chose."""
    monkeypatch.setattr(max_logits, "_CHUNK_BYTES", at_once * max_logits._token_bytes(TOP_K, HEADS))
    call = {**inputs(), **CALLS[name][0]}
    rows = call["kv"] if isinstance(call["kv"], torch.Tensor) else torch.cat(call["kv"], -1)
    query = call["query"] if isinstance(call["query"], torch.Tensor) else torch.cat(call["query"], -1)
    rows = rows.flatten(0, -2)
    lists = torch.randint(-10, len(rows) + 10, LISTS.shape, generator=torch.Generator().manual_seed(1)).int()
    call["indices"] = lists
    lengths = call.get("topk_length", ints(*[TOP_K] * TOKENS)).tolist()
    named = [own[: max(0, n)] for own, n in zip(lists.tolist(), lengths, strict=True)]
    chosen = [[i for i in own if 0 <= i < len(rows)] for own in named]
    rows[sorted(set(range(len(rows))) - set().union(*chosen))] = math.nan
    out, lse, largest = tsmla_sparse_prefill(**call, return_lse=True, return_max_logits=True)
    for token, own in enumerate(chosen):
        scores = query[token].double() @ rows[own].double().T * 0.125
        expected = scores.amax(-1) if own else torch.full((HEADS,), -math.inf, dtype=torch.float64)
        assert torch.allclose(largest[token].double(), expected, rtol=1e-5), token
    alone, again = tsmla_sparse_prefill(**call, return_max_logits=True)
    assert alone.shape == out.shape and torch.equal(again, largest) and again.dtype is torch.float32


LATENT = distinct(4, 61, 512, dtype=E4M3)
ROPE, SCALES = distinct(4, 61, 64), torch.arange(1.0, 245.0).view(4, 61)
WHOLE = torch.zeros(4, 61, 656, dtype=torch.uint8)
WHOLE[..., :512] = LATENT.view(torch.uint8)
FOUR_SCALES = SCALES[..., None] + torch.arange(4)
WHOLE[..., 512:528] = FOUR_SCALES.view(torch.uint8)
WHOLE[..., 528:] = ROPE.view(torch.uint8)
NUMBERS = torch.cat((LATENT.float(), ROPE.float()), -1)
IN_THREE = (distinct(TOKENS, HEADS, 512, dtype=E4M3), distinct(TOKENS, HEADS, 64), torch.ones(TOKENS, HEADS))
SPELLED: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "pages with a dimension of 1": (distinct(TOKENS, HEADS, 576), distinct(4, 1, 61, 576), distinct(4, 61, 576)),
    "pages of one key with a dimension of 1": (
        distinct(TOKENS, HEADS, 576), distinct(244, 1, 1, 576), distinct(244, 576)
    ),
    "two tensors with a dimension of 1": (
        distinct(TOKENS, HEADS, 576),
        (distinct(4, 61, 512)[:, None], ROPE),
        torch.cat((distinct(4, 61, 512), ROPE), -1),
    ),
    "rows of 656 bytes": (
        distinct(TOKENS, HEADS, 576),
        WHOLE,
        NUMBERS * torch.cat((FOUR_SCALES.repeat_interleave(128, -1), torch.ones(4, 61, 64)), -1),
    ),
    "three tensors": (IN_THREE, (LATENT, ROPE, SCALES), NUMBERS * SCALES[..., None]),
    "three tensors of bytes": (IN_THREE, (LATENT.view(torch.uint8), ROPE, SCALES), NUMBERS * SCALES[..., None]),
    "three tensors of bytes with a dimension of 1": (
        IN_THREE, (LATENT.view(torch.uint8)[:, None], ROPE, SCALES), NUMBERS * SCALES[..., None]
    ),
}  # fmt: skip
"""Queries, caches as callers may give them, and the numbers of their keys."""


@pytest.mark.parametrize("case", SPELLED.values(), ids=SPELLED)
def test_the_largest_logits_are_those_of_any_cache_that_decodes_take(recorder, case):
    query, kv, numbers = case
    lists = torch.randint(0, 244, LISTS.shape, generator=torch.Generator().manual_seed(1)).int()
    _, largest = tsmla_sparse_prefill(**inputs(query=query, kv=kv, indices=lists), return_max_logits=True)
    tokens = torch.cat([x.double() for x in query[:2]], -1) if type(query) is tuple else query.double()
    keys = numbers.double().view(244, 576)[lists.long()]
    assert torch.allclose(largest.double(), (tokens @ keys.mT * 0.125).amax(-1), rtol=1e-5)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_the_largest_logits_are_float32_s_under_autocast(recorder, traced):
    call = inputs(query=torch.randn(TOKENS, HEADS, 576).bfloat16(), kv=torch.randn(KEYS, 576).bfloat16())
    _, expected = tsmla_sparse_prefill(**call, return_max_logits=True)
    torch._dynamo.reset()
    function = (
        torch.compile(tsmla_sparse_prefill, fullgraph=True, backend="aot_eager") if traced else tsmla_sparse_prefill
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        _, largest = function(**call, return_max_logits=True)
    torch._dynamo.reset()
    assert torch.equal(largest, expected)


def test_the_memory_of_the_largest_logits_counts_queries(recorder, monkeypatch):
    """Lists of one key would let as many tokens be computed together as their queries take hundreds of times more."""
    together, room = [], 2 * HEADS * 576 * 4

    def numbers(query: torch.Tensor, chunk: slice) -> torch.Tensor:
        together.append(query[chunk].numel() * 4)
        return query[chunk].float()

    monkeypatch.setattr(max_logits, "_CHUNK_BYTES", room)
    monkeypatch.setattr(max_logits, "_query_numbers", numbers)
    tsmla_sparse_prefill(**inputs(indices=LISTS[:, :1].contiguous()), return_max_logits=True)
    assert len(together) > 1 and max(together) <= room


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("processors", [1, 2, 7, 16, 78, 114, 132, 148, 204])
def test_what_is_enough_for_any_number_of_tokens(monkeypatch, arch, processors):
    """No list, however long, and no number of tokens needs more; up to 8 rows a head and 128 an SM of an H200."""
    monkeypatch.setattr(workspace, "multiprocessors", lambda device: processors)
    options = list(itertools.product((None, 1, 65, 2048), (False, True), (False, True)))
    for heads in (*range(1, 20), 24, 48, *range(60, 70), 96, *range(120, 132), 200, 256, 512, 513, 1024, 5000):
        room = workspace.enough(torch.device("cuda"), heads)
        assert room == processors * min(8 * heads, 128) * 513 * 4
        for tokens in {1, 2, 7, processors // 2 + 1, processors, 2 * processors + 1, 100_000}:
            for top_k, invariant, wide in options:
                plan = workspace.plan_decode(arch, processors, tokens, 1, heads, top_k, False, invariant, wide)
                assert plan.workspace_bytes <= room, (heads, tokens, top_k, invariant, wide)


WRONG = {
    "requests": (
        {"query": distinct(1, TOKENS, HEADS, 576)},
        r"query has shape \[1, 5, 4, 576\]; it must be \[tokens, h",
    ),
    "columns": (
        {"query": distinct(TOKENS, HEADS, 640)},
        r"query has shape \[5, 4, 640\]; it must be .*, 576\] or .*512",
    ),
    "a piece": (
        {"query": (distinct(TOKENS, HEADS, 512), ROWS)},
        r"query\[1\] has shape \[40, 576\]; it must be .*, 64\]",
    ),
    "no query": ({"query": None}, "query is a NoneType; it must be a tensor"),
    "rows of other columns": ({"kv": distinct(KEYS, 512)}, r"kv has shape \[40, 1, 512\]"),
    "rows of another dtype": ({"kv": distinct(KEYS, 576).half()}, "kv is torch.float16; accepted: torch.bfloat16"),
    "no rows": ({"kv": None}, "kv is a NoneType; it must be a tensor"),
    "one row": ({"kv": distinct(576)}, r"kv has shape \[576\]"),
    "lists of other tokens": ({"indices": LISTS[:2]}, r"indices has shape \[2, 70\]; it must be \[5, top_k\]"),
    "a dimension of heads": ({"indices": LISTS[:, None]}, r"indices has shape \[5, 1, 70\]; it must be \[5, top_k\]"),
    "64-bit lists": ({"indices": LISTS.long()}, "indices is torch.int64; accepted: torch.int32"),
    **{
        f"lists nested as {layout}": (
            {"indices": torch.nested.as_nested_tensor([torch.zeros(4), torch.zeros(3)], layout=layout)},
            "indices is a nested tensor; it must be a tensor",
        )
        for layout in (torch.strided, torch.jagged)
    },
    "no lists": ({"indices": 7}, "indices is a int; it must be a tensor"),
    "lengths": ({"topk_length": ints(1)}, r"topk_length has shape \[1\]; it must be \[5\]"),
    "sinks": ({"sinks": torch.zeros(HEADS + 1)}, r"sinks has shape \[5\]"),
    "a scale": ({"softmax_scale": math.nan}, "softmax_scale is nan"),
    "a base": ({"lse_base": 10.0}, "lse_base is 10.0"),
    "no flag": ({"return_max_logits": 2}, "return_max_logits is 2; it must be True or False"),
    "a small workspace": ({"workspace_buffer": torch.zeros(16, dtype=torch.int8)}, "workspace_buffer has 16 bytes"),
    "an output of other tokens": ({"out": distinct(2, HEADS, 512)}, r"out has shape \[2, 4, 512\]"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(recorder, case):
    changes, text = case
    with pytest.raises(ArgumentError, match=f"^tsmla_sparse_prefill: {text}"):
        tsmla_sparse_prefill(**inputs(**changes))
    assert not recorder.launches


@pytest.mark.parametrize("name", ["query", "kv", "indices", "topk_length", "sinks", "out", "lse"])
@pytest.mark.parametrize("case", ODD)
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name):
    make, message = ODD[case]
    given = inputs(
        topk_length=ints(1, 2, 3, 4, 5), sinks=torch.zeros(HEADS), out=distinct(TOKENS, HEADS, 512),
        lse=torch.zeros(TOKENS, HEADS),
    )  # fmt: skip
    with pytest.raises(ArgumentError, match=f"^tsmla_sparse_prefill: {name} {message.format(name=name)}"):
        tsmla_sparse_prefill(**{**given, name: make(given[name])})
    assert recorder.launches == []


def test_a_query_on_the_cpu_is_refused():
    with pytest.raises(ArgumentError, match="^tsmla_sparse_prefill: query is on cpu; it must be a CUDA tensor"):
        tsmla_sparse_prefill(**inputs())


def test_a_traced_call_is_a_decode_of_any_number_of_tokens(recorder):
    """The workspace is enough for any, so that no size is compared."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    traced = torch.compile(tsmla_sparse_prefill, fullgraph=True, backend=counter)
    for tokens in (5, 7, 9, 6):
        call = inputs(query=distinct(tokens, HEADS, 576), indices=LISTS[:1].expand(tokens, -1).contiguous())
        assert traced(**call).shape == (tokens, HEADS, 512)
        assert recorder.launches[-1][place_of("query", "decode")].shape[0] == tokens
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_a_traced_call_allocates_no_more_than_the_largest_of_eager_calls(recorder):
    """Whatever the number of heads, which may be a symbol: no graph is made for each."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    traced = torch.compile(tsmla_sparse_prefill, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    for heads in (128, 64, 16, 5, 200):
        traced(**inputs(query=distinct(TOKENS, heads, 576)))
        room = recorder.launches[-1][place_of("workspace", "decode")].numel()
        assert workspace_size(100_000, heads, TOP_K) <= room == workspace.enough(torch.device("cuda"), heads) <= 35e6
        frames.add(counter.frame_count)
    assert len(frames) == 1
    torch._dynamo.reset()


def face(**changes) -> dict:
    """Arguments of FlashMLA's function."""
    call = inputs(**{"columns": 576, **{name: changes.pop(name) for name in ("dtype", "columns") if name in changes}})
    given = {"q": call["query"], "kv": call["kv"][:, None], "indices": LISTS[:, None], "sm_scale": 0.125}
    return {**given, **changes}


FACES = {
    "bf16": face(),
    "e4m3 without rope parts": face(dtype=E4M3, columns=512),
    "rows of 656 bytes": face(kv=torch.zeros(KEYS, 1, 656, dtype=torch.uint8)),
    "lengths and sinks": face(topk_length=ints(1, 2, 3, 4, 5), attn_sink=torch.ones(HEADS)),
}


@pytest.mark.parametrize("call", FACES.values(), ids=FACES)
def test_flash_mla_s_face_launches_what_it_does(recorder, call):
    (out, largest, lse), got, variant = launched(recorder, lambda: flash_mla_sparse_fwd(**call))
    operator = {
        "query": call["q"],
        "kv": call["kv"],
        "indices": LISTS,
        "softmax_scale": 0.125,
        "topk_length": call.get("topk_length"),
        "sinks": call.get("attn_sink"),
        "lse": torch.zeros(TOKENS, HEADS),
    }
    _, want, wanted = launched(recorder, lambda: tsmla_sparse_prefill(**operator))
    assert variant == wanted
    alike(got, want, any_workspace=True)
    assert largest is None and out.shape == (TOKENS, HEADS, 512) and lse.shape == (TOKENS, HEADS)
    _, largest, _ = flash_mla_sparse_fwd(**call, return_max_logits=True)
    del operator["lse"]
    assert torch.equal(largest, tsmla_sparse_prefill(**operator, return_max_logits=True)[1])


def test_a_row_without_keys_has_flash_mla_s_lse(recorder, monkeypatch):
    base_2 = torch.arange(TOKENS * HEADS, dtype=torch.float32).view(TOKENS, 1, HEADS)
    base_2[2], base_2[0, 0, 1] = -math.inf, math.nan

    def kernel(*arguments):
        arguments[place_of("lse", "decode")].copy_(base_2 * arguments[place_of("lse_factor", "decode")])

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    _, _, lse = flash_mla_sparse_fwd(**face())
    assert (lse[2] == math.inf).all() and lse[0, 1].isnan()
    want = base_2[:, 0] * math.log(2)
    assert torch.allclose(lse[want.isfinite()], want[want.isfinite()], rtol=1e-6)


def test_strided_queries_of_the_face_are_copied_where_they_must_be(recorder):
    for width in (640, 577):
        wide = distinct(TOKENS, HEADS, width)
        _, got, _ = launched(recorder, lambda wide=wide: flash_mla_sparse_fwd(**face(q=wide[..., :576])))
        assert (got["query"].data_ptr() == wide.data_ptr()) == (width % 8 == 0)


REFUSED = {
    "several key heads": ({"kv": distinct(KEYS, 2, 576)}, r"kv has shape \[40, 2, 576\]; it must be \[s_kv, 1, 576\]"),
    "rows alone": ({"kv": ROWS}, r"kv has shape \[40, 576\]"),
    "lists alone": ({"indices": LISTS}, r"indices has shape \[5, 70\]; it must be \[5, 1, top_k\]"),
    "64-bit lists": ({"indices": LISTS[:, None].long()}, "indices is torch.int64; accepted: torch.int32"),
    "values of 448": ({"d_v": 448}, "d_v is 448; kernels exist for 512"),
    "no d_v": ({"d_v": None}, "d_v is a NoneType"),
    "a query of requests": ({"q": distinct(1, TOKENS, HEADS, 576)}, r"q has shape \[1, 5, 4, 576\]"),
    "no query": ({"q": None}, "q is a NoneType; it must be a"),
    "a scale": ({"sm_scale": math.nan}, "softmax_scale is nan.*softmax_scale is sm_scale here"),
    "sinks": ({"attn_sink": torch.zeros(HEADS + 1)}, r"sinks has shape \[5\].*sinks is attn_sink here"),
    "lengths": ({"topk_length": ints(1)}, r"topk_length has shape \[1\]"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_of_the_face_name_the_argument(recorder, case):
    changes, text = case
    with pytest.raises(ArgumentError, match=f"^flash_mla_sparse_fwd: .*{text}") as refused:
        flash_mla_sparse_fwd(**face(**changes))
    assert not recorder.launches and isinstance(refused.value, UnsupportedError) == ("kernels exist" in text)
