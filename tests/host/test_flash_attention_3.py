"""benchmarks.peers.flash_attention_3: what it hands to FlashAttention-3's interface, which a stand-in computes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch

from benchmarks.bench_prefill import Case
from benchmarks.peers import flash_attention_3

HEADS, D_QK, D_V = 3, 192, 128
SCALE = 0.05
MAKERS = (flash_attention_3.prefill, flash_attention_3.prefill_ragged)


def _case(dtype: torch.dtype, sequences: int = 2, queries: int = 5, keys: int = 9, causal: bool = True) -> Case:
    def pack(length: int, dim: int) -> torch.Tensor:
        return torch.randn(sequences * length, HEADS, dim).to(dtype)

    def ends(length: int) -> torch.Tensor:
        return torch.arange(sequences + 1, dtype=torch.int32) * length

    packs = pack(queries, D_QK), pack(keys, D_QK), pack(keys, D_V)
    return Case(sequences, queries, keys, causal, *packs, ends(queries), ends(keys), SCALE)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """[length, heads, dim] each, in float64; causal to the bottom right."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    if causal:
        unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())


def _exact(case: Case) -> torch.Tensor:
    packs = case.query.split(case.queries), case.key.split(case.keys), case.value.split(case.keys)
    return torch.cat([_attention(*pack, case.scale, case.causal) for pack in zip(*packs, strict=True)])


class _Interface(types.ModuleType):
    """flash_attn_interface, with the names and order of its parameters (hopper/flash_attn_interface.py)."""

    def __init__(self) -> None:
        super().__init__("flash_attn_interface")
        self.__spec__ = types.SimpleNamespace(name="flash_attn_interface")  # type: ignore[assignment]
        self.descales: list[torch.Tensor | None] = []

    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None
    ):
        assert q.ndim == k.ndim == v.ndim == 4 and len(q) == len(k) == len(v)
        self.descales = [q_descale, k_descale, v_descale]
        out = [_attention(*pack, softmax_scale, causal) for pack in zip(q, k, v, strict=True)]
        return torch.stack(out).to(torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    ):
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max_seqlen_q, max_seqlen_k) == (max(lengths_q), max(lengths_k))
        self.descales = [q_descale, k_descale, v_descale]
        packs = q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
        out = [_attention(*pack, softmax_scale, causal) for pack in zip(*packs, strict=True)]
        return torch.cat(out).to(torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> _Interface:
    stand_in = _Interface()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    return stand_in


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", flash_attention_3.DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_both_entries_compute_the_case(interface: _Interface, make: Callable, dtype: torch.dtype, causal: bool) -> None:
    case = _case(dtype, causal=causal)
    launch = make(case)
    got = launch().view(-1, HEADS, D_V).double()
    error = (got - _exact(case)).norm() / _exact(case).norm()
    assert error < 2e-3 * (1 if dtype is torch.float16 else 2)  # a rounding to 8 digits, to 11 in fp16


@pytest.mark.parametrize("make", MAKERS)
def test_8_bits_have_a_scale_for_each_sequence_and_head(interface: _Interface, make: Callable) -> None:
    make(_case(torch.float8_e4m3fn))()
    for descale in interface.descales:
        assert descale is not None and descale.dtype == torch.float32 and descale.shape == (2, HEADS)
        assert bool((descale == 1).all())
    make(_case(torch.bfloat16))()
    assert interface.descales == [None] * 3


@pytest.mark.parametrize("make", MAKERS)
def test_e5m2_is_left_out(interface: _Interface, make: Callable) -> None:
    assert make(_case(torch.float8_e5m2)) is None


@pytest.mark.parametrize("make", MAKERS)
def test_it_must_be_installed(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        make(_case(torch.bfloat16))
