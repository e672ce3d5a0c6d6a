"""Refusals in a face's own name, and translations of numbers, layouts and lengths, which the faces share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from ..errors import ArgumentError, UnsupportedError
from ..operators import checks
from ..operators.capture import is_capturing

LARGEST_INT = 2**31 - 1


def refused(face: str, why: str, **arguments: object) -> None:
    """Raise UnsupportedError for the first of some arguments that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{face}: {name} is {checks.spelled(value)}; {why}")


def off(face: str, why: str, **flags: bool | None) -> None:
    """Raise UnsupportedError for the first of some flags that is neither None nor False."""
    for name, value in flags.items():
        if value is not None and checks.flag(face, name, value):
            raise UnsupportedError(f"{face}: {name} is True; {why}")


def word(face: str, name: str, value: str, accepted: Sequence[str]) -> str:
    """Check that an argument is one of the accepted words, and return it."""
    if not isinstance(value, str) or value not in accepted:
        raise ArgumentError(f"{face}: {name} is {checks.spelled(value)}; accepted: {', '.join(accepted)}")
    return value


def number(face: str, name: str, value: float | torch.Tensor) -> float:
    """Return a number, or the element of a floating-point tensor that has one.

    Reading a CUDA tensor waits for the GPU. It is refused while a CUDA graph is captured, whose replays would not read
    it again.
    """
    if not isinstance(value, torch.Tensor):
        return checks.number(face, name, value)
    checks.stored(face, name, value, "a number, or a tensor of one element")
    if value.numel() != 1 or not value.is_floating_point():
        raise ArgumentError(
            f"{face}: {name} has shape {list(value.shape)} and is {value.dtype}; it must be a number, or a "
            "floating-point tensor of one element"
        )
    if value.is_cuda and is_capturing():
        raise UnsupportedError(
            f"{face}: {name} is a CUDA tensor, and a CUDA graph is being captured: the graph's replays would not read "
            f"it again; pass a number (float({name}), read before the capture)"
        )
    return float(value)


def no_skipping(face: str, factor: float | None) -> None:
    """Refuse a threshold for skipping softmax tiles, unless it is None or 0, which skip nothing."""
    name = "skip_softmax_threshold_scale_factor"
    if factor is not None and checks.number(face, name, factor) != 0:
        raise UnsupportedError(f"{face}: {name} is {checks.spelled(factor)}; every key is computed here")


def check_lse(face: str, lse: torch.Tensor, device: torch.device, *shapes: Sequence[int]) -> None:
    """Refuse a tensor that an LSE cannot be written into, or that has none of the accepted shapes."""
    checks.same_device(face, "lse", lse, "query", device)
    checks.dtype_in(face, "lse", lse, (torch.float32,))
    checks.shape(face, "lse", lse, *shapes)
    checks.no_overlap(face, "lse", lse)


def readable(face: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a decode can read: this one, or a copy of it.

    A decode needs a last dimension without gaps, and an address and outer strides that are multiples of 16 bytes.
    """
    checks.stored(face, name, tensor)
    size = tensor.element_size()
    steps = [stride for stride, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if extent > 1]
    apart = tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or any(step * size % 16 for step in steps)
    return tensor.clone(memory_format=torch.contiguous_format) if apart else tensor


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return one view whose last dimension holds two tensors' columns, or None where memory does not have it so: each
    row of `right` must start where the row of `left` ends."""
    alike = left.dtype == right.dtype and left.shape[:-1] == right.shape[:-1] and left.stride() == right.stride()
    if not alike or left.ndim == 0 or left.stride(-1) != 1:
        return None
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return None
    if right.storage_offset() != left.storage_offset() + left.shape[-1]:
        return None
    shape = (*left.shape[:-1], left.shape[-1] + right.shape[-1])
    if any(stride < shape[-1] and size > 1 for stride, size in zip(left.stride()[:-1], shape[:-1], strict=True)):
        return None
    return left.as_strided(shape, left.stride(), left.storage_offset())


def in_their_words(face: str, error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """Return an operator's error as the face's: it adds what the arguments that it names are called there."""
    text = str(error)
    called = [f"{ours} is {theirs} here" for ours, theirs in names.items() if re.search(rf"\b{ours}\b", text)]
    return type(error)(f"{face}: {text} ({', '.join(called)})" if called else f"{face}: {text}")
