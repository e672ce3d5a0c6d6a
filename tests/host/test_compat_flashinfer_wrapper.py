"""FlashInfer's BatchMLAPagedAttentionWrapper: page lists become page tables, and what runs is tsmla_decode's launch."""

from __future__ import annotations

import math
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from launches import ROOM, alike, distinct, launched, place_of, processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from tsmla.loading import resolve
from tsmla.operators.decode import tsmla_decode

HEADS, PAGES, PAGE = 4, 40, 16
LATENT = 512
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def ends(lengths, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def wrapper(**options) -> BatchMLAPagedAttentionWrapper:
    return BatchMLAPagedAttentionWrapper(ROOM.view(torch.float32), **options)


def plan_inputs(q_lens=(2, 2, 2), keys=(20, 1, 40), spare=(0, 1, 0), dtype=torch.bfloat16, **changes) -> dict:
    """Page lists with `spare` pages more than a request needs."""
    pages = [-(-length // PAGE) + more for length, more in zip(keys, spare, strict=True)]
    given = {
        "qo_indptr": ends(q_lens),
        "kv_indptr": ends(pages),
        "kv_indices": torch.arange(sum(pages), dtype=torch.int32).flip(0).contiguous() % PAGES,
        "kv_len_arr": ints(*keys),
        "num_heads": HEADS,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": PAGE,
        "causal": True,
        "sm_scale": 0.125,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    return {**given, **changes}


def tables(plan: dict) -> list[list[int]]:
    """Pages that each request's keys lie in."""
    starts, pages = plan["kv_indptr"].tolist(), plan["kv_indices"].tolist()
    needed = [-(-length // plan["page_size"]) for length in plan["kv_len_arr"].tolist()]
    return [pages[start : start + count] for start, count in zip(starts, needed, strict=False)]


def run_inputs(tokens: int = 6, dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {"query": distinct(tokens, HEADS, 576, dtype=dtype), "kv_cache": distinct(PAGES, PAGE, 576, dtype=dtype)}
    return {**given, **changes}


def ran(recorder: Recorder, plan: dict, run: dict, **options):
    planned = wrapper(**options)
    planned.plan(**plan)
    return launched(recorder, lambda: planned.run(**run))


def operator(launch: tuple, batch: int, q_len: int, run: dict, **changes) -> dict:
    """tsmla_decode's arguments for a launch's own page tables, which are checked apart."""
    query = run["query"]
    given = {
        "query": query.reshape(batch, q_len, HEADS, 576) if q_len else query,
        "kv_cache": run["kv_cache"],
        "workspace_buffer": ROOM,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": launch["block_tables"],
        "seq_lens": launch["seq_lens"],
        "max_seq_len": max(1, int(launch["seq_lens"].max())),
        "softmax_scale": 0.125,
    }
    return {**given, **changes}


@many
@given(
    q_len=some.integers(1, 3),
    keys=some.lists(some.integers(0, 70), min_size=1, max_size=4),
    more=some.integers(0, 2),
    dtype=some.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    causal=some.booleans(),
    pdl=some.sampled_from([None, False, True]),
    sinks=some.booleans(),
    lengths=some.sampled_from([torch.int32, torch.int64]),
    backend=some.sampled_from(["auto", "fa2", "fa3", "cutlass", "cute-dsl"]),
    harmless=some.fixed_dictionaries(
        {},
        optional={
            "use_profiler": some.just(False),
            "query_layout": some.sampled_from([None, "packed", "split"]),
            "kv_cache_layout": some.sampled_from([None, "packed", "split"]),
            "output_scale": some.just("none"),
            "scale_mode": some.sampled_from(["default", "kv-per-tensor", "bmm-scalar"]),
            "skip_softmax": some.just(False),
        },
    ),
)
def test_it_launches_what_the_operator_does(
    recorder, q_len, keys, more, dtype, causal, pdl, sinks, lengths, backend, harmless
):
    batch = len(keys)
    plan = plan_inputs([q_len] * batch, keys, [more] * batch, dtype, causal=causal, enable_pdl=pdl, **harmless)
    wanted_tables = tables(plan)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
        plan[name] = plan[name].to(lengths)
    sink = torch.arange(HEADS, dtype=torch.float32) if sinks else None
    run = run_inputs(batch * q_len, dtype, sinks=sink)
    out, got, variant = ran(recorder, {**plan, "use_sinks": sinks}, run, backend=backend)
    assert out.shape == (batch * q_len, HEADS, 512)
    for row, pages in zip(got["block_tables"].tolist(), wanted_tables, strict=True):
        assert row[: len(pages)] == pages
    assert got["seq_lens"].tolist() == keys and got["seq_lens"].dtype == got["block_tables"].dtype == torch.int32
    direct = operator(got, batch, q_len, run, causal_mask=causal, enable_pdl=bool(pdl), sinks=sink)
    _, want, wanted = launched(recorder, lambda: tsmla_decode(**direct))
    assert variant == wanted
    alike(got, want, any_workspace=True)


@many
@given(
    q_lens=some.lists(some.integers(0, 4), min_size=3, max_size=3).filter(lambda x: len(set(x)) > 1),
    causal=some.booleans(),
)
def test_queries_of_different_lengths_are_a_pack(recorder, q_lens, causal):
    keys = (20, 1, 40)
    plan = plan_inputs(q_lens, keys, causal=causal)
    run = run_inputs(sum(q_lens))
    out, launch, _ = ran(recorder, plan, run)
    assert out.shape == (sum(q_lens), HEADS, 512)
    for row, pages in zip(launch["block_tables"].tolist(), tables(plan), strict=True):
        assert row[: len(pages)] == pages
    direct = operator(launch, 3, 0, run, causal_mask=causal, cum_seq_lens_q=ends(q_lens), max_q_len=max(q_lens))
    _, want, _ = launched(recorder, lambda: tsmla_decode(**direct))
    alike(launch, want, any_workspace=True)


@pytest.mark.parametrize("form", ["flat", "metadata", "csr metadata"])
def test_page_tables_and_metadata_objects(recorder, form):
    csr = plan_inputs()
    rest = {n: v for n, v in csr.items() if n not in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
    table = torch.tensor([[*row, 0, 0, 0][:3] for row in tables(csr)], dtype=torch.int32)
    dense = {"cum_seq_lens_q": csr["qo_indptr"], "block_tables": table, "seq_lens": csr["kv_len_arr"], "max_q_len": 2}
    if form == "flat":
        plan = {**rest, **dense}
    elif form == "metadata":
        plan = {**rest, "metadata": types.SimpleNamespace(**dense)}
    else:
        lists = {n: csr[n] for n in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
        plan = {**rest, "metadata": types.SimpleNamespace(**lists, block_tables=None)}
    _, got, _ = ran(recorder, plan, run_inputs())
    _, want, _ = ran(recorder, csr, run_inputs())
    for name, x in got.items():
        if isinstance(x, torch.Tensor) and name not in ("block_tables", "out", "lse", "workspace"):
            assert torch.equal(x, want[name])
    for row, pages in zip(got["block_tables"].tolist(), tables(csr), strict=True):
        assert row[: len(pages)] == pages


@pytest.mark.parametrize("q_lens", [(2, 2, 2), (1, 0, 5)])
def test_parts_are_not_copied(recorder, q_lens):
    query, cache = distinct(6, HEADS, 576), distinct(PAGES, PAGE, 576)
    heads_first = distinct(HEADS, 6, LATENT).transpose(0, 1)
    caches = cache[..., :LATENT], cache[..., LATENT:]
    outer = (1, 6, HEADS) if max(q_lens) > 2 else (3, 2, HEADS)
    for nope, pe in ((query[..., :LATENT], query[..., LATENT:]), (heads_first, distinct(6, HEADS, 64))):
        single = {"q_nope": nope, "q_pe": pe, "ckv_cache": caches[0], "kpe_cache": caches[1]}
        for run in (single, {"query": (nope, pe), "kv_cache": caches}):
            _, got, _ = ran(recorder, plan_inputs(q_lens), run)
            for name, part in (("query", nope), ("q_pe", pe)):
                assert got[name].data_ptr() == part.data_ptr() and torch.equal(got[name], part.view(*outer, -1))
            assert got["kv_cache"].data_ptr() == cache.data_ptr() and torch.equal(got["kv_cache"], cache)


def test_parts_that_no_kernel_reads_are_copied(recorder):
    odd = distinct(6, HEADS, 577)
    for nope, pe in ((odd[..., 1:513], odd[..., 513:]), (distinct(6, LATENT, HEADS).mT, odd[..., :64])):
        _, got, _ = ran(recorder, plan_inputs(), run_inputs(query=(nope, pe)))
        for name, part in (("query", nope), ("q_pe", pe)):
            assert got[name].data_ptr() != part.data_ptr() and torch.equal(got[name], part.reshape(3, 2, HEADS, -1))


def test_parts_of_a_cache_that_lie_apart_are_read_where_they_lie(recorder):
    """Memory goes on behind the latent part with the next row's, or another tensor's, rope."""
    cache = distinct(PAGES + 1, PAGE, 576)
    for parts in ((cache[:-1, :, :LATENT], cache[1:, :, LATENT:]), APART):
        for run in ({"kv_cache": parts}, {"kv_cache": None, "ckv_cache": parts[0], "kpe_cache": parts[1]}):
            _, got, _ = ran(recorder, plan_inputs(), run_inputs(**run))
            assert got["kv_cache"] is parts[0] and got["rope_cache"] is parts[1] and got["entry_keys"] == PAGE


def test_rows_without_a_rope_part(recorder):
    query, cache, plan = distinct(6, HEADS, LATENT), distinct(PAGES, PAGE, LATENT), plan_inputs(head_dim_kpe=0)
    empty = distinct(6, HEADS, 0), distinct(PAGES, PAGE, 0)
    for run in (
        {"query": query, "kv_cache": cache},
        {"q_nope": query, "q_pe": empty[0], "ckv_cache": cache, "kpe_cache": empty[1]},
    ):
        _, got, _ = ran(recorder, plan, run)
        assert got["kv_cache"] is cache and torch.equal(got["query"].flatten(0, 1), query) and got["q_pe"] is None


@pytest.mark.parametrize("page_size", [1, 8])
def test_pages_of_few_keys(recorder, page_size):
    cache = distinct(PAGES * PAGE, page_size, 576)
    _, got, _ = ran(
        recorder, plan_inputs(keys=(3, 1, 0), spare=(2, 2, 1), page_size=page_size), run_inputs(kv_cache=cache)
    )
    assert got["kv_cache"] is cache and got["entry_keys"] == page_size


def test_a_cache_without_pages_serves_requests_without_keys(recorder):
    none, keys = distinct(0, PAGE, 576), {"keys": (0, 0, 0), "spare": (0, 0, 0)}
    for cache in (none, (distinct(0, PAGE, LATENT), distinct(0, PAGE, 64))):
        _, got, _ = ran(recorder, plan_inputs(**keys), run_inputs(kv_cache=cache))
        assert got["kv_cache"].shape == (1, PAGE, 576) and got["seq_lens"].tolist() == [0, 0, 0]


def test_entries_of_kv_indptr_beyond_the_requests_are_not_read(recorder):
    plan = plan_inputs()
    longer = {**plan, "kv_indptr": torch.cat([plan["kv_indptr"], ints(-7, 3, 10**9)])}
    (_, got, _), (_, want, _) = (ran(recorder, given, run_inputs()) for given in (longer, plan))
    assert torch.equal(got["block_tables"], want["block_tables"]) and torch.equal(got["seq_lens"], want["seq_lens"])


@pytest.mark.parametrize(("on_e", "mode"), [(False, "none"), (True, "none"), (False, "base2"), (True, "basee")])
@pytest.mark.parametrize("buffer", [False, True])
def test_the_lse_has_the_base_that_was_asked_for(recorder, monkeypatch, on_e, mode, buffer):
    base_2 = torch.arange(6 * HEADS, dtype=torch.float32).view(6, HEADS)
    base_2[3] = -math.inf
    place, factor = place_of("lse", "decode"), place_of("lse_factor", "decode")

    def kernel(*arguments):
        arguments[place].copy_(base_2.view(arguments[place].shape) * arguments[factor])

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    planned = wrapper()
    planned.plan(**plan_inputs(lse_mode=mode))
    given_lse = torch.full((6, HEADS), math.nan) if buffer else None
    given_out = torch.zeros(6, HEADS, 512, dtype=torch.bfloat16)
    run = run_inputs(return_lse=True, return_lse_base_on_e=on_e, lse=given_lse, out=given_out)
    out, lse = planned.run(**run)
    assert out is given_out and (lse is given_lse or not buffer)
    assert torch.allclose(lse, base_2 * math.log(2) if on_e else base_2, rtol=1e-6)
    if buffer:
        given_lse.fill_(math.nan)
        assert planned.run(**{**run, "return_lse": False}) is given_out
        assert torch.allclose(given_lse, base_2 * math.log(2) if on_e else base_2, rtol=1e-6)


@pytest.mark.parametrize(
    ("scales", "wanted"),
    [
        ({"ckv_scale": 0.5, "kpe_scale": 0.5}, (0.0625, 0.5)),
        ({"bmm1_scale": 0.75, "bmm2_scale": -2.0}, (0.75, -2.0)),
        ({}, (0.125, 1.0)),
    ],
    ids=str,
)
def test_scales(recorder, scales, wanted):
    dtype = torch.float8_e4m3fn
    _, got, _ = ran(recorder, plan_inputs(dtype=dtype), run_inputs(dtype=dtype, **scales))
    assert (got["softmax_scale"], got["output_scale"]) == wanted


def test_graphs_keep_tables_and_lengths_where_they_are(recorder):
    """A later plan overwrites what the first one allocated: a captured launch sees it."""
    planned = wrapper(use_cuda_graph=True, kv_indices=torch.zeros(30, dtype=torch.int32))
    places = set()
    for keys, q_lens in (((20, 1, 40), (2, 2, 2)), ((1, 0, 7), (2, 2, 2)), ((160, 3, 16), (2, 2, 2))):
        plan = plan_inputs(q_lens, keys)
        planned.plan(**plan)
        _, launch, _ = launched(recorder, lambda: planned.run(**run_inputs()))
        places.add(tuple(launch[name].data_ptr() for name in ("block_tables", "seq_lens")))
        assert launch["block_tables"].shape == (3, 10) and launch["seq_lens"].tolist() == list(keys)
        for row, pages in zip(launch["block_tables"].tolist(), tables(plan), strict=True):
            assert row[: len(pages)] == pages
    assert len(places) == 1
    with pytest.raises(ArgumentError, match=r"every plan has the shape of the first, 3 requests .* up to 10 pages"):
        planned.plan(**plan_inputs(keys=(161, 1, 1)))
    with pytest.raises(ArgumentError, match="every plan has the shape of the first"):
        planned.plan(**plan_inputs((1, 1, 1)))


WRONG_PLANS = {
    "lse_mode": {"lse_mode": "natural"},
    "sm_scale": {"sm_scale": "0.125"},
    "use_sinks": {"use_sinks": 2},
    "enable_pdl": {"enable_pdl": 2},
    "causal": {"causal": 2},
    "output_dtype": {"output_dtype": torch.float32},
    "too many pages": plan_inputs(keys=(161, 1, 1)),
    "other query tokens": plan_inputs((1, 1, 1)),
    "ends that fall": {"qo_indptr": ints(0, 4, 2, 6)},
}


@pytest.mark.parametrize("q_lens", [(2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("changes", WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_a_plan_that_is_refused_leaves_the_one_before_it(recorder, changes, q_lens):
    planned = wrapper(use_cuda_graph=True, kv_indices=torch.zeros(30, dtype=torch.int32))
    first = plan_inputs(q_lens)
    planned.plan(**first)
    other = {**plan_inputs((3, 2, 1) if q_lens == (1, 3, 2) else q_lens, (7, 33, 2)), **changes}
    with pytest.raises(ArgumentError):
        planned.plan(**other)
    _, launch, _ = launched(recorder, lambda: planned.run(**run_inputs()))
    assert launch["seq_lens"].tolist() == first["kv_len_arr"].tolist()
    for row, pages in zip(launch["block_tables"].tolist(), tables(first), strict=True):
        assert row[: len(pages)] == pages
    if q_lens == (1, 3, 2):
        assert torch.equal(launch["cum_seq_lens_q"], ends(q_lens))


def test_graphs_deal_out_query_tokens_anew(recorder):
    """They are as many in all as in the first plan, and up to all of them in one request."""
    planned = wrapper(use_cuda_graph=True, kv_indices=torch.zeros(30, dtype=torch.int32))
    places = set()
    for q_lens in ((1, 3, 2), (0, 6, 0), (2, 2, 2), (4, 1, 1)):
        planned.plan(**plan_inputs(q_lens))
        _, launch, _ = launched(recorder, lambda: planned.run(**run_inputs()))
        places.add((launch["cum_seq_lens_q"].data_ptr(), launch["q_len"]))
        assert torch.equal(launch["cum_seq_lens_q"], ends(q_lens))
    assert len(places) == 1 and launch["q_len"] == 6
    with pytest.raises(ArgumentError, match="first, 3 requests with 6 query tokens in all, .* 3 requests with 5 query"):
        planned.plan(**plan_inputs((1, 3, 1)))


def test_graphs_occupy_the_gpu_for_the_longest_that_tables_hold(recorder):
    short, graph = wrapper(), wrapper(use_cuda_graph=True, kv_indices=torch.zeros(3 * 4096, dtype=torch.int32))
    workers = []
    for planned in (short, graph):
        planned.plan(**plan_inputs((1, 1, 1), (1, 1, 1)))
        _, launch, _ = launched(recorder, lambda planned=planned: planned.run(**run_inputs(3)))
        workers.append(launch["workers"])
    assert workers[0] < workers[1]


def test_no_requests(recorder):
    planned = wrapper()
    planned.plan(**plan_inputs((), (), ()))
    assert planned.run(**run_inputs(0)).shape == (0, HEADS, 512) and not recorder.launches


BOTH_SCALES = {"bmm1_scale": 1.0, "bmm2_scale": 1.0, "ckv_scale": 1.0, "kpe_scale": 1.0}
APART = distinct(PAGES, PAGE, LATENT), distinct(PAGES, PAGE, 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_profiler": True}, "use_profiler is True"),
        ({"skip_softmax": True}, "skip_softmax is True"),
        ({"output_scale": "per-tensor"}, "output_scale is per-tensor"),
        ({"output_scale": None}, "output_scale is a NoneType"),
        ({"scale_mode": "bmm-tensor"}, "scale_mode is 'bmm-tensor'"),
        ({"query_layout": "x"}, "query_layout is 'x'"),
        ({"kv_cache_layout": 1}, "kv_cache_layout is 1"),
        ({"lse_mode": "base10"}, "lse_mode is 'base10'"),
        ({"num_heads": None}, "num_heads is None; it must be given"),
        ({"sm_scale": None}, "sm_scale is None"),
        ({"sm_scale": "x"}, "sm_scale is a str"),
        ({"causal": 2}, "causal is 2"),
        ({"head_dim_ckv": 256}, "head_dim_ckv is 256; kernels exist for 512"),
        ({"head_dim_kpe": 32}, "head_dim_kpe is 32; kernels exist for 64, 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 3}, r"page_size is 3; kernels exist for 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"q_data_type": torch.float32}, "q_data_type is torch.float32"),
        ({"kv_data_type": torch.float8_e4m3fn}, "kv_data_type is torch.float8_e4m3fn; it must be q_data_type"),
        ({"output_dtype": torch.float16}, "output_dtype is torch.float16"),
        ({"enable_pdl": 3}, "enable_pdl is 3"),
        ({"use_sinks": None}, "use_sinks is a NoneType"),
        ({"kv_indices": None}, "needs qo_indptr, kv_indptr, kv_indices, kv_len_arr, or cum_seq_lens_q"),
        ({"metadata": object()}, "metadata is given, and so is qo_indptr"),
        ({"qo_indptr": ints(0, 2)}, "qo_indptr has 2 entries; it must have 4"),
        ({"qo_indptr": ints(1, 2, 3, 4)}, "qo_indptr .* start at 0"),
        ({"kv_indptr": ints(0, 5, 4, 9)}, "kv_indptr .* never fall"),
        ({"kv_indptr": ints(0, 2, 4)}, "kv_indptr has 3 entries; it must have 4 or more"),
        ({"kv_indptr": ints(0, 2, 4, 900)}, "kv_indptr ends at 900; kv_indices has 7 entries"),
        ({"kv_indices": torch.zeros(7)}, "kv_indices is torch.float32"),
        ({"kv_indices": torch.zeros(7, 1, dtype=torch.int32)}, "kv_indices has shape"),
        ({"kv_len_arr": ints(20, 33, 40)}, "kv_len_arr has 33 keys for request 1, which has 2 pages of 16"),
        ({"kv_len_arr": ints(20, -1, 40)}, "kv_len_arr has numbers below 0"),
        ({"kv_len_arr": [20, 1, 40]}, "kv_len_arr is a list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plan_refuses_by_name(recorder, changes, text):
    with pytest.raises(ArgumentError, match=f"^BatchMLAPagedAttentionWrapper.plan: .*{text}"):
        wrapper().plan(**plan_inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"profiler_buffer": ints(1)}, "profiler_buffer is a Tensor"),
        ({"kv_len": ints(1)}, "kv_len is a Tensor; plan says it"),
        ({"page_table": ints(1)}, "page_table is a Tensor; plan says it"),
        ({"o_scale": 0.5}, "o_scale is 0.5"),
        ({"ckv_scale_arr": torch.ones(3)}, "ckv_scale_arr is a Tensor"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is 1.0"),
        ({"ckv_scale": 0.5, "kpe_scale": 0.25}, "kpe_scale is 0.25; one factor serves a whole row"),
        ({"ckv_scale": 0.5}, "ckv_scale and kpe_scale are given together"),
        ({"bmm1_scale": 0.5}, "bmm1_scale and bmm2_scale are given together"),
        (BOTH_SCALES, "ckv_scale is given, and so is bmm1_scale"),
        ({"bmm1_scale": torch.ones(1), "bmm2_scale": 1.0}, "bmm1_scale is a Tensor"),
        ({"sinks": torch.zeros(HEADS)}, "sinks are given; plan had use_sinks=False"),
        ({"return_lse_base_on_e": True}, "return_lse_base_on_e is given, return_lse is False, and there is no lse"),
        ({"return_lse": True, "lse": torch.zeros(6)}, r"lse has shape \[6\]"),
        ({"return_lse": 3}, "return_lse is 3"),
        ({"query": None}, "needs query, or q_nope and q_pe"),
        ({"q_pe": distinct(6, HEADS, 64)}, "query is given, and so is q_pe"),
        ({"query": [1, 2]}, "query is a list; it must be a tensor or a pair"),
        ({"query": distinct(5, HEADS, 576)}, "query has 5 tokens x 4 heads; plan said 6 x 4"),
        ({"query": distinct(6, HEADS, 512)}, r"query has shape \[6, 4, 512\]"),
        ({"query": distinct(6, HEADS, 576, dtype=torch.float16)}, "query is torch.float16; accepted: torch.bfloat16"),
        ({"query": (distinct(6, HEADS, LATENT), distinct(5, HEADS, 64))}, r"q_pe has shape \[5, 4, 64\]"),
        ({"query": (distinct(6, HEADS, LATENT), 7)}, "q_pe is a int"),
        ({"kv_cache": None}, "needs kv_cache, or ckv_cache and kpe_cache"),
        ({"kv_cache": (APART[0], distinct(PAGES, PAGE, 32))}, r"kpe_cache has shape \[40, 16, 32\]"),
        ({"kv_cache": distinct(PAGES, 32, 576)}, r"kv_cache has shape \[40, 32, 576\]; it must be \[pages, 16, 576\]"),
        ({"kv_cache": distinct(PAGES, PAGE, 576, dtype=torch.float16)}, "kv_cache is torch.float16"),
        ({"out": distinct(6, HEADS, 128)}, r"out has shape \[6, 4, 128\]"),
        ({"out": distinct(6, HEADS, 512, dtype=torch.float16)}, "out is torch.float16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_run_refuses_by_name(recorder, changes, text):
    planned = wrapper()
    planned.plan(**plan_inputs())
    with pytest.raises(ArgumentError, match=f"^BatchMLAPagedAttentionWrapper.run: .*{text}"):
        planned.run(**run_inputs(**changes))
    assert not recorder.launches


def test_plan_and_run_agree_on_sinks_and_lse(recorder):
    planned = wrapper()
    planned.plan(**plan_inputs(use_sinks=True))
    with pytest.raises(ArgumentError, match="sinks are not given; plan had use_sinks=True"):
        planned.run(**run_inputs())
    with pytest.raises(UnsupportedError, match="sinks are given, and an LSE is asked for"):
        planned.run(**run_inputs(sinks=torch.zeros(HEADS), return_lse=True))
    planned.plan(**plan_inputs(lse_mode="basee"))
    for options in ({}, {"return_lse": True}):
        with pytest.raises(ArgumentError, match="plan had lse_mode='basee'"):
            planned.run(**run_inputs(**options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "x"}, "backend is 'x'"),
        ({"use_cuda_graph": 3}, "use_cuda_graph is 3"),
        ({"kv_indices": 3}, "kv_indices is a int"),
    ],
)
def test_construction_refuses_by_name(recorder, options, text):
    with pytest.raises(ArgumentError, match=f"^BatchMLAPagedAttentionWrapper: {text}"):
        wrapper(**options)


def test_run_comes_after_plan(recorder):
    with pytest.raises(ArgumentError, match="call plan first"):
        wrapper().run(**run_inputs())


@pytest.mark.parametrize("buffer", [torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.float32)])
def test_a_small_workspace_is_named_as_it_is_here(recorder, buffer):
    planned = BatchMLAPagedAttentionWrapper(buffer)
    planned.plan(**plan_inputs())
    with pytest.raises(ArgumentError, match="workspace_buffer has 8 bytes.*workspace_buffer is float_workspace_buffer"):
        planned.run(**run_inputs())
    with pytest.raises(ArgumentError, match="float_workspace_buffer has shape"):
        BatchMLAPagedAttentionWrapper(torch.zeros(8, 8).T[:, :3])
