"""Reads which line of the PTX text each instruction of machine code comes from, where a library was compiled to say it
(`-lineinfo`).

The section has DWARF line programs, version 2, one for each kernel; a relocation says for which.
"""

from __future__ import annotations

import struct

from tsmla.loading.elf import SHT_SYMTAB, Elf

SECTION = ".nv_debug_line_sass"
_ADVANCE_ADDRESS, _ADVANCE_LINE, _FILE, _COLUMN, _CONSTANT_ADDRESS, _FIXED_ADDRESS = 2, 3, 4, 5, 8, 9
_END, _SET_ADDRESS = 1, 2


def lines_of(image: Elf, entry: str) -> dict[int, int]:
    """Return address -> line of the PTX for a kernel of an image; an address that is not there goes with the last one
    before it. Empty where the image does not say."""
    program, relocated = image.section(SECTION), image.section(f".rela{SECTION}")
    if program is None or relocated is None:
        return {}
    symbols = image.symbols(SHT_SYMTAB)
    kernels = {}
    for place, info, _ in struct.iter_unpack("<QQq", relocated.data):
        section = image.sections[symbols[(info >> 32) - 1].section].name
        kernels[place] = section.removeprefix(".text.")
    found: dict[int, int] = {}
    data, at = program.data, 0
    while at + 10 <= len(data):
        length, _, header = struct.unpack_from("<IHI", data, at)
        _program(data, at + 10, at + 10 + header, at + 4 + length, kernels, entry, found)
        at += 4 + length
    return found


def _program(
    data: bytes, header: int, at: int, end: int, kernels: dict[int, str], entry: str, found: dict[int, int]
) -> None:
    """Run one line program, as DWARF 2 has it, and keep the lines of the entry."""
    step, _, base, span, first = struct.unpack_from("<BBbBB", data, header)
    operands = data[header + 5 : header + 4 + first]
    address, line, kernel = 0, 1, ""

    def number(signed: bool = False) -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    while at < end:
        code = data[at]
        at += 1
        if code >= first:
            address += (code - first) // span * step
            line += base + (code - first) % span
        elif code == 0:
            size = number()
            if data[at] == _SET_ADDRESS:
                address, kernel = struct.unpack_from("<Q", data, at + 1)[0], kernels.get(at + 1, "")
            elif data[at] == _END:
                address, line, kernel = 0, 1, ""
            at += size
            continue
        elif code == _ADVANCE_ADDRESS:
            address += number() * step
            continue
        elif code == _ADVANCE_LINE:
            line += number(signed=True)
            continue
        elif code == _CONSTANT_ADDRESS:
            address += (255 - first) // span * step
            continue
        elif code == _FIXED_ADDRESS:
            address += struct.unpack_from("<H", data, at)[0]
            at += 2
            continue
        elif code != 1:
            for _ in range(operands[code - 1]):
                number()
            continue
        if kernel == entry:
            found[address] = line
