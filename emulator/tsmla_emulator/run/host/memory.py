"""Memory of emulated tensors: blocks with guard zones on both sides, poisoned until somebody writes.

Addresses come from a range that nothing else uses and only grow, so that a run repeats with the same addresses in
another process, and memory that was freed is never mistaken for memory allocated later.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import weakref
from collections.abc import Iterator

GUARD = 4096 + 512
"""Bytes of guard zone before and after each allocation. They make addresses multiples of 512, as CUDA's allocators do,
and no more."""
POISON = 0xFF
"""Byte of memory that nobody wrote: NaN in every float format with 8, 16, 32 or 64 bits, -1 in integers."""
_CANARY = bytes((0xA5, 0x5A, 0xC3, 0x3C)) * (GUARD // 4)
PAGE = 4096
"""Bytes of a page of this process."""
_RANGE = 0x1000_0000_0000
_MAP_FLAGS = 0x02 | 0x20 | 0x4000 | 0x100000
"""Flags of mmap: MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED_NOREPLACE."""
_READ_WRITE = 3
_MOVE_FLAGS = 0x01 | 0x02
"""Flags of mremap: MREMAP_MAYMOVE, MREMAP_FIXED."""
_LENGTH_BITS = 4
"""Leading bits that lengths of mappings have."""
SPARE_BYTES = 256 << 20
"""Most memory that was freed and is kept, for later allocations as long to be moved to their addresses: page by page
from the system, it costs more than most of what is done with it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

_numbers = itertools.count(1)
_next_map = _RANGE
_next_elsewhere: dict[int, int] = {}
_live: dict[int, Block] = {}
_spare: dict[int, list[int]] = {}
_spare_bytes = 0


class GuardError(RuntimeError):
    """Memory next to an allocation was changed; the text says whose, where and how far outside."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One allocation: its first usable address, the number of usable bytes, and its place in time."""

    address: int
    size: int
    number: int

    def content(self) -> bytes:
        """Return a copy of what the block holds now."""
        return ctypes.string_at(self.address, self.size)

    def damage(self) -> str | None:
        """Return where a guard zone was changed, or None."""
        for name, start in (("before", self.address - GUARD), ("after", self.address + self.size)):
            zone = ctypes.string_at(start, GUARD)
            if zone != _CANARY:
                first = next(i for i in range(GUARD) if zone[i] != _CANARY[i])
                offset = GUARD - first if name == "before" else first
                return f"byte {offset} {name} allocation {self.number} ({self.size} bytes at {self.address:#x})"
        return None


def allocate(size: int, address: int | None = None, poisoned: bool = True) -> tuple[Block, ctypes.Array]:
    """Make poisoned memory of `size` bytes, with a buffer over it; it is freed when nobody holds the buffer any more.

    address: where it must lie, as an earlier process had it. Raises MemoryError when that, or anything, cannot be had.
    poisoned: false where the caller writes every byte.
    """
    global _next_map
    start = _next_map if address is None else address - GUARD
    pages = -(-(size + 2 * GUARD) // PAGE)
    if address is None:  # of a few lengths, so that much of what was freed is as long as something later
        step = 1 << max(0, pages.bit_length() - _LENGTH_BITS)
        pages = -(-pages // step) * step
    else:
        _free_spare()  # some may lie there
    mapped = pages * PAGE
    moved = start == _next_map >= _RANGE and _moved(mapped, start)
    if not moved and _libc.mmap(start, mapped, _READ_WRITE, _MAP_FLAGS, -1, 0) != start:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryError(f"{size} bytes of emulated memory at {start + GUARD:#x} cannot be had: {reason}")
    _next_map = max(_next_map, start + mapped + PAGE)
    block = Block(start + GUARD, size, next(_numbers))
    ctypes.memmove(start, _CANARY, GUARD)
    ctypes.memmove(block.address + size, _CANARY, GUARD)
    if poisoned:
        ctypes.memset(block.address, POISON, size)
    buffer = (ctypes.c_ubyte * size).from_address(block.address)
    _live[block.address] = block
    weakref.finalize(buffer, _free, block, start, mapped).atexit = False
    return block, buffer


@contextlib.contextmanager
def addresses_from(first: int) -> Iterator[None]:
    """Make allocations lie, while active, from this address on, behind what was allocated there before.

    Other allocators of a GPU use such addresses: cudaMallocAsync's memory begins at 0x302000000, so that a tensor map
    whose base lies far before its tensor has a base that is no address.
    """
    global _next_map
    usual, _next_map = _next_map, _next_elsewhere.get(first, first)
    try:
        yield
    finally:
        _next_elsewhere[first], _next_map = _next_map, usual


def _free(block: Block, start: int, mapped: int) -> None:
    global _spare_bytes
    del _live[block.address]
    _spare.setdefault(mapped, []).append(start)
    _spare_bytes += mapped
    if _spare_bytes > SPARE_BYTES:
        _free_spare()


def _free_spare() -> None:
    global _spare, _spare_bytes
    freed, _spare, _spare_bytes = _spare, {}, 0
    for length, starts in freed.items():
        for start in starts:
            _libc.munmap(start, length)


def _moved(mapped: int, start: int) -> bool:
    """Move spare memory of so many bytes to an address behind all that was allocated; return whether there was some."""
    global _spare_bytes
    if not (spare := _spare.get(mapped)):
        return False
    kept = spare.pop()
    _spare_bytes -= mapped
    return _libc.mremap(kept, mapped, mapped, _MOVE_FLAGS, start) == start


def block_at(address: int) -> Block | None:
    """Return the live block whose first usable byte this is."""
    return _live.get(address)


def check_guards() -> None:
    """Raise GuardError unless the guard zones of every live block are as they were made."""
    damaged = [found for block in list(_live.values()) if (found := block.damage())]
    if damaged:
        raise GuardError("written outside of allocations: " + "; ".join(damaged))


@dataclasses.dataclass(frozen=True)
class Extent:
    """Addresses [start, end) that one argument of a kernel covers."""

    start: int
    end: int
    name: str
    writable: bool


def merged(extents: list[Extent]) -> list[Extent]:
    """Return extents in ascending order, where those that overlap (slices of one tensor) are one with joined names."""
    result: list[Extent] = []
    for extent in sorted(extents, key=lambda e: (e.start, e.end)):
        if result and extent.start < result[-1].end:
            last = result.pop()
            extent = Extent(
                last.start, max(last.end, extent.end), f"{last.name}+{extent.name}", last.writable or extent.writable
            )
        result.append(extent)
    return result
