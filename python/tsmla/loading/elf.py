"""The parts of a 64-bit little-endian ELF file that tsmla reads: sections, symbols, the dynamic table, alignment.

Nothing is believed before it is checked, as the file may be damaged. Standard library only.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"
EM_X86_64, EM_AARCH64, EM_CUDA = 62, 183, 190
SHT_SYMTAB, SHT_NOBITS, SHT_DYNAMIC, SHT_DYNSYM = 2, 8, 6, 11
SHF_EXECINSTR = 4
SHN_UNDEF, STB_GLOBAL, STB_WEAK = 0, 1, 2
STT_FUNC = 2
PT_LOAD = 1
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29
_HEADER_BYTES = 64
_HEADER, _SECTION = struct.Struct("<QQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SEGMENT, _SYMBOL = struct.Struct("<IIQQQQQQ"), struct.Struct("<IBBHQQ")


class ElfError(ValueError):
    """The bytes are not a complete 64-bit little-endian ELF file."""


class _Header(NamedTuple):
    """The ELF header from its byte 32 on: where the tables of headers lie, and their sizes."""

    program_offset: int
    section_offset: int
    flags: int
    header_bytes: int
    program_bytes: int
    programs: int
    section_bytes: int
    sections: int
    names_index: int


class _SectionHeader(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class _Segment(NamedTuple):
    type: int
    flags: int
    offset: int
    address: int
    physical_address: int
    file_bytes: int
    memory_bytes: int
    alignment: int


class _SymbolEntry(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


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
        header = _Header._make(_HEADER.unpack_from(data, 32))
        self.flags = header.flags
        section_places = _places(header.section_offset, header.section_bytes, header.sections)
        program_places = _places(header.program_offset, header.program_bytes, header.programs)
        self._check_end(len(data), [section_places.stop, program_places.stop])
        if header.sections and header.section_bytes < _SECTION.size:
            raise ElfError(f"section headers of {header.section_bytes} bytes; they have {_SECTION.size}")
        headers = [_SectionHeader._make(_SECTION.unpack_from(data, place)) for place in section_places]
        self._check_end(len(data), [found.end for found in headers if found.type != SHT_NOBITS])
        if header.programs and header.program_bytes < _SEGMENT.size:
            raise ElfError(f"program headers of {header.program_bytes} bytes; they have {_SEGMENT.size}")
        segments = [_Segment._make(_SEGMENT.unpack_from(data, place)) for place in program_places]
        self.alignments = [segment.alignment for segment in segments if segment.type == PT_LOAD]
        """Alignment in bytes of each loaded segment: a multiple of the largest page size that can map it."""
        image = data[: self.length]
        names = b""
        if header.names_index < len(headers) and headers[header.names_index].type != SHT_NOBITS:
            names = image[headers[header.names_index].offset : headers[header.names_index].end]
        self.sections = [Section(h.type, h.flags, h.offset, h.size, h.link, h.name, names, image) for h in headers]

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
            for entry in map(_SymbolEntry._make, _SYMBOL.iter_unpack(table.data)):
                name = _string(names, entry.name)
                found.append(Symbol(name, entry.value, entry.info >> 4, entry.info & 15, entry.section))
        return found[1:]

    def dynamic_strings(self, tag: int) -> list[str]:
        """Values of every dynamic entry of a tag whose value is a string."""
        for table in (section for section in self.sections if section.type == SHT_DYNAMIC):
            names = self.sections[table.link].data
            return [_string(names, value) for found, value in struct.iter_unpack("<QQ", table.data) if found == tag]
        return []


def _places(first: int, step: int, count: int) -> range:
    """Where the entries of a table begin; it stops where the table does."""
    return range(first, first + step * count, step) if step else range(first, first)


def _string(table: bytes, start: int) -> str:
    return table[start : table.find(b"\0", start)].decode("utf-8", "replace")
