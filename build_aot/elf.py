"""The parts of a 64-bit little-endian ELF file that the audit reads: sections, symbols, the dynamic table."""

from __future__ import annotations

import dataclasses
import struct

MAGIC = b"\x7fELF\x02\x01"
EM_X86_64, EM_CUDA = 62, 190
SHT_SYMTAB, SHT_NOBITS, SHT_DYNAMIC, SHT_DYNSYM = 2, 8, 6, 11
SHF_EXECINSTR = 4
SHN_UNDEF, STB_GLOBAL, STB_WEAK = 0, 1, 2
STT_FUNC = 2
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29


class ElfError(ValueError):
    """The bytes are not a complete 64-bit little-endian ELF file."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One section; `data` is empty for a section that takes no space in the file, whatever its `size` in bytes."""

    name: str
    type: int
    flags: int
    size: int
    link: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Symbol:
    name: str
    value: int
    binding: int
    type: int
    section: int


class Elf:
    """One ELF image. `length` is how many of the given bytes belong to it. Raises ElfError."""

    def __init__(self, data: bytes):
        if data[: len(MAGIC)] != MAGIC:
            raise ElfError("no 64-bit little-endian ELF header")
        try:
            self.abi_version = data[8]
            (self.machine,) = struct.unpack_from("<H", data, 18)
            program_offset, section_offset, self.flags = struct.unpack_from("<QQI", data, 32)
            program_size, program_count, header_size, count, names_index = struct.unpack_from("<HHHHH", data, 54)
            headers = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * header_size) for i in range(count)]
        except struct.error:
            raise ElfError("truncated ELF headers") from None
        ends = [section_offset + count * header_size, program_offset + program_size * program_count]
        ends += [h[4] + h[5] for h in headers if h[1] != SHT_NOBITS]
        self.length = max(ends)
        if self.length > len(data):
            raise ElfError(f"truncated ELF file: it ends at byte {len(data)} of {self.length}")
        bodies = [b"" if h[1] == SHT_NOBITS else data[h[4] : h[4] + h[5]] for h in headers]
        names = bodies[names_index] if names_index < len(bodies) else b""
        self.sections = [
            Section(_string(names, h[0]), h[1], h[2], h[5], h[6], body) for h, body in zip(headers, bodies, strict=True)
        ]

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    def symbols(self, table_type: int) -> list[Symbol]:
        """Symbols of the table of this type (SHT_SYMTAB or SHT_DYNSYM), without the empty first one."""
        found = []
        for table in (section for section in self.sections if section.type == table_type):
            names = self.sections[table.link].data
            for name, info, _, section, value, _ in struct.iter_unpack("<IBBHQQ", table.data):
                found.append(Symbol(_string(names, name), value, info >> 4, info & 15, section))
        return found[1:]

    def dynamic_strings(self, tag: int) -> list[str]:
        """Values of every dynamic entry of a tag whose value is a string."""
        for table in (section for section in self.sections if section.type == SHT_DYNAMIC):
            names = self.sections[table.link].data
            return [_string(names, value) for found, value in struct.iter_unpack("<QQ", table.data) if found == tag]
        return []


def _string(table: bytes, start: int) -> str:
    return table[start : table.find(b"\0", start)].decode("utf-8", "replace")


def embedded(data: bytes, machine: int) -> list[Elf]:
    """Every ELF image for `machine` that lies inside `data` after its own header, in file order."""
    found, start = [], data.find(MAGIC, 1)
    while start >= 0:
        if data[start + 18 : start + 20] == machine.to_bytes(2, "little"):
            image = Elf(data[start:])
            found.append(image)
            start += image.length - 1
        start = data.find(MAGIC, start + 1)
    return found
