"""What a downloader relies on: same bytes from two builds, an SBOM that is true, and tampering that is found."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import archive
import provenance
import pytest
import reproduce
import sbom
import verify_release
from building import SMALL
from tsmla.loading import toolchain
from tsmla.loading.elf import MAGIC, Elf
from tsmla.loading.image import sealed
from tsmla.loading.manifest import MANIFEST_FILE

INFO = "tsmla-0.1.0.dist-info"
LIBRARY = "tsmla/objs/tsmla_pack_sm_90a_x86_64.so"
MANIFEST = f"tsmla/objs/{MANIFEST_FILE}"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

Change = Callable[[Path], object]


@pytest.fixture(scope="package")
def twice(tmp_path_factory) -> tuple[Path, Path]:
    """A binary wheel of one small library, built two times."""
    part = [f"cmake.define.TSMLA_ARCHS={SMALL['arch']}", f"cmake.define.TSMLA_FAMILIES={SMALL['family']}"]
    return reproduce.reproduce("binary", tmp_path_factory.mktemp("twice"), isolated=False, settings=part)


@pytest.fixture(scope="package")
def wheel(twice) -> Path:
    return twice[0]


@pytest.fixture
def forged(wheel, tmp_path) -> Callable[[Change], Path]:
    """Makes the wheel again with files changed, RECORD and layout right: what a careful attacker would leave."""

    def forge(change: Change, with_sbom: bool = False) -> Path:
        unpacked, target = tmp_path / "unpacked", tmp_path / "forged" / wheel.name
        archive.unpack(wheel, unpacked)
        change(unpacked)
        if with_sbom:
            document = sbom.document(wheel.name, unpacked, archive.epoch_of(wheel))
            (unpacked / sbom.path(INFO)).write_bytes(document)
        target.parent.mkdir()
        archive.write(target, unpacked, archive.epoch_of(wheel))
        return target

    return forge


def edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Puts other bytes into a file."""
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


def flip_a_byte_of_the_gpu_code(data: bytes) -> bytes:
    place = Elf(data).sections[-1].offset // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def flip_an_instruction(data: bytes) -> bytes:
    start = data.find(MAGIC, 1)
    code = next(section for section in Elf(data[start:]).sections if section.name.startswith(".text."))
    return flipped(data, start + code.offset + 8)


def flip_a_byte_of_host_code(data: bytes) -> bytes:
    return flipped(data, Elf(data).section(".text").offset)


