"""The fixture `gpu` gives one test per architecture and schedule, and the device when asked for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import pytest, torch

@pytest.mark.archs("sm_90a", "sm_103a")
def test_one(gpu):
    x = torch.zeros(3, device="cuda")
    assert x.is_cuda and torch.cuda.get_device_capability() in ((9, 0), (10, 3))
    assert gpu.emulation.arch == gpu.arch

def test_all(gpu):
    pass

def test_none():
    pass
"""


@pytest.fixture
def collected(tmp_path):
    """Run pytest on TEST in a process of its own, the plugin given by name; returns its output."""

    def run(*arguments: str) -> str:
        (tmp_path / "test_it.py").write_text(TEST)
        here = Path(__file__).parents[1]
        path = f"{here}:{here.parent / 'python'}:{here.parent / 'kernels'}"
        environment = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments, str(tmp_path)]
        if "tsmla-emulator" not in {d.name for d in importlib.metadata.distributions()}:
            command[3:3] = ["-p", "tsmla_emulator.pytest_plugin"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path).stdout

    return run


def test_every_architecture_and_schedule(collected):
    text = collected("--schedules", "eager,late")
    names = [line.split(" ")[0].split("::")[1] for line in text.splitlines() if "::" in line]
    places = [f"{arch}-{schedule}" for arch in ("sm_90a", "sm_100a", "sm_103a") for schedule in ("eager", "late")]
    assert names == [
        *(f"test_one[{place}]" for place in places if "sm_100a" not in place),
        *(f"test_all[{place}]" for place in places),
        "test_none",
    ]
    assert "11 passed" in text


def test_schedules_can_be_chosen(collected):
    assert "test_one[sm_90a-races]" in (unasked := collected()) and "late]" not in unasked
    assert "test_one[sm_90a-random]" in collected("--schedules", "random")
    assert "known: eager, late, random, races" in collected("--schedules", "sometimes")


def test_a_device_that_is_not_there_is_a_skip_with_a_reason(collected):
    text = collected("--gpu", "device", "-rs")
    assert "1 passed, 2 skipped" in text and "needs a CUDA GPU" in text
