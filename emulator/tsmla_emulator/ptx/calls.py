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

from .model import Call

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
