"""The command `tsmla` where its output cannot be written, or nobody reads it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from example_variants import python_environment


def test_a_reader_that_stops_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m tsmla show-config | head -n 1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == ""


@pytest.mark.parametrize(("command", "unbuffered"), [("show-config", ""), ("show-config", "1"), ("--help", "")])
def test_output_that_cannot_be_written_is_one_sentence(command: str, unbuffered: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m tsmla {command} > /dev/full"],
        capture_output=True,
        text=True,
        env=python_environment(PYTHONUNBUFFERED=unbuffered),
    )
    assert ran.returncode == 1
    assert re.fullmatch(r"tsmla: the output cannot be written: .*No space left on device\n", ran.stderr)


def test_output_to_nowhere_keeps_the_status() -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m tsmla probe --arch sm_90a --family nothing >&- 2>&-"],
        env=python_environment(),
    )
    assert ran.returncode == 2
