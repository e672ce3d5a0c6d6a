"""The examples of the README and docs/deployment.md, as tests run them: each has the names that earlier ones left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREFILL, DECODE, PACK = _PYTHON.findall(README)
(GRAPH,) = _PYTHON.findall((ROOT / "docs" / "deployment.md").read_text())
SMALLER = {
    "heads = 128\n": "heads = 2\n",
    "batch, q_len, heads, keys = 8, 2, 16, 6000": "batch, q_len, heads, keys = 2, 2, 3, 130",
    "tokens, heads = 8192, 128": "tokens, heads = 16, 2",
}
"""Sizes in the examples, and those that an emulator takes seconds for."""


def run(example: str, names: dict[str, Any], smaller: bool = False) -> None:
    """Run one example in `names`."""
    if smaller:
        (size,) = (size for size in SMALLER if size in example)
        example = example.replace(size, SMALLER[size])
    exec(compile(example, "example", "exec"), names)


def promised(example: str, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype that an example's comments give for a result, such as `out [1024, 128, 128] bf16`."""
    found = re.search(rf"#.*\b{name} \[([\d, ]+)\] (\w+)", example)
    assert found, f"the example does not say what {name} is"
    return tuple(map(int, found[1].split(","))), found[2]
