"""Reports of tests reach the process that collects them, whatever a test logs or draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_text_that_utf_8_cannot_hold(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text("""
import logging

def test_that_passes():
    logging.getLogger("it").warning("no \\udcff")

def test_that_fails():
    assert not "no \\udcff"
""")
    flags = ["-p", "xdist", "-n", "1", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # plugins import torch
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in ended.stdout and r"no \udcff" in ended.stdout, ended.stdout
