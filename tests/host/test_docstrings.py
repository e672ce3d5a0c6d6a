"""Docstrings of kernels, and of what decides them, begin with the thing or its verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tsmla
import tsmla_kernels

import build_aot

PACKAGE, BUILD = Path(tsmla.__file__).parent, Path(build_aot.__file__).parent
FILES = [
    *sorted(Path(tsmla_kernels.__file__).parent.rglob("*.py")),
    *(PACKAGE / f"{name}.py" for name in ("call", "dtype", "plan", "row_format", "support", "variant")),
    *(BUILD / f"{name}.py" for name in ("compile", "cubin", "link", "load")),
]
UNCLEAR = re.compile(r"(Of|As|By|So|The same)\b")
"""Openings that need the lines around them to be understood."""


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Every string that stands for itself: of modules, classes and functions, and below constants."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_are_understood_with_the_file_closed() -> None:
    found = [(file, line, text) for file in FILES for line, text in docstrings(file)]
    assert len(found) > 1000
    unclear = [f"{file}:{line}: {text[:60]}" for file, line, text in found if UNCLEAR.match(text)]
    assert not unclear, "\n".join(unclear)
