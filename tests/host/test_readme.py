"""The README's tables say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tsmla.settings import SETTINGS
from tsmla.support import support_table

from benchmarks.report import performance_section

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_support_table():
    assert support_table() in README


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_environment_table(setting):
    name = f"`{setting.name}`" + (f" (also read: `{setting.alias}`)" if setting.alias else "")
    assert f"| {name} | {setting.accepted} | {setting.default} | {setting.meaning} |" in README


def test_at_most_six_variables():
    assert len(SETTINGS) <= 6


def test_performance_section():
    assert performance_section() in README
