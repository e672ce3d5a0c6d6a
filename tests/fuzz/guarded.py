"""Tensors that lie within larger ones, whose other bytes are known: nothing may read or change those."""

from __future__ import annotations

import torch

FILL = 0xFF
"""Byte of everything around a tensor: NaN in all formats that kernels read, -1 in integers."""
_MARGIN = 256
"""Bytes before and after a tensor, at least."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Memory(dict[str, "Guarded"]):
    """The tensors of a call by name, whose addresses miss multiples of 256 by so many bytes for each 1 of `offset`: 4
    where they have content, 16 where they have none, and nothing else is said."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self._offset = offset

    def put(
        self, name: str, content: torch.Tensor, strides: tuple[int, ...] | None = None, offset: int | None = None
    ) -> torch.Tensor:
        """Make a tensor that holds `content`."""
        misses = 4 * self._offset if offset is None else offset
        self[name] = Guarded(tuple(content.shape), content.dtype, strides, content, misses)
        return self[name].tensor

    def space(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
        offset: int | None = None,
    ) -> torch.Tensor:
        """Make a tensor to be written."""
        misses = 16 * self._offset if offset is None else offset
        self[name] = Guarded(shape, dtype, strides, None, misses)
        return self[name].tensor


class Guarded:
    """A tensor on the GPU with guard bytes before, behind and between its elements.

    content: what it holds, on the CPU; None for nothing but FILL. strides: in elements. offset: bytes by which its
    address misses a multiple of 256.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
        content: torch.Tensor | None = None,
        offset: int = 0,
    ) -> None:
        self._layout = (shape, strides or contiguous(shape))
        self._dtype = dtype
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(*self._layout, strict=True))
        self._bytes = slice(_MARGIN + offset, _MARGIN + offset + span * dtype.itemsize)
        self._before = torch.full((2 * _MARGIN + offset + span * dtype.itemsize,), FILL, dtype=torch.uint8)
        if content is not None and span:
            self._view(self._before).copy_(_raw(content))
        self._memory = self._before.to("cuda")
        self.tensor = self._view(self._memory).view(dtype)

    def blank(self) -> None:
        """Put zeros into its elements, which are allowed in whatever operators read."""
        if self._bytes.start < self._bytes.stop:
            with torch.inference_mode():  # where tensors may be written whatever mode they were made in
                self._view(self._memory).zero_()

    def restore(self) -> None:
        """Put back what it and the bytes around it held at first."""
        with torch.inference_mode():
            self._memory.copy_(self._before)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        """The elements in a copy of the whole, as integers."""
        return memory[self._bytes].view(_INTEGERS[self._dtype.itemsize]).as_strided(*self._layout)

    def changed(self, may_change: torch.Tensor | None = None) -> str | None:
        """Which bytes of the whole changed that must not, or None. may_change: of the elements, those that may."""
        after = self._memory.cpu()
        if may_change is not None and self._bytes.start < self._bytes.stop:
            elements = self._view(after)
            elements.copy_(torch.where(may_change, self._view(self._before), elements))
        wrong = (after != self._before).nonzero().flatten()
        if not len(wrong):
            return None
        start, stop = self._bytes.start, self._bytes.stop
        where = f"bytes {wrong[0] - start} to {wrong[-1] - start}"
        return f"{len(wrong)} of its bytes and those around it changed, {where} of {stop - start}"


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return torch.empty(shape, device="meta").stride()


LAYOUTS = ("contiguous", "gaps", "heads first", "odd where single")


def strides(layout: str, shape: tuple[int, int, int], itemsize: int) -> tuple[int, ...]:
    """Strides of a [tokens, heads, dim] tensor that operators must accept: all but the last multiples of 16 bytes, or
    of anything where there is but one token or head."""
    tokens, heads, dim = shape
    gap = 16 // itemsize
    if layout == "gaps":
        head = dim + gap
        return heads * head + 2 * gap, head, 1
    if layout == "heads first":
        return dim, tokens * dim, 1
    if layout == "odd where single":
        plain = contiguous(shape)
        return tuple(3 if size == 1 else stride for size, stride in zip(shape[:2], plain, strict=False)) + plain[2:]
    return contiguous(shape)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])
