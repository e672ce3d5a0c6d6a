"""Manifests that are missing, truncated, of another schema, or about other bytes are refused with the reason."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from example_variants import DECODE, PACK, PREFILL, library_manifest
from tsmla.errors import ManifestError
from tsmla.loading import manifest
from tsmla.loading.manifest import DirectoryManifest, LibraryManifest, LibraryRecord


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with one file that its manifest describes truly."""
    (tmp_path / "library.so").write_bytes(b"machine code")
    record = LibraryRecord.of_file(tmp_path / "library.so", library_manifest(PREFILL))
    manifest.write_directory(tmp_path, DirectoryManifest(manifest.SCHEMA, (record,)))
    return tmp_path


@pytest.mark.parametrize("variant", [PACK, PREFILL, DECODE], ids=lambda v: v.family)
def test_library_manifest_round_trip(variant) -> None:
    said = library_manifest(variant)
    assert LibraryManifest.from_json(said.to_json()) == said


def test_directory_manifest_round_trip(directory: Path) -> None:
    read = manifest.read_directory(directory)
    assert [record.manifest for record in read.libraries] == [library_manifest(PREFILL)]
    manifest.verify_file(directory, read.libraries[0])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"{tmp_path / 'manifest.json'} does not exist")):
        manifest.read_directory(tmp_path)


def test_every_truncation_is_refused(directory: Path) -> None:
    file = directory / manifest.MANIFEST_FILE
    whole = file.read_bytes()
    for size in range(0, len(whole.rstrip()), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ManifestError, match="truncated") as raised:
            manifest.read_directory(directory)
        assert str(file) in str(raised.value)


@pytest.mark.parametrize("schema", [0, manifest.SCHEMA + 1])
def test_unknown_schema(directory: Path, schema: int) -> None:
    rewrite(directory, lambda value: value.update(schema=schema))
    with pytest.raises(ManifestError, match=f"schema {schema}; this tsmla reads schema {manifest.SCHEMA}"):
        manifest.read_directory(directory)


def test_unknown_schema_of_a_library(directory: Path) -> None:
    rewrite(directory, lambda value: value["libraries"][0]["manifest"].update(schema=9))
    with pytest.raises(ManifestError, match="library.so has schema 9"):
        manifest.read_directory(directory)


@pytest.mark.parametrize("field", ["family", "arch", "host", "min_runtime", "toolchain", "source_digest", "kernels"])
def test_each_missing_field_is_named(field: str) -> None:
    said = library_manifest(PREFILL).to_dict()
    del said[field]
    with pytest.raises(ManifestError, match=f"lacks the field '{field}'"):
        LibraryManifest.from_json(json.dumps(said))


def test_a_symbol_that_is_not_its_variants(directory: Path) -> None:
    rewrite(directory, lambda value: value["libraries"][0]["manifest"]["kernels"][0].update(symbol="tsmla_other"))
    with pytest.raises(ManifestError, match=f"tsmla_other does not belong to its variant, whose symbol is {PREFILL}"):
        manifest.read_directory(directory)


def test_a_kernel_of_another_family() -> None:
    said = library_manifest(PREFILL, family="pack")
    with pytest.raises(ManifestError, match="does not belong in a pack library"):
        LibraryManifest.from_json(said.to_json())


def test_changed_bytes(directory: Path) -> None:
    record = manifest.read_directory(directory).libraries[0]
    (directory / "library.so").write_bytes(b"machine c0de")
    with pytest.raises(ManifestError, match=f"library.so hashes to .* but its manifest says {record.sha256}"):
        manifest.verify_file(directory, record)


def test_cut_bytes(directory: Path) -> None:
    record = manifest.read_directory(directory).libraries[0]
    (directory / "library.so").write_bytes(b"machine")
    with pytest.raises(ManifestError, match="has 7 bytes but its manifest says 12"):
        manifest.verify_file(directory, record)


def test_absent_library(directory: Path) -> None:
    record = manifest.read_directory(directory).libraries[0]
    (directory / "library.so").unlink()
    with pytest.raises(ManifestError, match="library.so is in the manifest but cannot be read"):
        manifest.verify_file(directory, record)


