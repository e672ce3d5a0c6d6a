"""Replacements for torch.cuda, and for tsmla's search for kernels, while a GPU is emulated."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tsmla.identity.arch import Arch
from tsmla.loading import gpu, resolve
from tsmla.operators import checks, chosen_keys
from tsmla.problems import chosen, decode, prefill

from ..machine import EmulationError
from .capture import Gpu
from .tensor import DEVICE, in_plain_tensors

Replacement = tuple[Any, str, Any]
"""An attribute to replace: the object, the attribute's name, what to put there."""


def torch_cuda(arch: str, gpu: Gpu, processors: int) -> list[Replacement]:
    """Return what operators and tests ask of torch.cuda, answered for the emulated device."""
    name = f"emulated {arch}"
    properties = types.SimpleNamespace(
        name=name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=processors
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": DEVICE.index,
        "get_device_capability": gpu.capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "synchronize": None,
        "current_stream": types.SimpleNamespace(device=DEVICE, cuda_stream=0, stream_id=0),
    }
    replaced: list[Replacement] = [
        (torch.cuda, asked, lambda *_, answer=answer, **__: answer) for asked, answer in answers.items()
    ]
    return replaced + [
        (torch.cuda, name, _refused(name)) for name in ("Stream", "ExternalStream", "Event", "CUDAGraph")
    ]


def _refused(name: str) -> type:
    """Return a class to put in the place of torch.cuda's, whose objects cannot be made: the error says why."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise EmulationError(f"not emulated: torch.cuda.{name}", kind="not implemented")

    return type(name, (), {"__new__": refuse})


def tsmla_search(name: str, kernel: Callable[[Any], Any]) -> list[Replacement]:
    """Return what makes tsmla's operators find emulated kernels: the search for a variant ends with
    `kernel(variant)`. What an operator keeps for good ends with the emulation, too: its memory is not there any more.
    """
    arch = Arch(name)
    return [
        (resolve, "_search", lambda variant: resolve.Resolved(kernel(variant), "emulated")),
        (checks, "arch_of", lambda device: arch),
        (chosen_keys, "_every_key", {}),
        (gpu, "current_arch", lambda: (arch, f"emulated {arch} ({arch.gpus})")),
    ]


def references() -> list[Replacement]:
    """Return what makes references of tsmla's self-tests compute in ordinary tensors."""
    names = [(module, name) for module in (chosen, decode, prefill) for name in ("attend", "judge")]
    return [(module, name, in_plain_tensors(getattr(module, name))) for module, name in names]


@contextlib.contextmanager
def fresh_resolution() -> Iterator[None]:
    """Keep what tsmla resolved before from being used inside, and what it resolves inside from being used
    afterwards."""
    resolve.forget()
    try:
        yield
    finally:
        resolve.forget()
