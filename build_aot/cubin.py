"""What the GPU code inside a library says about itself: its architecture, and what each variant's code uses.

Read from the CUDA ELF images alone, so that no CUDA toolkit is needed. The layout of `.nv.info` (records of format,
attribute, payload) and the SASS opcodes of local loads and stores have been stable from sm_70 to sm_103; where a
CUDA image lacks what is looked for, reading fails rather than reporting zero.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from tsmla.loading.elf import EM_CUDA, MAGIC, SHT_SYMTAB, STT_FUNC, Elf

from .errors import BuildError

RESOURCES = (
    "gpu_kernels",
    "code_bytes",
    "threads",
    "registers",
    "barriers",
    "static_shared_bytes",
    "parameter_bytes",
    "stack_bytes",
    "local_bytes",
    "spill_stores",
    "spill_loads",
    "wgmma",
    "wgmma_waits",
    "tcgen05_mma",
    "tcgen05_mma_2cta",
    "tcgen05_ld",
    "tcgen05_st",
    "tma_loads",
    "tma_stores",
    "setmaxnreg",
)
"""Keys of a kernel's resources. threads, registers, barriers, static_shared_bytes and parameter_bytes are the maximum
over the variant's GPU kernels, the others the sum. threads is the block size the code is compiled for (0: not stated),
registers are per thread. static_shared_bytes counts what the code declares, not what a launch adds. spill_stores and
spill_loads count instructions that write or read local memory; wgmma, tcgen05_*, tma_* and setmaxnreg count the
instructions of that kind in the code, wgmma_waits those that wait for wgmma, tcgen05_mma_2cta those of tcgen05_mma that
two CTAs execute together."""
FORBIDDEN = ("stack_bytes", "local_bytes", "spill_stores", "spill_loads")
"""Resources that have to be zero in everything that ships."""

_MAXIMA = {"threads", "registers", "barriers", "static_shared_bytes", "parameter_bytes"}
_REGISTERS, _FRAME_SIZE, _MIN_STACK = 0x2F, 0x11, 0x12
_MAX_THREADS, _REQUIRED_THREADS, _PARAMETERS, _BARRIERS = 0x05, 0x10, 0x19, 0x4C
_INSTRUCTION_BYTES = 16
_OPCODES = {
    "spill_stores": (0xFFF, 0x387),  # STL
    "spill_loads": (0xFFF, 0x983),  # LDL
    "wgmma": (0x1FC, 0x1F0),  # HGMMA 0x1F0, QGMMA 0x1F3
    "wgmma_waits": (1 << 80 | 0x1FF, 1 << 80 | 0x1C5),  # WARPGROUP.DEPBAR
    "tcgen05_mma": (0x1FF, 0x1EA),  # UTCHMMA, UTCQMMA
    "tcgen05_mma_2cta": (1 << 85 | 0x1FF, 1 << 85 | 0x1EA),  # UTC?MMA.2CTA
    "tcgen05_ld": (0x1FF, 0x1EE),  # LDTM
    "tcgen05_st": (0x1FF, 0x1ED),  # STTM
    "tma_loads": (0x1FF, 0x1B4),  # UTMALDG
    "tma_stores": (0x1FF, 0x1B5),  # UTMASTG
    "setmaxnreg": (0x1FF, 0x1C8),  # USETMAXREG
}
"""Resource -> (mask, value) of the 128-bit instructions it counts. Operand forms of an instruction differ in bits 9 to
11 of its opcode. As cuobjdump 13 names them in kernels for sm_90a, sm_100a and sm_103a."""
_ABI_WITH_NOTE = 8


def images(path: Path) -> list[Elf]:
    """The CUDA ELF images inside a host object or library, in file order."""
    data = path.read_bytes()
    found, start = [], data.find(MAGIC, 1)
    while start >= 0:
        if data[start + 18 : start + 20] == EM_CUDA.to_bytes(2, "little"):
            image = Elf(data[start:])
            found.append(image)
            start += image.length - 1
        start = data.find(MAGIC, start + 1)
    return found


def arch(image: Elf) -> str:
    """Architecture that the image was compiled for, such as sm_90a, as the compiler recorded it."""
    if image.abi_version < _ABI_WITH_NOTE:
        return f"sm_{image.flags & 0xFF}{'a' if image.flags & 0x800 else ''}"
    note = image.section(".note.nv.tkinfo")
    named = re.search(rb"-arch (sm_\d+[a-z]?)", note.data) if note else None
    number = image.flags >> 8 & 0xFF
    if named is None:
        return f"sm_{number} (no compiler note)"
    found = named.group(1).decode()
    return found if re.sub(r"\D", "", found) == str(number) else f"{found} (but ELF flags say sm_{number})"


def resources(image: Elf) -> dict[str, int]:
    """What the image's kernels use, by the names of RESOURCES. Raises BuildError when the image does not say."""
    total = dict.fromkeys(RESOURCES, 0)
    for one in each_kernel(image):
        total = {key: max(total[key], one[key]) if key in _MAXIMA else total[key] + one[key] for key in RESOURCES}
    return total


