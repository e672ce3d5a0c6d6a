"""Makes the repository's own packages (build_aot, benchmarks) and the tests' shared references importable.

tsmla and tsmla_kernels are not put on the path here: tests run what is installed, or what PYTHONPATH names.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

for directory in (ROOT, ROOT / "tests"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist hand out files as they are collected, `testpaths` in their order. Those with the fewest tests
    would be last otherwise, and some of these take minutes; so the short files of tests/host are nearly last."""
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Reports travel from one process to another in UTF-8, which has no place for a byte of a path that was no text."""
    return _in_utf8((yield))


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_in_utf8(key): _in_utf8(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_in_utf8, value))
    return value
