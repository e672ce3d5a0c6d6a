"""Reads what a library says of its kernels beside their code: parameters, shared memory, constants, threads."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from pathlib import Path

from tsmla.loading.elf import Elf

from . import image
from .lines import lines_of

_BANK, _PARAMETER, _THREADS = 0x0A, 0x17, 0x10
"""Attributes of a section .nv.info.<kernel>."""
_WITH_BYTES = 4
"""The format of attributes that have bytes; others have a number of 16 bits."""
RESERVED_SHARED = 0x400


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as its GPU image has it.

    code: its machine code.
    parameters: place in the parameter block and bytes of each parameter, in order. Places are multiples of their
        alignment counted from where constant bank 0 begins, which need not be where PTX has them.
    first_parameter, parameter_bytes: where the block lies in constant bank 0, and how long it is.
    shared_bytes: the system's part and static arrays.
    constants: constant bank 2, what the code reads by address, such as tables of jumps.
    lines: address -> line of the PTX that it was made of, where the library says it (`lines.lines_of`).
    """

    name: str
    architecture: str
    code: bytes
    parameters: tuple[tuple[int, int], ...]
    first_parameter: int
    parameter_bytes: int
    threads: tuple[int, int, int] | None
    shared_bytes: int
    constants: bytes
    lines: Mapping[int, int] = dataclasses.field(default_factory=dict, hash=False)


def kernels(library: Path) -> dict[str, Kernel]:
    """Return the kernels in a library or object by name."""
    return {found.entry: _kernel(found) for found in image.kernels(library) if found.code}


def _kernel(found: image.Kernel) -> Kernel:
    attributes = _attributes(found.image, found.entry)
    parameters = {}
    for content in attributes.get(_PARAMETER, ()):
        _, ordinal, offset, size = struct.unpack("<IHHI", content)
        parameters[ordinal] = (offset, size >> 18)
    first, length = struct.unpack_from("<HH", attributes[_BANK][0], 4)
    threads = attributes.get(_THREADS)
    shared = found.image.section(f".nv.shared.{found.entry}")
    constants = found.image.section(f".nv.constant2.{found.entry}")
    return Kernel(
        found.entry,
        found.architecture,
        found.code,
        tuple(parameters[ordinal] for ordinal in sorted(parameters)),
        first,
        length,
        struct.unpack("<III", threads[0]) if threads else None,
        max(RESERVED_SHARED, shared.size if shared else 0),
        constants.data if constants else b"",
        lines_of(found.image, found.entry),
    )


def _attributes(of: Elf, name: str) -> dict[int, list[bytes]]:
    section = of.section(f".nv.info.{name}")
    found: dict[int, list[bytes]] = {}
    data, at = section.data if section else b"", 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_BYTES:
            found.setdefault(attribute, []).append(data[at : at + value])
            at += value
    return found