def flipped(data: bytes, place: int) -> bytes:
    return sealed(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def library_and_its_record(change: Callable[[bytes], bytes]) -> Change:
    """Changes a library, and the manifest beside it so that it has the hash of the changed one."""

    def both(root: Path) -> None:
        data = change((root / LIBRARY).read_bytes())
        said = json.loads((root / MANIFEST).read_text())
        said["libraries"][0] |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        (root / LIBRARY).write_bytes(data)
        (root / MANIFEST).write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")

    return both


def test_two_builds_have_the_same_bytes(twice):
    one, two = reproduce.builds()
    assert one.folder != two.folder and one.umask != two.umask and one.age != two.age
    assert reproduce.differences(*twice) == ([], [])
    assert twice[0].read_bytes() == twice[1].read_bytes()


def test_differences_are_named(wheel, forged):
    other = forged(edit("tsmla/identity/variant.py", lambda data: data + b"#"))
    assert reproduce.differences(wheel, other) == ([], [f"{INFO}/RECORD differs", "tsmla/identity/variant.py differs"])


def test_machine_code_that_ptxas_chose_is_told_from_all_else(wheel, forged):
    """A byte of a kernel's instructions is; one of the host's code is not."""
    chosen, found = reproduce.differences(wheel, forged(library_and_its_record(flip_an_instruction), with_sbom=True))
    assert [sentence.split(" ")[0] for sentence in chosen] == [LIBRARY, f"{INFO}/RECORD", sbom.path(INFO), MANIFEST]
    assert found == []


def test_host_code_that_differs_is_not_taken_for_machine_code_of_the_gpu(wheel, forged):
    chosen, found = reproduce.differences(wheel, forged(library_and_its_record(flip_a_byte_of_host_code)))
    assert chosen == [] and f"{LIBRARY} differs" in found


def test_a_library_alone_and_in_the_full_wheel_has_the_same_bytes(wheel, binary_wheel):
    with zipfile.ZipFile(wheel) as small, zipfile.ZipFile(binary_wheel) as whole:
        assert small.read(LIBRARY) == whole.read(LIBRARY)


def test_sbom_is_true(wheel):
    said = provenance.document_in(wheel)
    with zipfile.ZipFile(wheel) as opened:
        digest = hashlib.sha256(opened.read(LIBRARY)).hexdigest()
        described = json.loads(opened.read(MANIFEST))["libraries"][0]["manifest"]
        assert said["metadata"]["timestamp"] == "1980-01-01T00:00:00Z"
        assert {entry.date_time for entry in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    parts = {c["name"]: c for c in said["components"] if "scope" not in c}
    assert parts.keys() == {LIBRARY}
    assert parts[LIBRARY]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    tools = {c["name"]: c["version"] for c in said["components"] if c.get("scope") == "excluded"}
    assert tools.items() >= described["toolchain"].items()
    assert tools.keys() == {*toolchain.COMPILERS, "scikit-build-core"}
    root = said["metadata"]["component"]
    assert root["purl"] == f"pkg:pypi/tsmla@0.1.0?file_name={wheel.name}"
    assert root["properties"] == [{"name": "tsmla:source_digest", "value": toolchain.source_digest()}]


def test_full_wheel_names_its_assembler(binary_wheel):
    tools = {c["name"]: c.get("version", "") for c in provenance.document_in(binary_wheel)["components"]}
    assert tools["ptxas"].startswith("12.9.")


def test_the_only_time_is_the_one_that_was_asked_for(wheel, tmp_path):
    unpacked, target = tmp_path / "unpacked", tmp_path / wheel.name
    archive.unpack(wheel, unpacked)
    archive.write(target, unpacked, 1_700_000_000)
    assert archive.epoch_of(target) == 1_700_000_000
    said = json.loads(sbom.document(wheel.name, unpacked, 1_700_000_000))
    assert said["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert list(archive.problems(target)) == []


def test_what_was_built_passes(wheel, binary_wheel, jit_wheel):
    for built in (wheel, binary_wheel, jit_wheel[0]):
        assert verify_release.problems(built, sources=True) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edit(LIBRARY, flip_a_byte_of_the_gpu_code), "the file changed after it was built"),
        (library_and_its_record(flip_a_byte_of_the_gpu_code), "is damaged: its bytes hash to"),
        (library_and_its_record(lambda data: sealed(flip_a_byte_of_the_gpu_code(data))), "its SBOM misstates"),
        (edit(MANIFEST, lambda data: data.replace(b'"threads": ', b'"threads": 1')), "describes itself differently"),
        (edit(MANIFEST, lambda data: data[:-9]), "manifest.json is not valid JSON"),
        (lambda root: (root / MANIFEST).unlink(), "holds no finished build"),
        (lambda root: (root / LIBRARY).unlink(), "is in the manifest but cannot be read"),
        (lambda root: (root / "tsmla/objs/more.so").write_bytes(b"x"), "tsmla/objs/more.so is not in the manifest"),
        (lambda root: (root / "tsmla/objs/more.py").write_bytes(b"x"), "tsmla/objs/more.py is not in the manifest"),
        (edit("tsmla_kernels/registry.py", lambda data: data + b"#"), "not compiled from the kernel sources"),
        (edit("tsmla/identity/variant.py", lambda data: data + b"#"), "not compiled from the kernel sources"),
        (edit(f"{INFO}/licenses/LICENSE", lambda data: b"All rights reserved"), "is not the Apache License"),
        (edit(f"{INFO}/METADATA", lambda data: data.replace(b"torch\n", b"torsh\n", 1)), "it requires"),
        (edit(f"{INFO}/WHEEL", lambda data: data.replace(b"x86_64", b"aarch64")), "WHEEL says tag"),
        (lambda root: (root / "tsmla.pth").write_text("import os"), "it holds ['tsmla', 'tsmla"),
        (lambda root: (root / INFO / "direct_url.json").write_text("{}"), "is neither Python source nor a library"),
        (lambda root: (root / sbom.path(INFO)).unlink(), "sboms/tsmla.cdx.json is missing"),
        (edit(sbom.path(INFO), lambda data: data.replace(b"0.17.0", b"0.16.0")), "its SBOM invents ziglang@0.16.0"),
        (edit(sbom.path(INFO), lambda data: data.replace(b"1980", b"2026")), "metadata should be different"),
        (edit(sbom.path(INFO), lambda data: data[:40]), "its SBOM cannot be compared"),
        (edit(sbom.path(INFO), lambda data: b"[]"), "its SBOM cannot be compared"),
        (edit(f"{INFO}/METADATA", lambda data: b"\xff" + data), "it is malformed"),
    ],
)
def test_a_file_that_was_changed_carefully_is_found(forged, change, problem):
    assert any(problem in found for found in verify_release.problems(forged(change)))


