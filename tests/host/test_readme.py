"""The README's tables say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tsmla import records
from tsmla.settings import SETTINGS
from tsmla.support import support_table
from tsmla.variant import Arch

from benchmarks.report import performance_section

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_support_table():
    assert support_table() in README


@pytest.mark.parametrize("arch", [Arch.SM100A, Arch.SM103A], ids=str)
def test_what_no_hardware_has_run(arch):
    """Architectures without a selftest record are named, and how to send one."""
    sentence = next((line for line in README.splitlines() if "not yet run on hardware" in line), "")
    assert (arch in sentence) == (not records.record_file(arch).exists())
    assert records.COMMAND in README


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_environment_table(setting):
    name = f"`{setting.name}`" + (f" (also read: `{setting.alias}`)" if setting.alias else "")
    assert f"| {name} | {setting.accepted} | {setting.default} | {setting.meaning} |" in README


def test_at_most_six_variables():
    assert len(SETTINGS) <= 6


def test_performance_section():
    assert performance_section() in README
