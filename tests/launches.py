"""Launches that a recorder kept, made comparable: what a face launches beside what an operator called directly does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusing import Recorder
from tsmla.identity.arch import Arch
from tsmla.identity.call import OPERATORS
from tsmla.identity.variant import Variant
from tsmla.loading import resolve

SMS = Arch.SM90A.sms
ROOM = torch.empty(2**25, dtype=torch.uint8)
"""A workspace for any call here; nothing is written to it."""


def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have `SMS` SMs."""
    properties = types.SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def launched(recorder: Recorder, call: Callable[[], Any]) -> tuple[Any, dict[str, Any], Variant]:
    """(what a call gave, what its one launch was given by the kernel's names, its variant)."""
    resolve.forget()
    recorder.launches.clear()
    recorder.variants.clear()
    result = call()
    (launch,) = recorder.launches
    variant = recorder.variants[-1]
    names = [argument.name for argument in OPERATORS[variant.family].arguments]
    return result, dict(zip(names, launch, strict=True)), variant


def place_of(name: str, family: str) -> int:
    """The place of a kernel's argument."""
    return [argument.name for argument in OPERATORS[family].arguments].index(name)


def alike(face: dict[str, Any], operator: dict[str, Any], any_workspace: bool = False) -> None:
    """Assert that two launches are of the same arguments. Results are new memory of the same layout; so may a workspace
    be."""
    assert list(face) == list(operator)
    for name, (got, want) in zip(face, zip(face.values(), operator.values(), strict=True), strict=True):
        assert type(got) is type(want), name
        if any_workspace and name == "workspace":
            assert got.dtype in (torch.int8, torch.uint8)
        elif hasattr(want, "__dlpack__"):
            got, want = torch.from_dlpack(got), torch.from_dlpack(want)
            assert (got.shape, got.dtype) == (want.shape, want.dtype), name
            if name not in ("out", "lse"):
                assert torch.equal(_bits(got), _bits(want)), name
        else:
            assert got == want, name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def distinct(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Elements that differ from row to row, so that a wrong view shows."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 251 - 125).view(shape).div(64).to(dtype)