def test_a_library_that_exports_something_else_is_found(forged):
    """One name of the dynamic symbol table, everything that says so remade."""
    name = b"__tvm_ffi_tsmla_pack_sm_90a_bf16_to_e4m3_d128x64x128\0"
    changed = forged(library_and_its_record(lambda data: sealed(data.replace(name, name.upper()))), with_sbom=True)
    found = "\n".join(verify_release.problems(changed))
    assert f"exports {name[:-1].upper().decode()}, which it does not list" in found
    assert f"lists {name[:-1].decode()}, which it does not export" in found


def test_a_library_that_loads_something_else_is_found(forged):
    change = library_and_its_record(lambda data: sealed(data.replace(b"libtvm_ffi.so\0", b"libtvm_ffx.so\0")))
    assert any("libtvm_ffx.so" in found for found in verify_release.problems(forged(change, with_sbom=True)))


def test_only_the_whole_can_tell_python_files_that_were_exchanged_consistently(wheel, forged):
    changed = forged(edit("tsmla/loading/loader.py", lambda data: data + b"import evil\n"))
    assert verify_release.problems(changed) == []
    assert verify_release.problems(changed, sources=True) == ["tsmla/loading/loader.py is not the one of this checkout"]
    statement = provenance.statement([wheel], "https://builder", "https://source", COMMIT)
    (found,) = verify_release.problems(changed, statement)
    assert "the provenance statement says" in found