def each_kernel(image: Elf) -> list[dict[str, int]]:
    """What each of the image's kernels uses, by the names of RESOURCES. Raises BuildError when the image does not
    say."""
    symbols = image.symbols(SHT_SYMTAB)
    texts = {s.name.removeprefix(".text."): s for s in image.sections if s.name.startswith(".text.")}
    kernels = [s.name for s in symbols if s.type == STT_FUNC and s.name in texts]
    info = image.section(".nv.info")
    if not kernels or info is None:
        raise BuildError("a CUDA image holds no kernel or no .nv.info section: its resources cannot be read")
    found = []
    for name in kernels:
        index = 1 + next(i for i, s in enumerate(symbols) if s.name == name and s.type == STT_FUNC)
        said = _about_symbol(info.data, index)
        own = image.section(f".nv.info.{name}")
        if own is None or (missing := {_REGISTERS, _FRAME_SIZE, _MIN_STACK} - said.keys()):
            raise BuildError(f"the CUDA image says too little about {name}: {missing if own else 'no .nv.info of it'}")
        launch = dict(_records(own.data))
        one: dict[str, int] = {
            "gpu_kernels": 1,
            "code_bytes": texts[name].size,
            "threads": _product(launch.get(_REQUIRED_THREADS) or launch.get(_MAX_THREADS)),
            "registers": said[_REGISTERS],
            "barriers": max(launch.get(_BARRIERS, b"\0")[0], texts[name].flags >> 20 & 0x7F),
            "static_shared_bytes": _size(image, f".nv.shared.{name}"),
            "parameter_bytes": int.from_bytes(launch.get(_PARAMETERS, b""), "little"),
            "stack_bytes": max(said[_FRAME_SIZE], said[_MIN_STACK]),
            "local_bytes": _size(image, f".nv.local.{name}"),
            **_instructions(texts[name].data),
        }
        found.append(one)
    return found


def _size(image: Elf, name: str) -> int:
    section = image.section(name)
    return section.size if section else 0


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of every record; the payload of a short record is its two value bytes."""
    at = 0
    while at + 4 <= len(info):
        layout, attribute = info[at], info[at + 1]
        payload = info[at + 2 : at + 4]
        at += 4
        if layout == 4:
            size = int.from_bytes(payload, "little")
            payload = info[at : at + size]
            at += size
        yield attribute, payload


def _about_symbol(info: bytes, index: int) -> dict[int, int]:
    """attribute -> value of the module's records about one symbol."""
    pairs = [(attribute, struct.unpack("<II", payload)) for attribute, payload in _records(info) if len(payload) == 8]
    return {attribute: value for attribute, (symbol, value) in pairs if symbol == index}


def _product(block: bytes | None) -> int:
    return math.prod(struct.unpack("<III", block)) if block else 0


def _instructions(code: bytes) -> dict[str, int]:
    """How many instructions of each kind the code holds."""
    words = [code[at : at + _INSTRUCTION_BYTES] for at in range(0, len(code), _INSTRUCTION_BYTES)]
    numbers = [int.from_bytes(word, "little") for word in words]
    return {name: sum(n & mask == value for n in numbers) for name, (mask, value) in _OPCODES.items()}
