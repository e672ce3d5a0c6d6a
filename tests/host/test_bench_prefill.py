"""What bench_prefill counts, which keys prompts choose, and what the page says of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_prefill_masked
from benchmarks.bench_prefill import DIMS, Case
from benchmarks.crossover_table import up_to


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


@pytest.mark.parametrize("queries, keys, causal", [(40, 40, True), (7, 50, True), (7, 50, False)])
def test_random_lists_name_keys_that_are_seen_once_each(monkeypatch, queries, keys, causal):
    for name in ("rand", "arange"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=function, **k: f(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(bench_prefill_masked, "TOP_K", 9)
    monkeypatch.setattr(bench_prefill_masked, "ROWS_AT_ONCE", 16)
    lists, lengths = bench_prefill_masked.random_lists(queries, keys, causal)
    assert lists.shape == (queries, 9) and lists.dtype == lengths.dtype == torch.int32
    for query, (chosen, length) in enumerate(zip(lists.tolist(), lengths.tolist(), strict=True)):
        seen = query + keys - queries + 1 if causal else keys
        assert length == min(9, seen) == len(set(chosen[:length])) and set(chosen[length:]) <= {-1}
        assert all(0 <= key < seen for key in chosen[:length])
    assert len({tuple(row) for row in lists[-3:].tolist()}) == 3


@pytest.mark.parametrize(
    "ratios, said",
    [
        ({4096: 0.5, 8192: 1.5}, "6K"),
        ({8192: 1.25, 2048: 0.5, 4096: 0.75}, "6K"),
        ({2048: 1.2, 4096: 2.4}, "below 2K"),
        ({2048: 0.2, 16384: 1.0}, "over 16K"),
    ],
)
def test_a_crossover_is_between_the_lengths_that_were_measured(ratios, said):
    assert up_to(ratios) == said
