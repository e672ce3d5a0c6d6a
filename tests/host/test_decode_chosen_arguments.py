"""tsmla_decode of chosen keys without a GPU: what it accepts, what it refuses in which words, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math
import re

import numpy as np
import other_facts
import pytest
import torch
from decode_calls import BATCH, FORMULA, HEADS, PAGE, PAGES, Q_LEN, bf16, inputs, ints
from launches import SMS, distinct, place_of, processors
from odd_tensors import FLOATS_ONLY, ODD, far_apart
from refusing import Recorder
from torch._subclasses.fake_tensor import FakeTensorMode
from tsmla import ArgumentError, UnsupportedError, decode_workspace_size
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.operators import chosen_keys
from tsmla.operators.decode import SMALL_PAGE_SIZES, tsmla_decode

TOKENS, TOP_K = BATCH * Q_LEN, 70
LARGEST_INT = 2**31 - 1


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    monkeypatch.setattr(chosen_keys, "_every_key", {})
    return recorder


def lists(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


def chosen(dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": distinct(BATCH, Q_LEN, HEADS, 576, dtype=dtype),
        "indices": lists(BATCH, Q_LEN, TOP_K),
        "block_tables": None,
        "seq_lens": None,
        "max_seq_len": None,
    }
    return inputs(dtype, **{**given, **changes})


def packed(**changes) -> dict:
    """Arguments of a call whose query tokens are packed."""
    return chosen(**{"query": distinct(TOKENS, HEADS, 576), "indices": lists(TOKENS, TOP_K), **changes})


def launch_of(recorder: Recorder, name: str):
    return recorder.launches[-1][place_of(name, "decode")]


@pytest.mark.parametrize("dtype, ours", [(torch.float16, Dtype.FP16), (torch.float8_e5m2, Dtype.E5M2)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_variant_gathers_and_has_an_lse(recorder, dtype, ours, return_lse):
    result = tsmla_decode(**chosen(dtype), return_lse=return_lse)
    (variant,) = recorder.variants
    out = Dtype.BF16 if dtype.itemsize == 1 else ours
    assert variant == DecodeVariant(Arch.SM90A, ours, out, lse=True, gathers=True)
    out, lse = result if return_lse else (result, None)
    assert out.shape == (BATCH, Q_LEN, HEADS, 512)
    assert lse is None or (lse.shape == (BATCH, Q_LEN, HEADS) and lse.dtype == torch.float32)


@pytest.mark.parametrize("form", [chosen, packed])
@pytest.mark.parametrize("given", [False, True], ids=["results made", "results given"])
def test_the_kernel_gets_a_request_of_each_query_token(recorder, form, given):
    call = form(output_scale=0.5, sinks=torch.zeros(HEADS), lse_includes_sink=True, lse_base=math.e)
    shape = call["query"].shape[:-2]
    if given:
        call |= {"out": bf16(*shape, HEADS, 512), "lse": torch.zeros(*shape, 2 * HEADS)[..., ::2]}
    out, lse = tsmla_decode(**call, return_lse=True)
    names = ("query", "block_tables", "seq_lens", "causal_seqs", "out", "lse")
    query, tables, lengths, bounds, launched_out, launched_lse = (launch_of(recorder, name) for name in names)
    assert query.shape == (TOKENS, 1, HEADS, 576) and query.data_ptr() == call["query"].data_ptr()
    assert tables.shape == (TOKENS, TOP_K) and tables.data_ptr() == call["indices"].data_ptr()
    assert lengths.dtype == torch.int32 and lengths.tolist() == [LARGEST_INT] * TOKENS and bounds is lengths
    assert launched_out.shape == (TOKENS, 1, HEADS, 512) and launched_lse.shape == (TOKENS, 1, HEADS)
    assert launched_out.data_ptr() == out.data_ptr() and launched_lse.data_ptr() == lse.data_ptr()
    assert out.shape == (*shape, HEADS, 512) and lse.shape == (*shape, HEADS)
    if given:
        assert out is call["out"] and lse is call["lse"]
    numbers = ("causal", "window_left", "cp_world", "q_len", "entry_keys", "output_scale", "lse_includes_sink")
    assert [launch_of(recorder, name) for name in numbers] == [0, -1, 1, 1, 1, 0.5, 1]
    assert launch_of(recorder, "lse_factor") == math.log(2)
    assert launch_of(recorder, "workers") == plan_decode(Arch.SM90A, SMS, TOKENS, 1, HEADS, TOP_K).workers


def test_pieces_are_views(recorder):
    nope, pe = bf16(BATCH, Q_LEN, HEADS, 512), bf16(BATCH, Q_LEN, HEADS, 64)
    tsmla_decode(**chosen(query=(nope, pe)))
    query, q_pe = launch_of(recorder, "query"), launch_of(recorder, "q_pe")
    assert query.shape == (TOKENS, 1, HEADS, 512) and query.data_ptr() == nope.data_ptr()
    assert q_pe.shape == (TOKENS, 1, HEADS, 64) and q_pe.data_ptr() == pe.data_ptr()
    tsmla_decode(**packed(query=(nope.flatten(0, 1), pe.flatten(0, 1))))
    assert launch_of(recorder, "q_pe").data_ptr() == pe.data_ptr()


def test_what_does_not_lie_as_one_is_copied(recorder):
    query, indices = distinct(Q_LEN, BATCH, HEADS, 576).transpose(0, 1), lists(Q_LEN, BATCH, TOP_K).transpose(0, 1)
    tsmla_decode(**chosen(query=query, indices=indices))
    assert torch.equal(launch_of(recorder, "query")[:, 0], query.flatten(0, 1))
    assert torch.equal(launch_of(recorder, "block_tables"), indices.flatten(0, 1))


def test_lists_may_be_part_of_wider_ones(recorder):
    wide = lists(BATCH, Q_LEN, 2 * TOP_K)
    tsmla_decode(**chosen(indices=wide[..., :TOP_K]))
    tables = launch_of(recorder, "block_tables")
    assert tables.data_ptr() == wide.data_ptr() and tables.stride() == (2 * TOP_K, 1)


@pytest.mark.parametrize("form, given, want", [
    (chosen, ints(5, 70, -3), [5, 5, 70, 70, -3, -3]),
    (chosen, ints(1, 2, 3, 4, 5, 6).view(BATCH, Q_LEN), [1, 2, 3, 4, 5, 6]),
    (chosen, ints(1, 0, 2, 0, 3, 0).view(BATCH, Q_LEN)[:, :1].expand(BATCH, Q_LEN), [1, 1, 2, 2, 3, 3]),
    (packed, ints(1, 2, 3, 4, 5, 6), [1, 2, 3, 4, 5, 6]),
    (packed, torch.tensor([1, 2**40, -(2**40), 4, 5, 6]), [1, LARGEST_INT, 0, 4, 5, 6]),
    (chosen, torch.tensor([7, 8, 9]), [7, 7, 8, 8, 9, 9]),
])  # fmt: skip
def test_lengths_of_lists_are_those_of_query_tokens(recorder, form, given, want):
    tsmla_decode(**form(topk_length=given))
    assert launch_of(recorder, "seq_lens").dtype == torch.int32 and launch_of(recorder, "seq_lens").tolist() == want


def test_one_length_for_the_tokens_of_one_request(recorder):
    for given in (ints(5), ints(5).expand(1, 3)):
        tsmla_decode(**chosen(query=bf16(1, 3, HEADS, 576), indices=lists(1, 3, 7), topk_length=given))
        assert launch_of(recorder, "seq_lens").tolist() == [5, 5, 5]


def test_lengths_of_whole_lists_are_made_once(recorder):
    """Calls launch nothing more, and a captured graph may refer to them. What a capture makes is the graph's."""
    for tokens in (1, 3, 2):
        tsmla_decode(**packed(query=bf16(tokens, HEADS, 576), indices=lists(tokens, 1)))
        assert launch_of(recorder, "seq_lens").tolist() == [LARGEST_INT] * tokens
    assert len({launch[place_of("seq_lens", "decode")].data_ptr() for launch in recorder.launches}) == 1
    assert len(chosen_keys._every_key) == 1


