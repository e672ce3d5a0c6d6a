"""The runnable examples, with smaller sizes, give what float64 gives."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.archs("sm_90a")


def names(file: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / file))


def test_prefill_with_cached_prefix(gpu):
    assert 0 < names("prefill_with_cached_prefix.py")["main"](heads=2, prefix=150, new=70) < 0.03


def test_fp8_prefill(gpu):
    assert 0 < names("fp8_prefill.py")["main"](heads=2, tokens=140) < 0.06


def test_decode_in_a_cuda_graph(gpu):
    """Without the graph, which needs a GPU."""
    run = names("decode_in_a_cuda_graph.py")["main"]
    assert 0 < run(batch=2, heads=3, keys=127, steps=2, capture=False) < 0.03


@pytest.mark.parametrize("keys", [70, 300])
def test_chosen_keys(gpu, keys):
    """With 70 keys, a list is as long as the request."""
    assert 0 < names("chosen_keys.py")["main"](batch=2, heads=3, keys=keys, top_k=100) < 0.03


@pytest.mark.parametrize("count", [40, 300])
def test_context_parallel(gpu, count):
    """Both ranks in one process; with 40 keys the second has none."""
    example = names("context_parallel.py")
    q, keys = example["inputs"](heads=3, count=count)
    results = [example["decode_own_keys"](q, keys, rank, 2) for rank in range(2)]
    outs, lses = (torch.stack(of_ranks) for of_ranks in zip(*results, strict=True))
    assert 0 < example["error_of"](example["merged"](outs, lses), q, keys) < 0.03
