"""Reads what a library says of its kernels beside their code: parameters, shared memory, constants, threads."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

from tsmla.loading.elf import EM_CUDA, MAGIC, Elf

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


def kernels(library: Path) -> dict[str, Kernel]:
    """Return the kernels in a library or object by name."""
    data = library.read_bytes()
    found = {}
    for match in re.finditer(re.escape(MAGIC), data):
        if data[match.start() + 18 : match.start() + 20] == EM_CUDA.to_bytes(2, "little"):
            image = Elf(data[match.start() :])
            for section in image.sections:
                if section.name.startswith(".text.") and section.size:
                    kernel = _kernel(image, section.name.removeprefix(".text."))
                    found[kernel.name] = kernel
    return found


def _kernel(image: Elf, name: str) -> Kernel:
    attributes = _attributes(image, name)
    parameters = {}
    for content in attributes.get(_PARAMETER, ()):
        _, ordinal, offset, size = struct.unpack("<IHHI", content)
        parameters[ordinal] = (offset, size >> 18)
    first, length = struct.unpack_from("<HH", attributes[_BANK][0], 4)
    threads = attributes.get(_THREADS)
    shared = image.section(f".nv.shared.{name}")
    constants = image.section(f".nv.constant2.{name}")
    code = image.section(f".text.{name}")
    assert code is not None
    return Kernel(
        name,
        _architecture(image),
        code.data,
        tuple(parameters[ordinal] for ordinal in sorted(parameters)),
        first,
        length,
        struct.unpack("<III", threads[0]) if threads else None,
        max(RESERVED_SHARED, shared.size if shared else 0),
        constants.data if constants else b"",
    )


def _attributes(image: Elf, name: str) -> dict[int, list[bytes]]:
    section = image.section(f".nv.info.{name}")
    found: dict[int, list[bytes]] = {}
    data, at = section.data if section else b"", 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_BYTES:
            found.setdefault(attribute, []).append(data[at : at + value])
            at += value
    return found


def _architecture(image: Elf) -> str:
    """The image's flags have the number of the architecture, in one of two places by the version of the format."""
    number = image.flags & 0xFF if image.abi_version < 8 else image.flags >> 8 & 0xFF
    return f"sm_{number}a"
