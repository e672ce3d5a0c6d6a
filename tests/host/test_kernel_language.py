"""What kernels' sources must not say, because CuTe DSL compiles it to something else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tsmla_kernels

SOURCES = sorted(Path(tsmla_kernels.__file__).parent.rglob("*.py"))


def assigned(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def hidden(statement: ast.AST) -> Iterator[str]:
    """Names that an assignment has deeper than in one tuple, or starred: the compiler does not see that they exist."""
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        for element in target.elts if isinstance(target, ast.Tuple) else ():
            if isinstance(element, ast.Tuple | ast.Starred):
                yield from assigned(element)


def lost(source: str) -> list[str]:
    """Names that compiled functions first get as `hidden` ones and assign again in a branch or loop: what is assigned
    there is lost (`_visit_target` in ast_preprocessor.py of nvidia-cutlass-dsl 4.8.1)."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any("cute." in ast.unparse(x) for x in function.decorator_list):
            blocks = [x for x in ast.walk(function) if isinstance(x, ast.If | ast.For | ast.While)]
            for statement, name in [(x, name) for x in ast.walk(function) for name in hidden(x)]:
                others = (block for block in blocks if statement not in ast.walk(block))
                found += [name] if any(name in assigned(block) for block in others) else []
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_names_that_branches_assign_are_seen(source: Path) -> None:
    assert lost(source.read_text("utf-8")) == []


def test_a_nested_target_that_a_branch_assigns_is_found() -> None:
    code = "@cute.jit\ndef f(x):\n    a, (b, c) = x\n    if a > 0:\n        {} = 1\n    return b"
    assert lost(code.format("b")) == ["b"] and lost(code.format("a")) == []
    assert lost(code.format("b").replace("(b, c)", "*b")) == ["b"]
