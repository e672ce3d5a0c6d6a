"""Finds the machine code of kernels in the libraries and objects that hold it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tsmla.loading.elf import EM_CUDA, MAGIC, Elf

_NUMBER_IN_SECOND_BYTE = 8
"""The version of the GPU's binary interface since which the architecture's number is in the second byte of the ELF
flags, no longer in the first."""


class Kernel(NamedTuple):
    """The machine code of one kernel, before a driver loads it, and the image that it lies in."""

    entry: str
    architecture: str
    code: bytes
    image: Elf


def kernels(library: Path) -> Iterator[Kernel]:
    """Yield the kernels in a library or object, in its order."""
    for image in map(Elf, images(library)):
        number = image.flags >> (8 if image.abi_version >= _NUMBER_IN_SECOND_BYTE else 0) & 0xFF
        for section in image.sections:
            if section.name.startswith(".text."):
                yield Kernel(section.name.removeprefix(".text."), f"sm_{number}a", section.data, image)


def images(library: Path) -> Iterator[bytes]:
    """Yield the GPU images in a library or object: a library of several variants has one of each, in their order, and
    kernels of different images may have one name."""
    data = library.read_bytes()
    for match in re.finditer(re.escape(MAGIC), data):
        start = match.start()
        if data[start + 18 : start + 20] == EM_CUDA.to_bytes(2, "little"):
            yield data[start : start + Elf(data[start:]).length]


def extracted(library: Path, number: int, target: Path) -> Path:
    """Write image number `number` of a library to a file. Raises ValueError when the library has fewer."""
    found = [*images(library)]
    if number >= len(found):
        raise ValueError(f"{library} has {len(found)} GPU images, and so none of number {number}")
    target.write_bytes(found[number])
    return target
