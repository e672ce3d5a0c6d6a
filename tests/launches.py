"""Launches that a recorder kept, made comparable: what a face launches beside what an operator called directly does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusing import Recorder
from tsmla import resolve

SMS = 132
DECODE_WORKSPACE, DECODE_RESULTS = 9, (7, 8)
"""Places among a decode kernel's arguments."""
PREFILL_RESULTS = (3, 4)
ROOM = torch.empty(2**25, dtype=torch.uint8)
"""A workspace for any call here; nothing is written to it."""


def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have `SMS` SMs."""
    properties = types.SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def launched(recorder: Recorder, call: Callable[[], Any]) -> tuple[Any, tuple, Any]:
    """(what a call gave, what its one launch was given, its variant)."""
    resolve.forget()
    recorder.launches.clear()
    recorder.variants.clear()
    result = call()
    (launch,) = recorder.launches
    return result, launch, recorder.variants[-1]


def alike(face: tuple, operator: tuple, results: tuple[int, ...], workspace: int | None = None) -> None:
    """Assert that two launches are of the same arguments. Results are new memory of the same layout; a workspace may be
    another."""
    assert len(face) == len(operator)
    for place, (got, want) in enumerate(zip(face, operator, strict=True)):
        assert type(got) is type(want), place
        if not isinstance(want, torch.Tensor):
            assert got == want, place
        elif place == workspace:
            assert got.dtype in (torch.int8, torch.uint8)
        else:
            assert (got.shape, got.dtype) == (want.shape, want.dtype), place
            if place not in results:
                assert torch.equal(_bits(got), _bits(want)), place


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def distinct(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Elements that differ from row to row, so that a wrong view shows."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 251 - 125).view(shape).div(64).to(dtype)
