"""Which architectures pip and the wheel recipe ask for, and when progress is seen. A stand-in takes build_aot's place:
it writes what it was asked for where the manifest would be, and compiles nothing."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import build_wheel
import pytest
import sbom
from building import copy_of_the_project
from tsmla.identity.arch import SHIPPED_ARCHS
from tsmla.loading.manifest import MANIFEST_FILE

from build_aot.build import STORE

STAND_IN = f"""
import argparse, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--arch", nargs="+")
parser.add_argument("--out", type=pathlib.Path)
asked, _ = parser.parse_known_args()
print("1 of 2", flush=True)
time.sleep(2)
print("2 of 2", flush=True)
asked.out.mkdir(exist_ok=True)
(asked.out / {MANIFEST_FILE!r}).write_text(" ".join(asked.arch))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the stand-in, which needs no compiler."""
    project = copy_of_the_project(tmp_path_factory.mktemp("stand-in") / "project")
    (project / "build_aot" / "__main__.py").write_text(STAND_IN)
    settings = project / "pyproject.toml"
    settings.write_text(re.sub(r'^build.requires = .*"nvidia.*\n', "", settings.read_text(), flags=re.MULTILINE))
    return project


def asked_for(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"tsmla/objs/{MANIFEST_FILE}").decode()


@pytest.mark.parametrize(
    ("environment", "asked"), [({}, "native"), ({"TSMLA_ARCHS": "sm_103a;sm_90a"}, "sm_103a sm_90a")]
)
def test_pip_asks_for_native_unless_told_and_shows_progress(project, tmp_path, environment, asked):
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", str(tmp_path), str(project)]
    kept = {name: value for name, value in os.environ.items() if name not in ("TSMLA_AOT", "TSMLA_ARCHS")}
    streams: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**kept, **environment}, **streams) as process:
        assert process.stdout
        arrived = {line.strip(): time.perf_counter() for line in process.stdout}
    assert asked_for(*tmp_path.glob("*.whl")) == asked
    assert arrived["2 of 2"] - arrived["1 of 2"] > 1


def test_a_wheel_to_publish_names_every_architecture(project, tmp_path, monkeypatch):
    monkeypatch.setattr(build_wheel, "ROOT", project)
    monkeypatch.setattr(sbom, "document", lambda *_: b"{}")  # the stand-in leaves no libraries to describe
    monkeypatch.setenv("TSMLA_ARCHS", "native")
    assert asked_for(build_wheel.build_wheel("binary", tmp_path)) == " ".join(SHIPPED_ARCHS)


def test_build_aot_writes_each_line_at_once(tmp_path):
    """Into a pipe, where the first line can be read while the build waits for another one of its directory."""
    (tmp_path / STORE).mkdir()
    with open(tmp_path / STORE / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "build_aot", "--arch", "native", "--out", str(tmp_path)]
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        with subprocess.Popen(
            command, cwd=build_wheel.ROOT, env=buffered, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            giving_up = threading.Timer(30, process.kill)
            giving_up.start()
            line = process.stdout.readline()
            giving_up.cancel()
            process.kill()
    assert line.startswith("compiling for sm_")
