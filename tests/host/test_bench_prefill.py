"""What bench_prefill counts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_prefill import DIMS, Case


@pytest.mark.parametrize("d_qk, d_v, heads", [(192, 128, 128), (256, 256, 64)])
def test_work_is_counted_by_pairs_that_attend(monkeypatch, d_qk, d_v, heads):
    made = {name: getattr(torch, name) for name in ("randn", "arange", "empty")}
    for name, function in made.items():
        monkeypatch.setattr(torch, name, lambda *a, f=function, **k: f(*a, **{**k, "device": "meta"}))
    queries, keys = 5, 7
    for causal, pairs in ((False, queries * keys), (True, 3 + 4 + 5 + 6 + 7)):
        case = Case.make(2, queries, keys, causal, torch.bfloat16, d_qk)
        assert case.query.shape == (2 * queries, heads, d_qk) and case.key.shape == (2 * keys, heads, d_qk)
        assert case.value.shape == (2 * keys, heads, d_v) and case.output().shape == (2 * queries, heads, d_v)
        assert case.tflop == pytest.approx(2 * pairs * 2 * heads * (d_qk + d_v) / 1e12)
        assert case.scale == d_qk**-0.5
    assert DIMS[d_qk] == (d_v, heads)
