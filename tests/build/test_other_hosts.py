"""Scripts that try a wheel on other Pythons and hosts: what they read from it, and what they refuse."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import archive
import build_wheel
import offline
import pytest

RANGES = {"nvidia-cutlass-dsl": ">=4.7.1", "apache-tvm-ffi": "<0.2,>=0.1.11", "torch": ""}


@pytest.fixture(scope="module")
def matrix():
    """wheels/test_matrix.py: a test of this folder has its name."""
    path = Path(build_wheel.__file__).with_name("test_matrix.py")
    spec = importlib.util.spec_from_file_location("wheels_test_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_ends_of_every_range(matrix, jit_wheel):
    ranges = archive.requirements(jit_wheel[0])
    assert ranges == RANGES
    del ranges["torch"]
    ends = matrix.ends(ranges, corners=True)
    assert ends["oldest"] == ["nvidia-cutlass-dsl==4.7.1", "apache-tvm-ffi==0.1.11"]
    assert ends["newest"] == ["nvidia-cutlass-dsl>=4.7.1", "apache-tvm-ffi<0.2,>=0.1.11"]
    assert len(ends) == 4 and len(matrix.ends(ranges, corners=False)) == 2
    with pytest.raises(ValueError, match="has no lower end"):
        matrix.ends({"torch": "<3"}, corners=False)


def test_a_wheel_that_does_not_install_fails(matrix, tmp_path):
    broken = tmp_path / "tsmla-0.1.0-py3-none-any.whl"
    broken.write_bytes(b"no wheel")
    passed, said = matrix.try_one(sys.executable, broken, [])
    assert not passed and "pip install" in said


def test_a_folder_lists_what_lies_in_it_and_pip_holds_it_to_that(jit_wheel, tmp_path):
    wheel, folder = jit_wheel[0], tmp_path / "folder"
    offline.fill(wheel, folder, list(RANGES), None, offline.HERE[0])
    listed = (folder / offline.REQUIREMENTS).read_text()
    assert listed == f"tsmla==0.1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--require-hashes", "--find-links"]
    install += [str(folder), "--target", str(tmp_path / "target"), "-r", str(folder / offline.REQUIREMENTS)]
    assert subprocess.run(install, capture_output=True).returncode == 0
    (folder / wheel.name).write_bytes(wheel.read_bytes()[:-1])
    refused = subprocess.run(install, capture_output=True, text=True)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr


def test_what_cannot_be_filled_is_refused(jit_wheel, tmp_path):
    with pytest.raises(RuntimeError, match="numpy cannot be left out: the wheel requires apache-tvm-ffi"):
        offline.fill(jit_wheel[0], tmp_path, ["numpy"], None, offline.HERE[0])
    (tmp_path / "left").write_text("")
    with pytest.raises(RuntimeError, match="is not empty"):
        offline.fill(jit_wheel[0], tmp_path, list(RANGES), None, offline.HERE[0])


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("tsmla-0.1.0-py3-none-manylinux_2_28_x86_64.whl", "x86_64"),
        ("tsmla-0.1.0-py3-none-manylinux_2_28_aarch64.whl", "aarch64"),
        ("tsmla-0.1.0-py3-none-any.whl", offline.HERE[1]),
    ],
)
def test_the_host_that_a_wheel_is_for(name, host):
    assert offline.host_of(Path(name)) == host
