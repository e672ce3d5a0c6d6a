"""benchmarks.peers.flashinfer: what it hands to FlashInfer's planned wrapper, which a stand-in computes."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable

import pytest
import torch
from tsmla.problems.pages import keys_in, page_tables, put_keys

from benchmarks import bench_decode
from benchmarks.bench_decode import LATENT, PAGE, ROPE, Case
from benchmarks.peers import flashinfer

HEADS, SCALE = 3, 0.05
LENGTHS = [PAGE + 6, 1, 2 * PAGE]
MAKERS = (flashinfer.fa3, flashinfer.fa2)


def _case(dtype: torch.dtype = torch.bfloat16, q_len: int = 1, queries: list[int] | None = None) -> Case:
    """Requests whose page tables are wider than needed, with what no one may read behind their keys. queries: tokens of
    each request of a pack."""
    tables, pages = page_tables(LENGTHS, PAGE, spare_pages=1, spare_columns=2, unused=None)
    cache = torch.full((pages, PAGE, LATENT + ROPE), float("nan"))
    put_keys(cache, tables, [torch.randn(keys, LATENT + ROPE) for keys in LENGTHS])
    shape, ends = (len(LENGTHS), q_len), None
    if queries is not None:
        shape, ends = (sum(queries),), torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    query = torch.randn(*shape, HEADS, LATENT + ROPE).to(dtype)
    return Case(
        len(LENGTHS),
        q_len,
        max(LENGTHS),
        HEADS,
        bench_decode.VARIABLE,
        query,
        cache.to(dtype),
        tables,
        torch.tensor(LENGTHS, dtype=torch.int32),
        max(LENGTHS),
        SCALE,
        0,
        ends,
    )


def _exact(case: Case, queries: list[int]) -> torch.Tensor:
    """[tokens, heads, 512] in float64, from the case's own page tables."""
    rows, out = case.query.reshape(-1, HEADS, LATENT + ROPE).double().split(queries), []
    for query, keys in zip(rows, keys_in(case.kv_cache, case.block_tables, LENGTHS), strict=True):
        out.append(_attention(query, keys.double(), True))
    return torch.cat(out)


def _attention(query: torch.Tensor, keys: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = torch.einsum("qhd,kd->hqk", query, keys) * SCALE
    if causal:
        unseen = torch.ones(len(query), len(keys), dtype=torch.bool).triu(len(keys) - len(query) + 1)
        scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1).nan_to_num(), keys[:, :LATENT])


class _Wrapper:
    """BatchMLAPagedAttentionWrapper of 0.7.4, with the names of its parameters (mla/_batch_mla/_wrapper.py)."""

    backends: list[str] = []

    def __init__(self, float_workspace_buffer: torch.Tensor, *, backend: str) -> None:
        assert float_workspace_buffer.nbytes == flashinfer.WORKSPACE_BYTES
        self.backends.append(backend)

    def plan(
        self,
        *,
        metadata: types.SimpleNamespace,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size) == (HEADS, LATENT, ROPE, PAGE)
        assert sm_scale == SCALE
        for tensor in vars(metadata).values():
            assert tensor.dtype == torch.int32
        self.metadata, self.causal, self.dtypes = metadata, causal, (q_data_type, kv_data_type)

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, **scales: float) -> torch.Tensor:
        assert (query.dtype, kv_cache.dtype) == self.dtypes and out.is_contiguous() and out.dtype == query.dtype
        assert query.dtype in flashinfer.DTYPES
        assert scales == ({"ckv_scale": 1.0, "kpe_scale": 1.0} if kv_cache.dtype.itemsize == 1 else {})
        given, written = self.metadata, []
        pages = given.kv_indices.split(given.kv_indptr.diff().tolist())
        for tokens, own, keys in zip(
            query.split(given.qo_indptr.diff().tolist()), pages, given.kv_len_arr.tolist(), strict=True
        ):
            rows = kv_cache[own.long()].double().flatten(0, 1)[:keys]
            written.append(_attention(tokens.double(), rows, self.causal))
        return out.copy_(torch.cat(written))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    mla = types.ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = _Wrapper  # type: ignore[attr-defined]
    mla.MLAPlanMetadata = types.SimpleNamespace(  # type: ignore[attr-defined]
        csr=lambda *tensors: types.SimpleNamespace(**dict(zip(names, tensors, strict=True)))
    )
    monkeypatch.setattr(_Wrapper, "backends", [])
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)


@pytest.mark.parametrize(("q_len", "queries"), [(1, None), (3, None), (2, [2, 0, 1])], ids=["one", "several", "packed"])
@pytest.mark.parametrize("dtype", [*flashinfer.DTYPES, flashinfer.EIGHT_BITS])
@pytest.mark.parametrize("make", MAKERS)
def test_it_computes_the_case(make: Callable, dtype: torch.dtype, q_len: int, queries: list[int] | None) -> None:
    case = _case(dtype, q_len, queries)
    launch = make(case)
    got, exact = launch().double(), _exact(case, queries or [q_len] * len(LENGTHS))
    assert (got - exact).norm() / exact.norm() < 2e-3 * (1 if dtype is torch.float16 else 2)  # one rounding
    assert _Wrapper.backends == [make.__name__]


@pytest.mark.parametrize("make", MAKERS)
def test_what_it_does_not_take_is_left_out(make: Callable) -> None:
    assert make(_case(torch.float8_e5m2)) is None
    case = _case()
    case.query = case.query[..., :LATENT], case.query[..., LATENT:]
    assert make(case) is None


@pytest.mark.parametrize("make", MAKERS)
def test_it_must_be_installed(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.mla"):
        make(_case())