def test_lengths_made_in_a_capture_are_not_kept(recorder, monkeypatch):
    monkeypatch.setattr(chosen_keys, "is_capturing", lambda: True)
    tsmla_decode(**chosen())
    assert launch_of(recorder, "seq_lens").tolist() == [LARGEST_INT] * TOKENS and not chosen_keys._every_key


@pytest.mark.parametrize("real", [False, True], ids=["fake tensors", "real tensors"])
def test_lengths_without_memory_are_not_kept(recorder, real):
    """A dry run under FakeTensorMode leaves later calls what they need."""
    mode, call = FakeTensorMode(allow_non_fake_inputs=real), chosen()
    tried = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) and not real else x for n, x in call.items()}
    with (
        mode,
        pytest.raises(ArgumentError, match="^tsmla_decode: (query|indices) is a FakeTensor without memory"),
    ):
        tsmla_decode(**tried)
    assert not chosen_keys._every_key and not recorder.launches
    tsmla_decode(**call)
    assert launch_of(recorder, "seq_lens").tolist() == [LARGEST_INT] * TOKENS


def test_lengths_are_made_where_lists_are(recorder):
    """Whatever device torch makes tensors on where none is named."""
    call = chosen()
    with torch.device("meta"):
        tsmla_decode(**call)
    assert launch_of(recorder, "seq_lens").tolist() == [LARGEST_INT] * TOKENS


