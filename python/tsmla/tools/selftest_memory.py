"""Memory that shows who wrote where: results start as NaN between guard bytes, and inputs lie between NaN."""

from __future__ import annotations

import math

import torch

POISON = 0xFF
"""Byte of what nobody wrote: NaN in every dtype of ours, alone or repeated, and -1 in integers."""
_GUARD = 0xA5
_GUARD_BYTES = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals itself and zeros differ by their sign."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements hold what nobody wrote."""
    unwritten = torch.full((tensor.dtype.itemsize,), POISON, dtype=torch.uint8, device="cuda")
    return bits(tensor) == unwritten.view(_INTEGERS[tensor.dtype.itemsize])


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Poison to put an input into, with as much poison before and after it."""
    return Memory().allocate(shape, dtype, guard=POISON)


class Memory:
    """Gives out poisoned memory between guard bytes, and knows whether they changed."""

    def __init__(self) -> None:
        self._guards: list[torch.Tensor] = []

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, gap: int = 0, guard: int = _GUARD
    ) -> torch.Tensor:
        """A tensor; behind each row (last dimension) lie `gap` elements of guard bytes."""
        *outer, width = shape
        size = math.prod(outer) * (width + gap) * dtype.itemsize
        memory = torch.full((size + 2 * _GUARD_BYTES,), guard, dtype=torch.uint8, device="cuda")
        before, inner, after = memory.split([_GUARD_BYTES, size, _GUARD_BYTES])
        rows = inner.view(*outer, (width + gap) * dtype.itemsize)
        tensor, between = rows.split([width * dtype.itemsize, gap * dtype.itemsize], -1)
        tensor.fill_(POISON)
        self._guards += [before, between, after]
        return rows.view(dtype)[..., :width]

    def overrun(self) -> torch.Tensor:
        """Whether guard bytes of what was given out since the last asking have changed: a bool on the GPU."""
        changed = torch.zeros((), dtype=torch.bool, device="cuda")
        for guard in self._guards:
            changed |= (guard != _GUARD).any()
        self._guards.clear()
        return changed
