"""What the build tests share, each made once in a test run: a small build by the command line, and the wheels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import build_wheel
import pytest
from building import SMALL, Ran, build_aot
from made_once import made_once
from tsmla.identity.variant import Variant

from build_aot import matrix


@pytest.fixture(scope="package")
def small_variants() -> tuple[Variant, ...]:
    """What `small_build` holds."""
    return matrix.shipped([SMALL["arch"]], [SMALL["family"]])


@pytest.fixture(scope="package")
def small_build(tmp_path_factory) -> tuple[Path, Ran]:
    """One library built from nothing with its PTX, and the run that built it. Copy it before changing it."""

    def make(folder: Path) -> tuple[Path, Ran]:
        out = folder / "objs"
        ran = build_aot("--arch", SMALL["arch"], "--family", SMALL["family"], "--out", out, "--jobs", 2, "--keep-ptx")
        assert ran.status == 0, ran.output
        return out, ran

    return made_once(tmp_path_factory, "small", make)


@pytest.fixture
def own_build(small_build, tmp_path) -> Path:
    """A copy of the small build that a test may change."""
    return Path(shutil.copytree(small_build[0], tmp_path / "objs"))


@pytest.fixture(scope="package")
def binary_wheel(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "binary", lambda folder: build_wheel.build_wheel("binary", folder))


@pytest.fixture(scope="package")
def jit_wheel(tmp_path_factory) -> tuple[Path, float]:
    """The JIT wheel and the seconds of a core that building it took, whatever else ran meanwhile."""

    def make(folder: Path) -> tuple[Path, float]:
        before = os.times()
        wheel = build_wheel.build_wheel("jit", folder)
        return wheel, sum(os.times()[:4]) - sum(before[:4])

    return made_once(tmp_path_factory, "jit", make)