@pytest.mark.parametrize("page_size", [1, 2, 69, 1000])
def test_pages_of_any_size(recorder, page_size):
    pool = bf16(PAGES, page_size + 1, 576)
    tsmla_decode(**chosen(kv_cache=pool[:, :page_size]))
    assert launch_of(recorder, "kv_cache").stride() == ((page_size + 1) * 576, 576, 1)
    tsmla_decode(**chosen(kv_cache=bf16(PAGES, 1, page_size, 576)))
    assert launch_of(recorder, "kv_cache").shape == (PAGES, page_size, 576)
    assert launch_of(recorder, "entry_keys") == 1


def test_the_least_workspace_is_that_of_as_many_requests(recorder):
    needed = decode_workspace_size(TOKENS, 1, HEADS, TOP_K)
    assert 0 < needed <= FORMULA
    tsmla_decode(**chosen(workspace_buffer=torch.zeros(needed, dtype=torch.int8)))
    with pytest.raises(ArgumentError, match=f"workspace_buffer has {needed - 1} bytes; this call needs {needed}"):
        tsmla_decode(**chosen(workspace_buffer=torch.zeros(needed - 1, dtype=torch.int8)))


def test_lists_without_indices_reach_the_kernel(recorder):
    """It writes outputs of 0 and an LSE of -inf."""
    tsmla_decode(**chosen(indices=lists(BATCH, Q_LEN, 0)))
    assert launch_of(recorder, "block_tables").shape == (TOKENS, 0)


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0), (0, 4), (3, 0)], ids=str)
def test_nothing_to_do_launches_nothing(recorder, shape):
    *tokens, heads = shape
    given = chosen(query=bf16(*shape, 576), indices=lists(*tokens, TOP_K), topk_length=lists(*tokens))
    out, lse = tsmla_decode(**given, return_lse=True)
    assert recorder.launches == [] and out.shape == (*shape, 512) and lse.shape == shape
    out, lse = bf16(*shape, 512), torch.zeros(shape)
    got, got_lse = tsmla_decode(**{**given, "out": out, "lse": lse}, return_lse=True)
    assert got.shape == out.shape and got_lse.shape == lse.shape and recorder.launches == []


@pytest.mark.parametrize("form", [chosen, packed])
def test_a_cache_without_pages_is_one_whose_keys_nobody_chose(recorder, form):
    given = form(kv_cache=bf16(0, 64, 576), topk_length=ints(*range(TOKENS)).view(form()["query"].shape[:-2]))
    out, lse = tsmla_decode(**given, return_lse=True)
    assert len(recorder.launches) == 1 and launch_of(recorder, "seq_lens").tolist() == [0] * TOKENS
    assert launch_of(recorder, "kv_cache").shape == (1, 64, 576)
    assert launch_of(recorder, "out").data_ptr() == out.data_ptr() and out.shape == (*given["query"].shape[:-1], 512)
    assert launch_of(recorder, "lse").data_ptr() == lse.data_ptr() and lse.shape == given["query"].shape[:-1]


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for call in range(3):
        tsmla_decode(**chosen(output_scale=float(call)))
    assert len(recorder.variants) == 1
    tables = torch.zeros(BATCH, 6, dtype=torch.int32)
    tsmla_decode(**inputs(block_tables=tables), return_lse=True)
    tsmla_decode(**chosen())
    assert [variant.gathers for variant in recorder.variants] == [True, False]
    assert launch_of(recorder, "entry_keys") == 1 and recorder.launches[-2][place_of("entry_keys", "decode")] == PAGE


def test_integers_of_other_types_are_integers(recorder):
    tsmla_decode(**chosen(window_left=np.int64(-1), cp_world=np.int64(1)))
    assert len(recorder.launches) == 1


