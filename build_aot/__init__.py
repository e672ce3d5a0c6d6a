"""Ahead-of-time build: compiles every variant of the shipped matrix, links libraries and audits them. Needs no GPU.

It compiles the sources that it lies beside, whatever else is installed: an editable install of another checkout would
otherwise answer for `tsmla`, ahead of sys.path.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = {"tsmla": _ROOT / "python", "tsmla_kernels": _ROOT / "kernels"}


class _SourcesBeside:
    """Finds this checkout's packages before any other finder is asked."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in _SOURCES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path or [str(_SOURCES[top])], target)


sys.meta_path.insert(0, _SourcesBeside)
