"""Tests that run kernels without a GPU, through the operators. None is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from built_kernels import OBJECTS, files_in  # puts the emulator on the path
from tsmla_emulator import pytest_plugin
from unwatched import unwatched


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(pytest_plugin.__name__):
        config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)


@pytest.fixture(scope="session")
def built_objects() -> Path:
    return OBJECTS


@pytest.fixture(scope="session")
def compiled_kernels(built_objects):
    return files_in(built_objects)


@pytest.fixture
def values_only(gpu) -> Iterator[None]:
    """Calls of this test are not searched for races: it is about numbers, and others make such calls under watch."""
    with unwatched(gpu):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)