SEEN = "a query token sees the keys of its list and no others"
AS_ONE = " (with indices, each query token counts as a request of one token)"
WRONG = {
    "tables": (
        {"block_tables": torch.zeros(BATCH, 6, dtype=torch.int32)},
        "block_tables is given beside indices; it must be None: indices take its place",
    ),
    "lengths": (
        {"seq_lens": ints(1, 2, 3)},
        "seq_lens is given beside indices; it must be None: indices take its place",
    ),
    "longest": ({"max_seq_len": 9}, "max_seq_len is 9 beside indices; it must be None: indices take its place"),
    "a pack's ends": (
        {"cum_seq_lens_q": ints(0, 2, 4, 6)},
        "cum_seq_lens_q is given beside indices; it must be None: each query token has its own list, whichever request "
        "it is of; a pack is a query [tokens, heads, ..]",
    ),
    "a pack's longest": ({"max_q_len": 2}, "max_q_len is 2 beside indices; it must be None: each query token has"),
    "bounds": ({"causal_seqs": ints(1, 2, 3)}, f"causal_seqs is given beside indices; it must be None: {SEEN}"),
    "limits": (
        {"local_visible_lens": torch.zeros(BATCH, Q_LEN, dtype=torch.int32)},
        f"local_visible_lens is given beside indices; it must be None: {SEEN}",
    ),
    "window": ({"window_left": 7}, f"window_left is 7 beside indices; it must be -1: {SEEN}"),
    "window of another type": ({"window_left": 7.0}, "window_left is a float; it must be a Python integer"),
    "ranks": (
        {"cp_world": 2},
        "cp_world is 2 beside indices; it must be 1: on each rank, indices are slots of its own cache, and -1 for keys",
    ),
    "rank": ({"cp_rank": 1}, "cp_rank is 1; it must be from 0 to 0"),
    "lengths without lists": (
        {**inputs(), "indices": None, "topk_length": ints(1, 2, 3)},
        "topk_length is given but indices is not; it is of their lists",
    ),
    "nothing": (
        {"indices": None, "max_seq_len": 3},
        "block_tables is a NoneType; it must be a tensor on cpu",
    ),
    "no tensor": ({"indices": [[1]]}, "indices is a list; it must be a tensor"),
    "query no tensor": ({"query": None}, "query is a NoneType; it must be a tensor"),
    "query empty tuple": ({"query": ()}, "query is a tuple; it must be a tensor"),
    "query of three pieces": ({"query": (bf16(3, 2, 4, 512),) * 3}, "query is a tuple of 3, and kv_cache is not"),
    "query dimensions": (
        {"query": bf16(HEADS, 576), "indices": lists(1)},
        "query has shape [4, 576]; with indices it must be [batch, q_len, heads, columns] or [tokens, heads, columns]",
    ),
    "query width": (
        {"query": bf16(BATCH, Q_LEN, HEADS, 512)},
        "query has shape [6, 1, 4, 512]; it must be [batch, q_len, heads, 576]",
    ),
    "pieces of other tokens": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 1, 4, 64))},
        "query[1] has shape [3, 1, 4, 64]; it must be [6, 1, 4, 64], which is [batch, q_len, heads, 64]" + AS_ONE,
    ),
    "query strides": (
        {"query": bf16(3, 2, 4, 580)[..., :576]},
        "query has strides (2320, 2320, 580, 1) of 2-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "lists of requests": (
        {"indices": lists(BATCH, TOP_K)},
        "indices has shape [3, 70]; it must be [3, 2, top_k], a list for each query token of query [3, 2, 4, 576]",
    ),
    "lists of others": ({"indices": lists(BATCH, 1, TOP_K)}, "indices has shape [3, 1, 70]; it must be [3, 2, top_k]"),
    "lists with heads": ({"indices": lists(BATCH, Q_LEN, 1, 7)}, "indices has shape [3, 2, 1, 7]; it must be [3, 2"),
    "lists of a pack": (
        {"query": bf16(TOKENS, HEADS, 576)},
        "indices has shape [3, 2, 70]; it must be [6, top_k], a list for each query token of query [6, 4, 576]",
    ),
    "lists of 64 bits": ({"indices": lists(BATCH, Q_LEN, 9).long()}, "indices is torch.int64; accepted: torch.int32"),
    "lists with gaps": (
        {"indices": lists(BATCH, Q_LEN, 10)[..., ::2]},
        "indices has strides (10, 2); its last dimension must have stride 1",
    ),
    "lists elsewhere": (
        {"indices": lists(BATCH, Q_LEN, 9).to("meta"), "topk_length": ints(1, 2, 3)},
        "indices is on meta but query is on cpu",
    ),
    "lengths no tensor": ({"topk_length": 5}, "topk_length is a int; it must be a tensor"),
    "lengths of others": (
        {"topk_length": ints(1, 2)},
        "topk_length has shape [2]; it must be [3, 2], or [3] for lists of one length",
    ),
    "lengths of tokens": ({"topk_length": ints(*range(6))}, "topk_length has shape [6]; it must be [3, 2], or [3]"),
    "lengths of a pack": (
        {"query": bf16(TOKENS, HEADS, 576), "indices": lists(TOKENS, 9), "topk_length": ints(1, 2, 3)},
        "topk_length has shape [3]; it must be [6]",
    ),
    "lengths with gaps": (
        {"query": bf16(3, HEADS, 576), "indices": lists(3, 9), "topk_length": ints(*range(6))[::2]},
        "topk_length has shape [3] and strides (2,); it must be contiguous",
    ),
    "lengths of floats": ({"topk_length": torch.ones(BATCH)}, "topk_length is torch.float32; accepted: torch.int32"),
    "out of others": (
        {"out": bf16(BATCH, 1, HEADS, 512)},
        "out has shape [3, 1, 4, 512]; its query tokens must be query's, [3, 2]",
    ),
    "out width": (
        {"out": bf16(BATCH, Q_LEN, HEADS, 500)},
        "out has shape [6, 1, 4, 500]; it must be [6, 1, 4, 512], which is [batch, q_len, heads, value_columns]"
        + AS_ONE,
    ),
    "out with gaps": (
        {"out": bf16(BATCH, 3, HEADS, 512)[:, :2]},
        "out has shape [3, 2, 4, 512] and strides (6144, 2048, 512, 1); with indices, its first two dimensions must "
        "lie in memory as one",
    ),
    "out dtype": ({"out": bf16(BATCH, Q_LEN, HEADS, 512).half()}, "out is torch.float16; accepted: torch.bfloat16"),
    "out no tensor": ({"out": "o"}, "out is a str; it must be a tensor"),
    "LSE of heads first": (
        {"lse": torch.zeros(BATCH, HEADS, Q_LEN).transpose(1, 2)},
        "lse has shape [3, 2, 4] and strides (8, 1, 2); with indices, its first two dimensions must lie in memory as",
    ),
    "LSE dtype": ({"lse": bf16(BATCH, Q_LEN, HEADS)}, "lse is torch.bfloat16; accepted: torch.float32"),
    "pages without keys": (
        {"kv_cache": bf16(PAGES, 0, 576)},
        "kv_cache has pages of 0 keys; they must have at least one",
    ),
    "cache dtype": ({"kv_cache": bf16(2, 64, 576).half()}, "kv_cache is torch.float16; accepted: torch.bfloat16 (as"),
    "cache dimensions": ({"kv_cache": bf16(2, 64)}, "kv_cache has shape [2, 64]; it must be [pages, page_size, 576]"),
    "sinks": ({"sinks": torch.zeros(HEADS + 1)}, "sinks has shape [5]; it must be [4]"),
    "flag": ({"batch_invariant": "yes"}, "batch_invariant is 'yes'; it must be True or False"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_use_names_the_argument(recorder, change, message, seen):
    if seen:
        results = {"out": bf16(BATCH, Q_LEN, HEADS, 512), "lse": torch.zeros(BATCH, Q_LEN, HEADS)}
        for given in (chosen(), chosen(**results), packed(), inputs()):
            tsmla_decode(**given)
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
        tsmla_decode(**chosen(**change))
    assert recorder.launches == []


@pytest.mark.parametrize("name", ["query", "kv_cache", "indices", "topk_length", "out", "lse", "sinks"])
@pytest.mark.parametrize("case", {**ODD, **FLOATS_ONLY})
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name):
    make, message = {**ODD, **FLOATS_ONLY}[case]
    given = chosen(
        topk_length=lists(BATCH, Q_LEN), out=bf16(BATCH, Q_LEN, HEADS, 512), lse=torch.zeros(BATCH, Q_LEN, HEADS),
        sinks=torch.zeros(HEADS),
    )  # fmt: skip
    if case in FLOATS_ONLY and not given[name].is_floating_point():
        return
    tsmla_decode(**given)
    recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {name} {message.format(name=name)}"):
        tsmla_decode(**{**given, name: make(given[name])})
    assert recorder.launches == []


