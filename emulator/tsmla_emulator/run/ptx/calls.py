"""Reads and writes, in PTX text, the calls of the Python sources that each instruction comes from: more than its `.loc`
can hold.

The compiling process (`host/call_sites.py`) numbers the call stacks that made instructions. The number stands in the
column of `.loc`, and the stacks in comments at the end of the text, the innermost call first:

    //calls 17: parts/pipeline.wait_full:85 arch.mbarrier_wait < sm90/prefill/load.load:61 k_edge.wait_full

Text without such comments, from another compiler, has no calls; its columns mean columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .model import Call, Entry, Source

_LINE = re.compile(r"^//calls (\d+): (.*)$", re.MULTILINE)
_CALL = re.compile(r"(\S+):(\d+) ?(.*)")
_BETWEEN = " < "


def written(stacks: Mapping[int, tuple[Call, ...]]) -> str:
    """Return the comments that say which calls each number stands for; 0 stands for none."""
    lines = []
    for number, stack in stacks.items():
        texts = (f"{call.function}:{call.line} {call.callee}".rstrip() for call in stack)
        lines.append(f"//calls {number}: {_BETWEEN.join(texts)}\n")
    return "".join(lines)


def read(text: str) -> dict[int, tuple[Call, ...]]:
    """Return the stacks by number that `written` has put into a PTX text."""
    found = {}
    for number, stack in _LINE.findall(text):
        parts = (_CALL.fullmatch(part) for part in stack.split(_BETWEEN))
        found[int(number)] = tuple(Call(part[1], int(part[2]), part[3]) for part in parts if part)
    return found


def place_of(entry: Entry, position: int) -> tuple[str, str, str]:
    """Return the function of the sources that an instruction stands in, what that calls there, and the lines."""
    return _place(_source_of(entry, position))


def _source_of(entry: Entry, position: int) -> Source | None:
    """Return the source of an instruction, or of the next one of its kind that says which calls led there.

    The compiler gives no location to `wgmma.fence`, which stands before the products that it is for.
    """
    at = entry.instructions[position].source
    if at is None or at.calls:
        return at
    kind = entry.instructions[position].opcode.partition(".")[0]
    others = (other for other in entry.instructions[position:] if other.opcode.partition(".")[0] == kind)
    return next((other.source for other in others if other.source and other.source.calls), at)


def _place(at: Source | None) -> tuple[str, str, str]:
    """Return function and callee of a site, and the lines of the sources from there to the instruction."""
    if at is None:
        return "", "", ""
    depth = at.asker
    if depth is None:
        return "", "", f"{Path(at.file).name}:{at.line}"
    lines = (f"{call.function.rpartition('.')[0]}.py:{call.line}" for call in reversed(at.calls[: depth + 1]))
    return at.calls[depth].function, at.calls[depth].callee, ", ".join(lines)
