"""The wheels, end to end: built, audited, installed in a clean environment, asked what they hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
import zipfile
from collections import Counter
from pathlib import Path

import archive
import audit_wheel
import build_wheel
import pytest
import tsmla
import tsmla_kernels
from building import copy_of_the_project
from tsmla.loading import records, toolchain
from tsmla.loading.manifest import MANIFEST_FILE

from build_aot import matrix

RUNTIMES = {
    "newest": [
        "apache-tvm-ffi==0.1.15.post2",
        "nvidia-cutlass-dsl-libs-core==4.8.1",
        "nvidia-cutlass-dsl-libs-cu12==4.8.1",
    ],
    "oldest": [
        "apache-tvm-ffi==0.1.11",
        "nvidia-cutlass-dsl-libs-base==4.7.1",
        "nvidia-cutlass-dsl-libs-cu12==4.7.1",
    ],
}
"""Both ends of what the wheel accepts, without torch and, in the newest, without the compiler."""


@pytest.fixture(scope="package", params=RUNTIMES)
def installed(request, binary_wheel, tmp_path_factory):
    """Run a command in a clean environment that has the binary wheel and the libraries that it links against."""
    directory = tmp_path_factory.mktemp("clean")
    venv.create(directory, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [str(directory / "bin" / program), *map(str, arguments)]
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)

    done = run("pip", "install", "--no-deps", binary_wheel, "typing-extensions", *RUNTIMES[request.param])
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def rewritten(wheel: Path, target: Path, change) -> Path:
    """A copy of the wheel whose entries went through `change(name, bytes)`; None drops the entry. Nothing is
    compressed: that takes longer than the audit."""
    target.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target / wheel.name, "w") as new:
        for entry in old.infolist():
            data = change(entry.filename, old.read(entry))
            if data is not None:
                new.writestr(entry, data)
    return target / wheel.name


def problems_of_files(wheel: Path, root: Path) -> list[str]:
    """The part of the audit that opens no library."""
    archive.unpack(wheel, root)
    return [*audit_wheel.problems_of_files(wheel, root)]


def test_wheels_pass_their_audit(binary_wheel, jit_wheel):
    assert binary_wheel.name == "tsmla-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    assert audit_wheel.problems(binary_wheel) == []
    assert jit_wheel[0].name == "tsmla-0.1.0-py3-none-any.whl"
    assert audit_wheel.problems(jit_wheel[0]) == []


def test_binary_wheel_holds_the_matrix(binary_wheel):
    with zipfile.ZipFile(binary_wheel) as opened:
        described = json.loads(opened.read(f"tsmla/objs/{MANIFEST_FILE}"))
        libraries = {Path(name).name for name in opened.namelist() if name.endswith(".so")}
    assert libraries == {library["file"] for library in described["libraries"]}
    assert libraries == matrix.libraries(matrix.shipped(), "x86_64").keys()
    symbols = [kernel["symbol"] for library in described["libraries"] for kernel in library["manifest"]["kernels"]]
    assert sorted(symbols) == sorted(variant.symbol() for variant in matrix.shipped())


def test_installed_libraries_load_and_answer_without_torch_or_gpu(installed):
    verified = installed("tsmla", "verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    libraries = matrix.libraries(matrix.shipped(), "x86_64")
    for name, kernels in libraries.items():
        assert f"{name}: {len(kernels)} kernels ok" in verified.stdout
    listed = installed("tsmla", "list", "--resources")
    assert listed.returncode == 0, listed.stderr
    found = Counter(word for word in listed.stdout.split() if word.startswith("tsmla_"))
    assert found == Counter(variant.symbol() for variant in matrix.shipped())


def test_installed_library_opens_by_its_own_search_path(installed):
    code = (
        "import ctypes, importlib.util as u, pathlib, sys;"
        "objs = pathlib.Path(u.find_spec('tsmla').origin).parent / 'objs';"
        "[ctypes.CDLL(str(path)) for path in objs.glob('*.so')];"
        "print(len(list(objs.glob('*.so'))), 'tvm_ffi' in sys.modules)"
    )
    done = installed("python", "-c", code)
    assert done.stdout.split() == [str(len(matrix.libraries(matrix.shipped(), "x86_64"))), "False"], done.stderr


def test_jit_wheel_is_quick_and_holds_no_library(jit_wheel, binary_wheel):
    wheel, seconds = jit_wheel
    assert seconds < 15
    with zipfile.ZipFile(wheel) as jit, zipfile.ZipFile(binary_wheel) as binary:
        sources = {name for name in jit.namelist() if ".dist-info/" not in name}
        assert sources == {n for n in binary.namelist() if ".dist-info/" not in n and not n.startswith("tsmla/objs/")}


def test_selftest_records_ship_where_they_are_put(tmp_path, monkeypatch):
    project = copy_of_the_project(tmp_path / "project")
    record = project / "python" / "tsmla" / "records" / "selftest_sm_90a.json"
    record.write_text('{"schema": 1}')
    monkeypatch.setattr(build_wheel, "ROOT", project)
    wheel = build_wheel.build_wheel("jit", tmp_path / "wheels")
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read("tsmla/records/selftest_sm_90a.json") == record.read_bytes()
    assert audit_wheel.problems(wheel) == []
    (found,) = audit_wheel.problems(wheel, of_records=True)
    assert found.startswith("selftest_sm_90a.json records no complete run that passed: ")


@pytest.fixture
def unpacked(tmp_path) -> Path:
    """Both packages as in an unpacked wheel, without selftest records."""
    left_out = shutil.ignore_patterns("objs", "records", "__pycache__")
    for package in (Path(tsmla.__file__).parent, Path(tsmla_kernels.__file__).parent):
        shutil.copytree(package, tmp_path / package.name, ignore=left_out)
    (tmp_path / "tsmla" / "records").mkdir()
    return tmp_path


def test_a_release_has_selftest_records_of_its_own_kernels_or_none(unpacked):
    assert audit_wheel.record_problems(unpacked) == []
    own = {"schema": 1, "full": True, "complete": True, "emulated": False, "ok": True, "gpu": "NVIDIA H200"}
    own |= {"arch": "sm_90a", "date": "2026-11-26", "source_digest": toolchain.source_digest(unpacked)}
    file = unpacked / "tsmla" / "records" / "selftest_sm_90a.json"
    file.write_text(json.dumps(own))
    assert audit_wheel.record_problems(unpacked) == []
    for record, problem in (
        (
            {**own, "source_digest": "f" * 64},
            f"is of kernel sources ffffffffffff, those beside it are {own['source_digest'][:12]}: ",
        ),
        ({**own, "ok": False}, "records no complete run that passed: "),
        ({**own, "emulated": True}, "records no complete run that passed: "),
        ({name: own[name] for name in own if name != "source_digest"}, "cannot be read: KeyError: 'source_digest': "),
        ([], "cannot be read: "),
    ):
        file.write_text(json.dumps(record))
        (found,) = audit_wheel.record_problems(unpacked)
        assert found.startswith(f"selftest_sm_90a.json {problem}") and f"run `{records.COMMAND}` there" in found
    file.write_text(json.dumps(own))
    with open(unpacked / "tsmla_kernels" / "registry.py", "a") as kernels:
        kernels.write("# another\n")
    (found,) = audit_wheel.record_problems(unpacked)
    assert f"is of kernel sources {own['source_digest'][:12]}" in found


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (
            "tsmla/objs/tsmla_pack_sm_90a_x86_64.so",
            lambda data: data[:-1] + b"x",
            "the file changed after it was built",
        ),
        ("tsmla/objs/tsmla_pack_sm_90a_x86_64.so", lambda data: None, "is in the manifest but cannot be read"),
        ("tsmla/objs/manifest.json", lambda data: data[:-9], "manifest.json is not valid JSON"),
        (
            "tsmla_kernels/registry.py",
            lambda data: data + b"#",
            "was not compiled from the kernel sources in this wheel",
        ),
    ],
)
def test_wheel_audit_catches_a_library(binary_wheel, tmp_path, name, change, problem):
    changed = rewritten(binary_wheel, tmp_path / "changed", lambda n, data: change(data) if n == name else data)
    assert any(problem in found for found in audit_wheel.problems(changed))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("tsmla-0.1.0.dist-info/licenses/LICENSE", lambda data: None, "LICENSE is missing"),
        ("tsmla-0.1.0.dist-info/METADATA", lambda data: data.replace(b"torch", b"torch==2.13"), "it requires"),
        ("tsmla-0.1.0.dist-info/WHEEL", lambda data: data.replace(b"2_28", b"2_17"), "WHEEL says tag"),
        ("tsmla/identity/variant.py", lambda data: data + b"#", "does not have the hash that RECORD gives it"),
    ],
)
def test_wheel_audit_catches_a_file(binary_wheel, tmp_path, name, change, problem):
    changed = rewritten(binary_wheel, tmp_path / "changed", lambda n, data: change(data) if n == name else data)
    assert any(problem in found for found in problems_of_files(changed, tmp_path / "unpacked"))


def test_wheel_audit_catches_a_file_that_does_not_belong(binary_wheel, tmp_path):
    target = rewritten(binary_wheel, tmp_path / "changed", lambda name, data: data)
    with zipfile.ZipFile(target, "a") as opened:
        opened.writestr("tsmla/libcute_dsl_runtime.so", b"not ours")
    found = "\n".join(problems_of_files(target, tmp_path / "unpacked"))
    assert "tsmla/libcute_dsl_runtime.so is neither Python source nor a library of ours" in found
    assert "tsmla/libcute_dsl_runtime.so is not in RECORD" in found


@pytest.mark.parametrize("isolated", [True, False])
def test_pip_has_constraints_where_it_installs_build_tools(isolated, monkeypatch, tmp_path):
    given: dict[str, str] = {}

    def stopped(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        given.update(env)
        return subprocess.CompletedProcess(command, 1, "stopped")

    for name in build_wheel.PINNED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", stopped)
    with pytest.raises(RuntimeError, match="stopped"):
        build_wheel.build_wheel("jit", tmp_path, isolated)
    assert {name: given[name] for name in given.keys() & build_wheel.PINNED.keys()} == (
        build_wheel.PINNED if isolated else {}
    )