def test_a_cache_beyond_32_gib_is_refused(recorder):
    """Places of rows are counted in vectors of 16 bytes, in 32 bits. Nothing here has memory."""
    stride = 2**34 - 64 * 576  # of two pages of 16-bit rows, the second of which ends at 32 GiB
    for page_stride in (stride - 8, stride):
        cache = torch.empty_strided((2, 64, 576), (page_stride, 576, 1), dtype=torch.bfloat16, device="meta")
        given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in chosen(kv_cache=cache).items()}
        if page_stride < stride:
            chosen_keys.check_cache("kv_cache", cache)
            continue
        message = "kv_cache reaches over 34359738368 bytes from its first key to its last; where keys are found one by "
        message += "one, it must be less"
        for shape in (cache, cache[:, None]):
            with pytest.raises(ArgumentError, match=f"^tsmla_decode: {message} than 34359738368"):
                tsmla_decode(**{**given, "kv_cache": shape})
    one = torch.empty_strided((1, 64, 576), (2**40, 576, 1), dtype=torch.bfloat16, device="meta")
    chosen_keys.check_cache("kv_cache", one)


def test_what_no_kernel_exists_for(recorder, monkeypatch):
    what = re.escape("tsmla_decode: decode of keys that are copied one by one (indices, or a cache of two tensors)")
    for gathered, why in (
        ((Dtype.FP16,), "for sm_90a reads rows of fp16, not "),
        ((), "has no kernel for sm_90a yet;"),
    ):
        other_facts.change(monkeypatch, Arch.SM90A, gathered_dtypes=gathered, gathered_rows=())
        for given in (chosen(), inputs(kv_cache=in_two())):
            with pytest.raises(UnsupportedError, match=f"^{what} {why}"):
                tsmla_decode(**given)
    assert recorder.launches == []


