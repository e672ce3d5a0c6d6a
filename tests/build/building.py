"""Run the build as a person would: from a copy of the project, by its command line."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from build_wheel import ROOT
from tsmla.identity.arch import Arch

SMALL = {"arch": Arch.SM90A, "family": "pack"}
"""The part of the matrix that compiles quickly."""
BUILT = (".git", ".ci", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".venv")


def copy_of_the_project(target: Path) -> Path:
    """The project without anything that was built, as a fresh clone has it."""
    at_top, anywhere = shutil.ignore_patterns(*BUILT), shutil.ignore_patterns("__pycache__", "objs")

    def ignored(directory: str, names: list[str]) -> set[str]:
        return (at_top if Path(directory) == ROOT else anywhere)(directory, names)

    return Path(shutil.copytree(ROOT, target, ignore=ignored))


@dataclasses.dataclass(frozen=True)
class Ran:
    """A finished command; `output` holds both its streams."""

    status: int
    output: str
    seconds: float


def build_aot(*arguments: str | Path, project: Path = ROOT) -> Ran:
    """Run `python -m build_aot` of a copy of the project; `output` also has a line for every module it imported."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "build_aot", *map(str, arguments)],
        cwd=project,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Ran(done.returncode, done.stdout, time.perf_counter() - start)
