"""The parts of a 64-bit little-endian ELF file that tsmla reads: sections, symbols, the dynamic table, alignment.

Nothing is believed before it is checked, as the file may be damaged. Standard library only.
"""

from __future__ import annotations

import dataclasses
import struct

MAGIC = b"\x7fELF\x02\x01"
EM_X86_64, EM_AARCH64, EM_CUDA = 62, 183, 190
SHT_SYMTAB, SHT_NOBITS, SHT_DYNAMIC, SHT_DYNSYM = 2, 8, 6, 11
SHF_EXECINSTR = 4
SHN_UNDEF, STB_GLOBAL, STB_WEAK = 0, 1, 2
STT_FUNC = 2
PT_LOAD = 1
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29
_HEADER_BYTES, _SECTION, _SEGMENT = 64, struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IIQQQQQQ")


class ElfError(ValueError):
    """The bytes are not a complete 64-bit little-endian ELF file."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One section. Name and data are cut out of the image when they are read: damaged headers may all claim the
    whole."""

    type: int
    flags: int
    offset: int
    size: int
    link: int
    _name_at: int
    _names: bytes = dataclasses.field(repr=False)
    _image: bytes = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        return _string(self._names, self._name_at)

    @property
    def data(self) -> bytes:
        """Empty for a section that takes no space in the file, whatever its `size` in bytes."""
        return b"" if self.type == SHT_NOBITS else self._image[self.offset : self.offset + self.size]


@dataclasses.dataclass(frozen=True)
class Symbol:
    name: str
    value: int
    binding: int
    type: int
    section: int


class Elf:
    """One ELF image. `length` is how many of the given bytes belong to it. Raises ElfError."""

    length = 0

    def __init__(self, data: bytes):
        if data[: len(MAGIC)] != MAGIC:
            raise ElfError("no 64-bit little-endian ELF header")
        if len(data) < _HEADER_BYTES:
            raise ElfError("truncated ELF headers")
        self.abi_version = data[8]
        (self.machine,) = struct.unpack_from("<H", data, 18)
        program_offset, section_offset, self.flags = struct.unpack_from("<QQI", data, 32)
        program_size, program_count, header_size, count, names_index = struct.unpack_from("<HHHHH", data, 54)
        tables = [section_offset + count * header_size, program_offset + program_size * program_count]
        self._check_end(len(data), tables)
        if count and header_size < _SECTION.size:
            raise ElfError(f"section headers of {header_size} bytes; they have {_SECTION.size}")
        headers = [_SECTION.unpack_from(data, section_offset + i * header_size) for i in range(count)]
        self._check_end(len(data), [h[4] + h[5] for h in headers if h[1] != SHT_NOBITS])
        if program_count and program_size < _SEGMENT.size:
            raise ElfError(f"program headers of {program_size} bytes; they have {_SEGMENT.size}")
        segments = [_SEGMENT.unpack_from(data, program_offset + i * program_size) for i in range(program_count)]
        self.alignments = [segment[7] for segment in segments if segment[0] == PT_LOAD]
        """Alignment in bytes of each loaded segment: a multiple of the largest page size that can map it."""
        image = data[: self.length]
        names = b""
        if names_index < count and headers[names_index][1] != SHT_NOBITS:
            names = image[headers[names_index][4] :][: headers[names_index][5]]
        self.sections = [Section(h[1], h[2], h[4], h[5], h[6], h[0], names, image) for h in headers]

    def _check_end(self, available: int, ends: list[int]) -> None:
        self.length = max([self.length, *ends])
        if self.length > available:
            raise ElfError(f"truncated ELF file: it ends at byte {available} of {self.length}")

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
