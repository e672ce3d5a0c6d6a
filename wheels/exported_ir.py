"""Finds which bytes of a kernel's parameters its host code sets, in the LLVM IR that objects are assembled from.

Parameters are structures on the stack, passed by address. Padding between their members is never set, and holds what
lay there; so is the second half of a tensor map, which is the driver's own. Both differ from call to call.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAP_TYPE = "{ { [16 x i64] } }"
MAP_BYTES = 64
"""How many of a tensor map's 128 bytes are written; see tsmla_emulator/run/host/tensor_map.py."""
_PLAIN = re.compile(r"(ptr)(?: addrspace\(\d+\))?|i(\d+)|(float)|(double)|(half|bfloat)")
_SIZES = (8, 0, 4, 8, 2)
_ARRAY = re.compile(r"\[(\d+) x ")
_LAUNCH = re.compile(r"@_cudaLaunchKernelEx\(ptr [^,]*, ptr [^,]*, ptr [^%]*(%[\w.]+)\)")


class Layout(NamedTuple):
    """How a type lies in memory: bytes, alignment, and the offsets of the bytes that belong to members."""

    size: int
    alignment: int
    members: tuple[int, ...]


def layout(text: str) -> Layout:
    """Return the layout of an LLVM type, the same on x86-64 and aarch64. Raises ValueError for one that is not
    known."""
    found, end = _layout(text, 0)
    if text[end:].strip():
        raise ValueError(f"not one type: {text}")
    return found


def _layout(text: str, at: int) -> tuple[Layout, int]:
    if text[at] == "{":
        return _structure(text, at + 1)
    if array := _ARRAY.match(text, at):
        inner, at = _layout(text, array.end())
        count = range(int(array[1]))
        members = tuple(index * inner.size + offset for index in count for offset in inner.members)
        return Layout(len(count) * inner.size, inner.alignment, members), at + 1
    plain = _PLAIN.match(text, at)
    if plain is None:
        raise ValueError(f"not implemented: type {text[at:]}")
    size = (
        -(-int(plain[2]) // 8)
        if plain[2]
        else next(s for s, named in zip(_SIZES, plain.groups(), strict=True) if named)
    )
    return Layout(size, size, tuple(range(size))), plain.end()


def _structure(text: str, at: int) -> tuple[Layout, int]:
    size, alignment, members = 0, 1, []
    while text[at] != "}":
        if text[at] in " ,":
            at += 1
            continue
        inner, at = _layout(text, at)
        start = -(-size // inner.alignment) * inner.alignment
        members += [start + offset for offset in inner.members]
        size, alignment = start + inner.size, max(alignment, inner.alignment)
    return Layout(-(-size // alignment) * alignment, alignment, tuple(members)), at + 1


def parameters(ir: str) -> list[list[str]]:
    """Return the types of each launch's parameters, in the order of launches in the text."""
    found = []
    for body in re.findall(r"^define [^\n]*\{\n(.*?)^\}", ir, re.MULTILINE | re.DOTALL):
        types = dict(re.findall(r"^  (%\S+) = alloca (.*), align \d+$", body, re.MULTILINE))
        for array in _LAUNCH.findall(body):
            counted = _ARRAY.match(types[array])
            places = {0: array} | {
                int(offset) // 8: name
                for name, offset in re.findall(
                    rf"^  (%\S+) = getelementptr [^\n]*ptr {re.escape(array)}, i64 (\d+)$", body, re.MULTILINE
                )
            }
            found.append([_stored(body, places[index], types) for index in range(int(counted[1] if counted else 0))])
    return found


def _stored(body: str, place: str, types: dict[str, str]) -> str:
    stored = re.findall(rf"^  store ptr (%\S+), ptr {re.escape(place)}, align", body, re.MULTILINE)
    (kind,) = {types[name] for name in stored}
    return kind


def set_bytes(kinds: list[str]) -> list[tuple[int, ...]]:
    """Return the offsets of the bytes that are set in each parameter."""
    return [tuple(range(MAP_BYTES)) if kind == MAP_TYPE else layout(kind).members for kind in kinds]