@pytest.mark.parametrize("name", ["../library.so", "", ".", "a\0b.so", "\n.so", "x" * 300])
def test_a_library_outside_the_directory_or_of_no_name(directory: Path, name: str) -> None:
    rewrite(directory, lambda value: value["libraries"][0].update(file=name))
    with pytest.raises(ManifestError, match="not a plain file name"):
        manifest.read_directory(directory)


def test_writing_leaves_the_old_manifest_when_it_fails(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(directory.iterdir()), (directory / manifest.MANIFEST_FILE).read_bytes()

    def fail(source, target) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(manifest.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        manifest.write_directory(directory, DirectoryManifest(manifest.SCHEMA, ()))
    assert (sorted(directory.iterdir()), (directory / manifest.MANIFEST_FILE).read_bytes()) == before


def test_a_built_directory_is_described_truly(pack_directory: Path, tmp_path: Path) -> None:
    record = manifest.read_directory(pack_directory).libraries[0]
    manifest.verify_file(pack_directory, record)
    assert [kernel.variant for kernel in record.manifest.kernels] == [PACK]
    shutil.copy(pack_directory / record.file, tmp_path)
    with open(tmp_path / record.file, "r+b") as stream:
        stream.seek(record.size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ManifestError, match="hashes to"):
        manifest.verify_file(tmp_path, record)


def rewrite(directory: Path, change) -> None:
    file = directory / manifest.MANIFEST_FILE
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": ' * 100_000, "nested too deeply"),
        (f'{{"schema": {"9" * 100_000}}}', "is not valid JSON|has schema 9"),
        ('{"schema": NaN}', "NaN is not JSON"),
        ('{"schema": "\\ud800"}', "half of a surrogate pair"),
        ('{"schema": -Infinity}', "-Infinity is not JSON"),
        ('{"schema": 2.0}', "not of type int"),
        ("null", "holds a JSON NoneType"),
        (" " * (manifest._MOST_BYTES + 1), "at most .* are read"),
    ],
    ids=["lists", "objects", "digits", "NaN", "half a character", "infinity", "float", "null", "huge"],
)
def test_json_that_no_build_writes(directory: Path, text: str, reason: str) -> None:
    (directory / manifest.MANIFEST_FILE).write_text(text)
    with pytest.raises(ManifestError, match=reason):
        manifest.read_directory(directory)


@pytest.mark.parametrize("value", [[], {}, None, 1.5, True, "x", 10**30])
@pytest.mark.parametrize("field", ["family", "arch", "dtype", "out_dtype", "d_nope"])
def test_a_variant_field_of_any_type(field: str, value: object) -> None:
    said = library_manifest(PACK).to_dict()
    if said["kernels"][0]["variant"][field] == value:
        return
    said["kernels"][0]["variant"][field] = value
    with pytest.raises(ManifestError):
        LibraryManifest.from_json(json.dumps(said))


@pytest.mark.parametrize("value", [[], {}, None, 1.5, True, "x", 10**30, [[]], {"name": 1}])
@pytest.mark.parametrize("place", ["pieces", "scales", 0, "name", "dtype", "columns"])
def test_a_row_in_which_anything_is_anything(place: str | int, value: object) -> None:
    said = library_manifest(DECODE).to_dict()
    row = said["kernels"][0]["variant"]["row"]
    where = row if place in row else row["pieces"] if place == 0 else row["pieces"][1]
    if where[place] == value:
        return
    where[place] = value
    with pytest.raises(ManifestError):
        LibraryManifest.from_json(json.dumps(said))


@pytest.mark.parametrize("version", ["", "new", "\u00b2", "9" * 5000, "4..7"])
def test_a_required_version_that_is_none(version: str) -> None:
    with pytest.raises(ManifestError, match="min_runtime"):
        LibraryManifest.from_json(library_manifest(PACK, min_runtime=version).to_json())


def test_a_manifest_that_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / manifest.MANIFEST_FILE)
    with pytest.raises(ManifestError, match="it is a FIFO, not a regular file"):
        manifest.read_directory(tmp_path)