@pytest.mark.parametrize("page_size", SMALL_PAGE_SIZES)
def test_keys_of_small_pages_are_gathered(recorder, page_size):
    """In a dense call: its table names pages, and what it does not return is written all the same."""
    tsmla_decode(**inputs(kv_cache=bf16(PAGES, page_size, 576)))
    assert recorder.variants[-1].gathers and recorder.variants[-1].lse
    assert launch_of(recorder, "entry_keys") == page_size
    assert launch_of(recorder, "lse").shape == (BATCH, Q_LEN, HEADS)


def test_small_pages_are_refused_where_no_kernel_gathers(recorder, monkeypatch):
    other_facts.change(monkeypatch, Arch.SM90A, gathered_rows=())
    with pytest.raises(ArgumentError, match="^tsmla_decode: kv_cache has pages of 8 keys; accepted: 16, 32, 64, 128"):
        tsmla_decode(**inputs(kv_cache=in_three(8)))


def in_three(page_size: int = PAGE, pages: int = PAGES) -> tuple[torch.Tensor, ...]:
    """A cache of SnapMLA's rows."""
    return (
        in_two(pages=pages, page_size=page_size)[0].to(E4M3),
        bf16(pages, page_size, 64),
        torch.ones(pages, page_size),
    )


@pytest.mark.parametrize("page_size", [1, 8, 69])
def test_rows_with_a_scale_each_are_gathered(recorder, page_size):
    """Lists, or pages of fewer than 16 keys; each query token's scales go with it; the three tensors are not copied."""
    tokens = distinct(TOKENS, HEADS, 512, dtype=E4M3), bf16(TOKENS, HEADS, 64), torch.rand(TOKENS, HEADS)
    by_request = tuple(x.view(BATCH, Q_LEN, *x.shape[1:]) for x in tokens)
    cache = in_three(page_size)
    forms = [packed(query=tokens), chosen(query=by_request)]
    if page_size in SMALL_PAGE_SIZES:
        forms.append(inputs(query=by_request))
    for given in forms:
        out = tsmla_decode(**given | {"kv_cache": cache})
        for name, piece in zip(("kv_cache", "rope_cache", "scale_cache"), cache, strict=True):
            assert launch_of(recorder, name).data_ptr() == piece.data_ptr()
        dense = given["indices"] is None if "indices" in given else True
        for name, piece in zip(("query", "q_pe", "query_scales"), tokens, strict=True):
            launched = launch_of(recorder, name)
            outer = (BATCH, Q_LEN) if dense else (TOKENS, 1)
            assert launched.data_ptr() == piece.data_ptr() and launched.shape == (*outer, *piece.shape[1:])
        assert launch_of(recorder, "entry_keys") == (page_size if dense else 1)
        assert out.dtype == torch.bfloat16 and out.shape[-2:] == (HEADS, 512)
    row = ROWS["snapmla"]
    assert set(recorder.variants) == {DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, True, row, gathers=True)}


def test_a_bf16_query_of_chosen_rows_with_scales_is_quantised_first(recorder):
    tsmla_decode(**chosen(kv_cache=in_three()))
    quantised, launch = recorder.launches
    assert [variant.family for variant in recorder.variants] == ["quantize_q", "decode"]
    for made, name in zip(quantised[2:5], ("query", "q_pe", "query_scales"), strict=True):
        taken = launch[place_of(name, "decode")]
        assert made.data_ptr() == taken.data_ptr() and taken.shape[:2] == (TOKENS, 1)


