"""Notes, while a kernel is traced, which calls of the kernels' sources each PTX instruction comes from.

Machine code is the same with and without: only columns of `.loc` and comments differ. See `ptx/calls.py`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ptx.calls import written
from ..ptx.model import Call

_COLUMN = re.compile(r"^\s*\.loc\s+\d+\s+\d+\s+(\d+)", re.MULTILINE)
_Frame = tuple[str, str, int, str]
"""File, name, line, and the edge whose method it is, or ""."""
_COLUMNS = 1 << 16
"""Columns that a location can have: LLVM keeps 16 bits."""


class CallSites:
    """The call stacks of one compile, inside of `noted()`, through the functions of one package."""

    def __init__(self, package: Path):
        self._root = f"{package}/"
        self._numbers: dict[tuple[Call, ...], int] = {}
        self._stacks: dict[tuple[_Frame, ...], int] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Give instructions that are traced meanwhile the number of their call stack as the column of their
        location."""
        from cutlass._mlir import ir
        from cutlass._mlir_helpers.op import loc_transform

        def located(loc: Any) -> Any:
            if loc is None or not (frames := self._frames()):
                return loc
            file, _, line, _ = frames[0]
            return ir.Location.file(file, line, self._number(frames))  # type: ignore[attr-defined]

        with loc_transform(located):
            yield

    def comments(self, ptx: str) -> str:
        """Return what a PTX text of this compile must end with: the calls that its instructions come from."""
        used = {int(number) for number in _COLUMN.findall(ptx)}
        return written({number: calls for calls, number in self._numbers.items() if number in used})

    def _frames(self) -> tuple[_Frame, ...]:
        """Return the package's frames, the innermost first."""
        found = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._root):
                found.append((code.co_filename, code.co_name, frame.f_lineno, _edge(frame)))
            frame = frame.f_back
        return tuple(found)

    def _number(self, frames: tuple[_Frame, ...]) -> int:
        if frames not in self._stacks:
            calls = self._calls(frames)
            self._stacks[frames] = self._numbers.setdefault(calls, len(self._numbers) + 1)
            if len(self._numbers) >= _COLUMNS:
                raise OverflowError(f"more than {_COLUMNS} call stacks in one kernel")
        return self._stacks[frames]

    def _calls(self, frames: tuple[_Frame, ...]) -> tuple[Call, ...]:
        """Return the calls of some frames.

        The compiler makes functions of branches and loops. Their frames count as their function's, whose own frame is
        further out and has the name that stands in the source.
        """
        calls: list[Call] = []
        innermost = -1
        inner = edge = ""
        for file, name, line, edge_here in frames:
            source = _source(file)
            innermost = line if innermost < 0 else innermost
            if name == source.function_at(line):
                where = Path(file).relative_to(self._root).with_suffix("").as_posix()
                callee = f"{edge}.{inner}" if edge else source.callee_at(innermost, inner)
                calls.append(Call(f"{where}.{name}", innermost, callee))
                innermost, inner, edge = -1, name, edge_here
        return tuple(calls)


def _edge(frame: types.FrameType) -> str:
    """Return the name that a kernel's table of edges gives to the object whose method this is."""
    if frame.f_code.co_varnames[:1] != ("self",):
        return ""
    return str(getattr(getattr(frame.f_locals["self"], "spec", None), "name", ""))


class _Source:
    """A parsed source file: which function, and which call, stands at a line."""

    def __init__(self, text: str):
        nodes = list(ast.walk(ast.parse(text)))
        self._functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]

    def function_at(self, line: int) -> str:
        """Return the name of the innermost function at a line, "" outside of functions."""
        around = [node for node in self._functions if _first_line(node) <= line <= (node.end_lineno or 0)]
        return max(around, key=lambda node: node.lineno).name if around else ""

    def callee_at(self, line: int, name: str) -> str:
        """Return what is called at a line, as written, with no more than its last two names, such as
        "k_edge.wait_full".

        That is the call of the function `name`; without one, the outermost of the calls that begin last.
        """
        around = [node for node in self._calls if node.lineno <= line <= (node.end_lineno or 0)]
        named = [node for node in around if name and _last(node.func) == name]
        if not around:
            return ""
        node = max(named or around, key=lambda node: (node.lineno, -node.col_offset))
        if isinstance(node.func, ast.Attribute):
            return f"{_last(node.func.value)}.{node.func.attr}"
        return _last(node.func)


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(node.lineno for node in function.decorator_list)])


def _last(node: ast.expr) -> str:
    """Return the last name of a dotted expression, with an index if it has one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return f"{_last(node.value)}[{''.join(ast.unparse(node.slice).split())}]"
    return node.id if isinstance(node, ast.Name) else f"{_last(node.func)}()" if isinstance(node, ast.Call) else ""


def function_at(file: str, line: int) -> str:
    """Return the name of the innermost function at a line of a source file, "" outside of functions."""
    return _source(file).function_at(line)


@functools.cache
def _source(file: str) -> _Source:
    return _Source(Path(file).read_text("utf-8"))