def entries_again(wheel: Path, target: Path, change: Callable[[zipfile.ZipInfo, bytes], object]) -> None:
    """A copy whose every entry `change` may alter, or write itself; False leaves it out."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if change(entry, data) is not False:
                new.writestr(entry, data)


def as_link(entry: zipfile.ZipInfo, data: bytes) -> None:
    if entry.filename == "tsmla/py.typed":
        entry.external_attr = 0o120777 << 16


def climbing(entry: zipfile.ZipInfo, data: bytes) -> None:
    if entry.filename == "tsmla/identity/variant.py":
        entry.filename = "tsmla/../../variant.py"


def writable(entry: zipfile.ZipInfo, data: bytes) -> None:
    entry.external_attr = 0o100666 << 16


def stored(entry: zipfile.ZipInfo, data: bytes) -> None:
    entry.compress_type = zipfile.ZIP_STORED


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (as_link, "'tsmla/py.typed' has mode lrwxrwxrwx"),
        (climbing, "'tsmla/../../variant.py' is not a plain path"),
        (writable, "has mode -rw-rw-rw-"),
        (stored, "is not stored as"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_entries_that_unpack_otherwise_are_found(wheel, tmp_path, change, problem):
    entries_again(wheel, tmp_path / wheel.name, change)
    assert any(problem in found for found in verify_release.problems(tmp_path / wheel.name))


def test_a_second_file_of_one_name_is_found(wheel, tmp_path):
    target = tmp_path / wheel.name
    target.write_bytes(wheel.read_bytes())
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(target, "a") as opened:
        opened.writestr("tsmla/loading/loader.py", b"import evil")
    assert "'tsmla/loading/loader.py' is in it more than once" in verify_release.problems(target)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"#!/bin/sh\n" + data,
        lambda data: data + b"more",
        lambda data: data[:-2] + b"\4\0more",
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"not a wheel",
    ],
    ids=["before", "behind", "comment", "cut", "empty", "text"],
)
def test_bytes_outside_of_the_files_are_found(wheel, tmp_path, change):
    target = tmp_path / wheel.name
    target.write_bytes(change(wheel.read_bytes()))
    assert verify_release.problems(target)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("tsmla/loading/loader.py,,\n", "tsmla/loading/loader.py does not have the hash"),
        ("tsmla/loading/loader.py,sha256=AAAA,1\n", "tsmla/loading/loader.py does not have the hash"),
        ("", "tsmla/loading/loader.py is not in RECORD"),
        ("tsmla/loading/loader.py,,\ntsmla/loading/loader.py,,\n", "RECORD names a file more than once"),
    ],
)
def test_record_that_hides_a_file_is_found(wheel, tmp_path, row, problem):
    target = tmp_path / wheel.name

    def change(entry: zipfile.ZipInfo, data: bytes) -> object:
        if entry.filename != f"{INFO}/RECORD":
            return None
        lines = data.decode().splitlines(True)
        lines = [row if line.startswith("tsmla/loading/loader.py,") else line for line in lines]
        new.writestr(entry, "".join(lines))
        return False

    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if change(entry, old.read(entry)) is not False:
                new.writestr(entry, old.read(entry))
    assert any(problem in found for found in verify_release.problems(target))


@pytest.mark.parametrize(
    "name", ["tsmla.whl", "tsmla-0.1.0-cp311-cp311-linux_x86_64.whl", "evil-0.1.0-py3-none-any.whl"]
)
def test_a_renamed_wheel_is_refused(wheel, tmp_path, name):
    (tmp_path / name).write_bytes(wheel.read_bytes())
    (found,) = verify_release.problems(tmp_path / name)
    assert "file name" in found
    assert verify_release.problems(tmp_path / "missing.whl") == ["there is no such file"]


def test_provenance_says_what_was_built_from_what(wheel):
    said = provenance.statement([wheel], "https://ci/workflow", "https://host/tsmla", COMMIT, "https://ci/run/7")
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert said["subject"] == [{"name": wheel.name, "digest": {"sha256": digest}}]
    source, *tools = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source == {"uri": f"git+https://host/tsmla@{COMMIT}", "digest": {"gitCommit": COMMIT}}
    assert {tool["name"] for tool in tools} == {*toolchain.COMPILERS, "scikit-build-core"}
    assert said["predicate"]["runDetails"] == {
        "builder": {"id": "https://ci/workflow"},
        "metadata": {"invocationId": "https://ci/run/7"},
    }
    assert verify_release.problems(wheel, said) == []
    payload = base64.b64encode(json.dumps(said).encode()).decode()
    assert verify_release.problems(wheel, {"dsseEnvelope": {"payload": payload}}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda said: said | {"predicateType": "https://other"}, "it has to be https://slsa.dev/provenance/v1"),
        (lambda said: said | {"subject": []}, "the provenance statement is about nothing"),
        (lambda said: said | {"subject": [{"name": "a"}]}, "cannot be read"),
        (lambda said: [said], "cannot be read"),
        (lambda said: {"dsseEnvelope": {"payload": "e30="}}, "cannot be read"),
    ],
)
def test_provenance_of_something_else_is_refused(wheel, change, problem):
    said = provenance.statement([wheel], "https://builder", "https://source", COMMIT)
    (found,) = verify_release.problems(wheel, change(said))
    assert problem in found


def test_the_command_says_so_and_its_status_too(wheel, forged, tmp_path):
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, verify_release.__file__, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    passed = run(wheel)
    assert passed.returncode == 0 and f"{wheel.name}: whole; sha256 " in passed.stdout
    refused = run(wheel, forged(lambda root: (root / LIBRARY).unlink()))
    assert refused.returncode == 1 and f"{wheel.name}: refused\n  - " in refused.stdout
    (tmp_path / "statement.json").write_text("{")
    unread = run(wheel, "--provenance", tmp_path / "statement.json")
    assert unread.returncode == 1 and "statement.json cannot be read" in unread.stderr


@pytest.mark.parametrize("name, said", [("tsmla.whl", "there is no such file"), ("text.whl", "is no wheel")])
def test_commands_refuse_a_path_that_is_no_wheel(tmp_path, name, said):
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(argparse.ArgumentTypeError, match=f"{name}:? {said}"):
        archive.wheel_file(f"{tmp_path / name}")
