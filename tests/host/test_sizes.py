"""Kernels stay readable: bounds on functions, states and folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "tsmla_kernels"


def nodes(kind: type) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a kind, with its file and line."""
    for file in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, kind):
                yield f"{file.relative_to(KERNELS)}:{node.lineno} {node.name}", node


def test_functions_have_at_most_12_parameters_and_100_lines():
    found = list(nodes(ast.FunctionDef))
    assert len(found) > 500
    for place, node in found:
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert len(names) - (names[:1] in (["self"], ["cls"])) <= 12, place
        assert node.end_lineno - node.lineno < 100, place


def test_classes_have_at_most_16_fields():
    found = list(nodes(ast.ClassDef))
    assert len(found) > 100
    for place, node in found:
        assert sum(isinstance(child, ast.AnnAssign) for child in node.body) <= 16, place


def test_folders_have_at_most_12_files():
    for folder in (KERNELS, *(path for path in KERNELS.rglob("*") if path.is_dir())):
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= 12, folder
