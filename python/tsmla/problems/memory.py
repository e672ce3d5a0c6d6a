"""Poisoned memory, which shows who wrote where: results start as NaN between guard bytes, inputs lie between NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

POISON = 0xFF
"""Byte of memory that nobody wrote: NaN in every floating-point dtype, alone or repeated, and -1 in integers."""
_GUARD = 0xA5
_GUARD_BYTES = 4096
_BYTES_AT_ONCE = 1 << 27
"""Bytes of repetitions that are looked at together: more gain nothing, and several processes share a GPU."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, so that NaN equals itself and zeros differ by their sign."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return which elements hold what nobody wrote."""
    unwritten = torch.full((tensor.dtype.itemsize,), POISON, dtype=torch.uint8, device="cuda")
    return bits(tensor) == unwritten.view(_INTEGERS[tensor.dtype.itemsize])


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make poisoned memory to put an input into, with as much poison before and after it."""
    return Memory().allocate(shape, dtype, guard=POISON)


class _Asked(NamedTuple):
    """A tensor that a call asked for; it lies in a block of bytes, between guard bytes.

    gap: elements behind each row (last dimension) that are guard bytes, too.
    scratch: what a call leaves in it is not compared.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gap: int
    scratch: bool

    @property
    def size(self) -> int:
        """Bytes of the tensor, with those behind its rows."""
        *outer, width = self.shape
        return math.prod(outer) * (width + self.gap) * self.dtype.itemsize

    @property
    def block_size(self) -> int:
        """Bytes of the block, with those before and after the tensor: a multiple of any tensor's alignment."""
        return -(-self.size // _GUARD_BYTES) * _GUARD_BYTES + 2 * _GUARD_BYTES

    def within(self, blocks: torch.Tensor) -> torch.Tensor:
        """View the tensor in each of the blocks [.., bytes]."""
        *outer, width = self.shape
        rows = blocks[..., _GUARD_BYTES : _GUARD_BYTES + self.size]
        return rows.unflatten(-1, (*outer, (width + self.gap) * self.dtype.itemsize)).view(self.dtype)[..., :width]

    def fill(self, block: torch.Tensor, byte: int) -> torch.Tensor:
        """Fill the tensor in a block with a byte, and return the block."""
        self.within(block).view(torch.uint8).fill_(byte)
        return block

    def new_block(self, around: int, byte: int) -> torch.Tensor:
        """Make a block with one byte in the tensor, and another around it."""
        return self.fill(torch.full((self.block_size,), around, dtype=torch.uint8, device="cuda"), byte)


class Memory:
    """Gives out poisoned memory between guard bytes, and knows whether they changed."""

    def __init__(self) -> None:
        self.given: list[tuple[_Asked, torch.Tensor]] = []
        """What was asked for, and the block that it lies in."""

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, gap: int = 0, scratch: bool = False, guard: int = _GUARD
    ) -> torch.Tensor:
        """Make a poisoned tensor between guard bytes.

        gap: elements of guard bytes behind each row (last dimension).
        scratch: what a call leaves in it is not compared.
        """
        asked = _Asked(tuple(shape), dtype, gap, scratch)
        block = asked.new_block(guard, POISON)
        self.given.append((asked, block))
        return asked.within(block)

    def overrun(self) -> bool:
        """Whether guard bytes of what was given out have changed."""
        return any(bool((asked.fill(block.clone(), _GUARD) != _GUARD).any()) for asked, block in self.given)


class Room(Memory):
    """Memory of a repetition. It gives out what the first call asked for, in that order."""

    def __init__(self, tensors: Iterable[tuple[_Asked, torch.Tensor]]) -> None:
        super().__init__()
        self._tensors = iter(tensors)

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, gap: int = 0, scratch: bool = False, guard: int = _GUARD
    ) -> torch.Tensor:
        """Return the next tensor, which must be asked for as in the first call."""
        asked, tensor = next(self._tensors)
        if asked != (tuple(shape), dtype, gap, scratch):
            raise RuntimeError(f"a repetition asks for {shape} of {dtype}, where the first call asked for {asked}")
        return tensor


class Repetitions:
    """Memory for repetitions of a call, many side by side.

    They are poisoned and compared together: launches for each of them would take many times as long as the calls.
    """

    def __init__(self, first: Memory) -> None:
        """first: what the first call was given, and has written to."""
        self._asked = [asked for asked, _ in first.given]
        self._poisoned = torch.cat([asked.new_block(_GUARD, POISON) for asked in self._asked])
        self._expected = torch.cat([block for _, block in first.given])
        # All bits of the bytes that are looked at, and none of others.
        self._guards = torch.cat([asked.new_block(0xFF, 0) for asked in self._asked]).view(torch.int64)
        self._results = torch.cat([asked.new_block(0, 0 if asked.scratch else 0xFF) for asked in self._asked])
        self._results = self._results.view(torch.int64)
        self._overrun = torch.zeros((), dtype=torch.bool, device="cuda")
        self._differing = torch.zeros((), dtype=torch.int64, device="cuda")

    def rooms(self, count: int) -> Iterator[Room]:
        """Yield memory for each of `count` calls. A call is over when the next one's memory is asked for."""
        most = max(1, min(count, _BYTES_AT_ONCE // self._poisoned.numel()))
        sizes = [asked.block_size for asked in self._asked]
        for start in range(0, count, most):
            blocks = self._poisoned.repeat(min(most, count - start), 1)
            parts = zip(self._asked, blocks.split(sizes, -1), strict=True)
            for tensors in zip(*(asked.within(part).unbind() for asked, part in parts), strict=True):
                yield Room(zip(self._asked, tensors, strict=True))
            changed = blocks.view(torch.int64) ^ self._expected.view(torch.int64)
            self._overrun |= (changed & self._guards).any()
            self._differing += (changed & self._results).any(-1).sum()

    def overrun(self) -> bool:
        """Whether guard bytes have changed."""
        return bool(self._overrun)

    def differing(self) -> int:
        """How many calls left something else in results than the first one."""
        return int(self._differing)
