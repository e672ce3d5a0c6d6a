"""The fixture `gpu` for this directory, whether the emulator is installed or only on PYTHONPATH."""

from tsmla_emulator.pytest_plugin import gpu, pytest_generate_tests

__all__ = ["gpu", "pytest_generate_tests"]