def test_rows_with_a_scale_each_without_pages_become_a_page_of_zeros(recorder):
    tsmla_decode(**chosen(kv_cache=in_three(pages=0)))
    for name in ("kv_cache", "rope_cache"):
        assert len(launch_of(recorder, name)) == 1 and not launch_of(recorder, name).float().any()
    assert len(launch_of(recorder, "scale_cache")) == 1


@pytest.mark.parametrize("form", ["small pages", "two tensors"])
def test_visible_lengths_reach_kernels_that_gather(recorder, form):
    cache = bf16(PAGES, 4, 576) if form == "small pages" else in_two()
    visible = torch.zeros(BATCH, Q_LEN, dtype=torch.int32)
    tsmla_decode(**inputs(kv_cache=cache, local_visible_lens=visible))
    assert recorder.variants[-1].gathers and launch_of(recorder, "visible").data_ptr() == visible.data_ptr()


def in_two(dtype: torch.dtype = torch.bfloat16, pages: int = PAGES, page_size: int = PAGE) -> tuple[torch.Tensor, ...]:
    """A cache whose latent and rope pieces lie in tensors of their own."""
    return tuple(torch.zeros(pages, page_size, columns, dtype=dtype) for columns in (512, 64))


def dense(**changes) -> dict:
    """Arguments of a call without indices whose cache is two tensors."""
    return inputs(**{"kv_cache": in_two(), **changes})


def dense_packed(**changes) -> dict:
    """Arguments of such a call whose query tokens are packed."""
    ends = {"cum_seq_lens_q": ints(0, 1, 3, TOKENS), "max_q_len": 3}
    return dense(**{"query": distinct(TOKENS, HEADS, 576), **ends, **changes})


@pytest.mark.parametrize("form", [dense, dense_packed, chosen, packed])
def test_the_two_tensors_of_a_cache_reach_the_kernel(recorder, form):
    latent, rope = bf16(PAGES, PAGE, 576 + 512)[..., 576:], bf16(PAGES, PAGE + 1, 72)[:, :PAGE, :64]
    for given in ((latent, rope), (latent[:, None], rope), in_two(page_size=2), in_two()):
        tsmla_decode(**form(kv_cache=given))
        pages, page_size = given[1].shape[:2]
        for name, piece, columns in zip(("kv_cache", "rope_cache"), given, (512, 64), strict=True):
            launched = launch_of(recorder, name)
            assert launched.data_ptr() == piece.data_ptr() and launched.shape == (pages, page_size, columns)
            assert launched.stride() == (piece.stride(0), piece.stride(-2), 1)
        assert launch_of(recorder, "entry_keys") == (1 if form in (chosen, packed) else page_size)
    assert all(variant.gathers and variant.lse for variant in recorder.variants)


@pytest.mark.parametrize("form", [dense, dense_packed, chosen, packed])
def test_two_tensors_without_pages_become_a_page_of_zeros_each(recorder, form):
    out = tsmla_decode(**form(kv_cache=in_two(pages=0)))
    assert len(recorder.launches) == 1 and launch_of(recorder, "out").data_ptr() == out.data_ptr()
    for name, columns in (("kv_cache", 512), ("rope_cache", 64)):
        assert launch_of(recorder, name).shape == (1, PAGE, columns) and not launch_of(recorder, name).any()


