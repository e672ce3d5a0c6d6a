"""The emulator's pytest plugin for this directory, also where the emulator is on the path but not installed."""

import pytest
from tsmla_emulator import pytest_plugin


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(pytest_plugin.__name__):
        config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)
