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
    data = library.read_bytes()
    for match in re.finditer(re.escape(MAGIC), data):
        start = match.start()
        if data[start + 18 : start + 20] == EM_CUDA.to_bytes(2, "little"):
            image = Elf(data[start:])
            number = image.flags >> (8 if image.abi_version >= _NUMBER_IN_SECOND_BYTE else 0) & 0xFF
            for section in image.sections:
                if section.name.startswith(".text."):
                    yield Kernel(section.name.removeprefix(".text."), f"sm_{number}a", section.data, image)