E4M3 = torch.float8_e4m3fn
LATENT, ROPE = in_two()
WRONG_PAIRS = {
    "rope dtype": ((LATENT, ROPE.half()), {}, "kv_cache[1] is torch.float16; accepted: torch.bfloat16"),
    "latent dtype": ((LATENT.half(), ROPE), {}, "kv_cache[0] is torch.float16; accepted: torch.bfloat16 (as query)"),
    "latent e4m3, rope bf16": (
        (LATENT.to(E4M3), ROPE),
        {"query": distinct(BATCH, Q_LEN, HEADS, 576, dtype=E4M3)},
        "kv_cache[1] is torch.bfloat16; accepted: torch.float8_e4m3fn",
    ),
    "rope page size": ((LATENT, ROPE[:, :32]), {}, "kv_cache[1] has shape [10, 32, 64]; it must be [10, 64, 64]"),
    "rope pages": ((LATENT, ROPE[:5]), {}, "kv_cache[1] has shape [5, 64, 64]; it must be [10, 64, 64]"),
    "rope width": ((LATENT, ROPE[..., :32]), {}, "kv_cache[1] has shape [10, 64, 32]; it must be [10, 64, 64]"),
    "rope dimensions": (
        (LATENT[:, None], ROPE[:, None]), {}, "kv_cache[1] has shape [10, 1, 64, 64]; it must be [10, 64, 64]"
    ),
    "rope elsewhere": ((LATENT, ROPE.to("meta")), {}, "kv_cache[1] is on meta but query is on cpu"),
    "latent elsewhere": ((LATENT.to("meta"), ROPE), {}, "kv_cache[0] is on meta but query is on cpu"),
    "rope strides": (
        (LATENT, bf16(PAGES, PAGE, 68)[..., :64]), {}, "kv_cache[1] has strides (4352, 68, 1) of 2-byte elements; the"
    ),
    "rope gaps": (
        (LATENT, bf16(PAGES, PAGE, 128)[..., ::2]), {}, "kv_cache[1] has strides (8192, 128, 2); its last dimension"
    ),
    "whole rows": (
        (bf16(PAGES, PAGE, 576), ROPE),
        {},
        "kv_cache[0] has shape [10, 64, 576]; it must be [pages, page_size, 512] or [pages, 1, page_size, 512]",
    ),
    "rows of 656 bytes": (
        (torch.zeros(PAGES, PAGE, 656, dtype=E4M3), ROPE), {}, "kv_cache[0] is torch.float8_e4m3fn; accepted: torch.b"
    ),
    "rows of 656 bytes, uint8": (
        (torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8), ROPE), {}, "kv_cache[0] is torch.uint8; accepted: torch.bf"
    ),
    "rows without rope": (
        (LATENT, ROPE),
        {"query": distinct(BATCH, Q_LEN, HEADS, 512), "qk_rope_head_dim": 0},
        "kv_cache[1] is given; rows of latent bf16 512 have no rope piece",
    ),
    "a query with scales": (
        (LATENT, ROPE),
        {"query": (bf16(3, 2, 4, 512).to(E4M3), bf16(3, 2, 4, 64), torch.ones(3, 2, 4))},
        "query is a tuple of 3, and kv_cache is not; query_scales go with a cache of three",
    ),
    "one": ((LATENT,), {}, "kv_cache is a tuple of 1; it must be a tensor or a tuple of 2 or 3"),
    "no rope": ((LATENT, None), {}, "kv_cache is a tuple without the second piece"),
    "no latent": ((None, ROPE), {}, "kv_cache[0] is a NoneType; it must be a tensor"),
    "rope no tensor": ((LATENT, 5), {}, "kv_cache[1] is a int; it must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("form", [dense, chosen])
@pytest.mark.parametrize("pair, changes, message", WRONG_PAIRS.values(), ids=WRONG_PAIRS.keys())
def test_wrong_pairs_of_tensors_are_named(recorder, pair, changes, message, form, seen):
    if seen:
        for cache in (in_two(), in_two(page_size=1), in_two(pages=0), bf16(PAGES, PAGE, 576)):
            tsmla_decode(**form(kv_cache=cache))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
        tsmla_decode(**form(kv_cache=pair, **changes))
    assert recorder.launches == []


@pytest.mark.parametrize("page_size", [0, 3])
def test_two_tensors_of_pages_that_no_table_has_are_refused(recorder, page_size):
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: kv_cache has pages of {page_size} keys; accepted: 1, 2, "):
        tsmla_decode(**dense(kv_cache=in_two(page_size=page_size)))


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "after a right call"])
@pytest.mark.parametrize("form", [dense, dense_packed, chosen, packed])
@pytest.mark.parametrize("cache", [in_two, in_three])
def test_rope_pieces_beyond_32_gib_are_refused(recorder, cache, form, seen):
    latent, rope, *scales = cache(pages=2)
    query = distinct(BATCH, Q_LEN, HEADS, 512, dtype=E4M3), bf16(BATCH, Q_LEN, HEADS, 64), torch.ones(3, 2, HEADS)
    if form in (dense_packed, packed):
        query = tuple(x.flatten(0, 1) for x in query)
    more = {"query": query} if scales else {}
    if scales and form in (dense, dense_packed):  # whose rows are found one by one only in small pages
        latent, rope, *scales = cache(pages=2, page_size=8)
    near, far = (far_apart(rope, stride) for stride in (rope.stride(0) + 64, 2**34))
    for right in (rope, near) if seen else ():
        tsmla_decode(**form(kv_cache=(latent, right, *scales), **more))
    recorder.launches.clear()
    with pytest.raises(ArgumentError, match=r"^tsmla_decode: kv_cache\[1\] reaches over "):
        tsmla_decode(**form(kv_cache=(latent, far, *scales), **more))
    assert recorder.launches == []
