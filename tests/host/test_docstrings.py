"""Docstrings are understood with the file closed: their first words name the thing, or say what it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("python", "kernels", "build_aot", "emulator", "benchmarks", "wheels", "docs", "examples", "tests")
OPENING = re.compile(r"(Of|As|By|So|The same)\b")


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a statement: docstrings, and what stands below a constant or a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].replace("\n", " ")


@pytest.mark.parametrize("root", ROOTS)
def test_docstrings_begin_with_what_the_thing_is(root: str) -> None:
    files = sorted((REPOSITORY / root).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {first_sentence(text)}"
        for path in files
        for line, text in strings(path.read_text())
        if OPENING.match(text)
    ]
    assert not wrong, "name the thing first, in words that need no code beside them:\n" + "\n".join(wrong)
