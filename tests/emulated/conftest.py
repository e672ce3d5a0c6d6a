"""Tests that run kernels without a GPU, through the operators. None is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "emulator"))  # found here where it is not installed

from build_wheel import ROOT  # noqa: E402
from tsmla_emulator import pytest_plugin  # noqa: E402
from tsmla_emulator.host.compile import Compiled, compile_for_emulation  # noqa: E402
from tsmla_emulator.host.link import link  # noqa: E402

from build_aot.build import store_of  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(pytest_plugin.__name__):
        config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)


@pytest.fixture(scope="session")
def built_objects() -> Path:
    """Where an editable installation leaves what it built."""
    return ROOT / "build" / "cmake" / "objs"


@pytest.fixture(scope="session")
def compiled_kernels(built_objects):
    """The objects that the installation's libraries are linked from, where they are of these very sources; others are
    compiled, with line information."""
    store = store_of(built_objects)

    def files(variant):
        if store.find(variant) is None or not store.ptx(variant).exists():
            return compile_for_emulation(variant)
        return Compiled(link(store.object(variant)), store.ptx(variant), variant.symbol())

    return files


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)
