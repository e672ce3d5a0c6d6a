"""Tests that run kernels without a GPU, through the operators. None is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "emulator"))  # found here where it is not installed

from tsmla_emulator import pytest_plugin  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(pytest_plugin.__name__):
        config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)
