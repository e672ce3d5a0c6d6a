"""Check whether wheels are fit to publish: `python wheels/audit_wheel.py WHEEL...`

Checked are tags, metadata, licence, RECORD hashes and size, and that the wheel holds the two packages and nothing else.
In a binary wheel, libraries must be the shipped matrix, compiled from the kernel sources beside them, and pass
build_aot's audit (which needs the two runtime packages installed, but no GPU). With --records, as a release has it,
selftest records must be of the kernels in the wheel: between releases, kernels change more often than a GPU is at hand.
"""

from __future__ import annotations

import argparse
import csv
import email.message
import email.parser
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python"), str(ROOT / "kernels")]

import archive  # noqa: E402
import sbom  # noqa: E402
from build_wheel import JIT_TAG  # noqa: E402
from tsmla.errors import ManifestError  # noqa: E402
from tsmla.identity.arch import SHIPPED_ARCHS  # noqa: E402
from tsmla.loading import (  # noqa: E402
    elf,
    records,  # noqa: E402
    toolchain,
)
from tsmla.loading.loader import WHEEL_TAGS  # noqa: E402
from tsmla.loading.manifest import read_directory  # noqa: E402

from build_aot import matrix  # noqa: E402
from build_aot.audit import audit_directory  # noqa: E402
from build_aot.errors import AuditError  # noqa: E402

LIMIT_BYTES = 20 * 1000 * 1000
HOSTS = {tag: host for host, tag in WHEEL_TAGS.items()}
"""Tag of a wheel with libraries -> the host that they are for."""
PACKAGES = {"tsmla", "tsmla_kernels"}
LIBRARIES = "tsmla/objs"
TEXT = (".py", ".pyi", "py.typed")
SELFTESTS = {f"tsmla/records/{records.record_file(arch).name}": arch for arch in SHIPPED_ARCHS}
"""Selftest record that a wheel may hold -> the architecture whose kernels have run."""
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "sboms/tsmla.cdx.json")
"""Everything that a wheel's .dist-info directory holds."""
REQUIREMENTS = {"nvidia-cutlass-dsl>=4.7.1", "apache-tvm-ffi<0.2,>=0.1.11", "torch"}


def problems(wheel: Path, of_records: bool = False) -> list[str]:
    """Return everything wrong with a wheel, one sentence each; nothing when it is fit to publish.

    of_records: look at selftest records, too.
    """
    found: list[str] = []
    size = wheel.stat().st_size
    if size >= LIMIT_BYTES:
        found.append(f"it has {size:,} bytes; the limit is {LIMIT_BYTES:,}")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        archive.unpack(wheel, root)
        found += problems_of_files(wheel, root)
        if (tag := _split_name(wheel)[2]) in HOSTS:
            found += _library_problems(root, HOSTS[tag])
        if of_records:
            found += record_problems(root)
    return found


def problems_of_files(wheel: Path, root: Path) -> Iterator[str]:
    """Yield what is wrong with RECORD, metadata or the choice of files, without opening a library.

    root: directory that the wheel is unpacked in.
    """
    name, version, tag = _split_name(wheel)
    info = archive.info_directory(wheel)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())
    yield from _record_problems(root, info, names)
    yield from _metadata_problems(root / info, name, version, tag)
    yield from _content_problems(names, info, tag)
    if (root / sbom.path(info)).exists():
        yield from sbom.problems(wheel.name, root, archive.epoch_of(wheel))


def record_problems(root: Path) -> list[str]:
    """Return a sentence for each selftest record that does not show that the kernels of an unpacked wheel ran.

    An architecture without a record is no problem: nothing then claims that it ran.
    """
    digest = toolchain.source_digest(root)
    found = (records.release_problem(root / name, arch, digest) for name, arch in SELFTESTS.items())
    return [problem for problem in found if problem]


def sizes(wheel: Path) -> dict[str, int]:
    """Return part of the wheel -> its compressed bytes."""
    parts = dict.fromkeys(("libraries", "manifest", "tsmla", "tsmla_kernels", "metadata"), 0)
    with zipfile.ZipFile(wheel) as opened:
        for entry in opened.infolist():
            top = entry.filename.split("/")[0]
            if entry.filename.endswith(".so"):
                part = "libraries"
            elif entry.filename.startswith(LIBRARIES):
                part = "manifest"
            else:
                part = top if top in PACKAGES else "metadata"
            parts[part] += entry.compress_size
    return parts


def _split_name(wheel: Path) -> tuple[str, str, str]:
    name, version, tag = wheel.stem.split("-", 2)
    return name, version, tag


def _record_problems(root: Path, info: str, names: list[str]) -> Iterator[str]:
    record = root / info / "RECORD"
    if not record.exists():
        yield f"{info}/RECORD is missing"
        return
    with open(record, newline="", encoding="utf-8") as stream:
        listed = [(*row, "", "")[:3] for row in csv.reader(stream) if row]
    rows = {name: (digest, size) for name, digest, size in listed}
    if len(rows) != len(listed):
        yield "RECORD names a file more than once"
    yield from (f"{name} is not in RECORD" for name in sorted(set(names) - rows.keys()))
    yield from (f"{name} is in RECORD but not in the wheel" for name in sorted(rows.keys() - set(names)))
    for name in sorted((rows.keys() & set(names)) - {f"{info}/RECORD"}):
        digest, size = archive.recorded((root / name).read_bytes())
        if rows[name][0] != digest:
            yield f"{name} does not have the hash that RECORD gives it"
        elif rows[name][1] != str(size):
            yield f"{name} does not have the size that RECORD gives it"


def _headers(path: Path) -> email.message.Message:
    return email.parser.Parser().parsestr(path.read_text("utf-8") if path.exists() else "")


def _metadata_problems(info: Path, name: str, version: str, tag: str) -> Iterator[str]:
    if tag not in (known := [*HOSTS, JIT_TAG]):
        yield f"its tag is {tag}; it has to be {' or '.join(known)}"
    wheel, metadata = _headers(info / "WHEEL"), _headers(info / "METADATA")
    if wheel.get_all("Tag") != [tag]:
        yield f"WHEEL says tag {wheel.get_all('Tag')}, the file name {tag}"
    wanted = {"Name": name, "Version": version, "Requires-Python": ">=3.10", "License-Expression": "Apache-2.0"}
    for key, value in wanted.items():
        if metadata.get(key) != value:
            yield f"METADATA says {key}: {metadata.get(key)}; it has to be {value}"
    required = {line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line}
    if {_sorted_specifiers(line) for line in required} != {_sorted_specifiers(line) for line in REQUIREMENTS}:
        yield f"it requires {sorted(required)}; it has to require {sorted(REQUIREMENTS)}"
    if not metadata.get_payload():
        yield "METADATA has no description"
    licence = info / "licenses" / "LICENSE"
    if not licence.exists() or "Apache License" not in licence.read_text("utf-8"):
        yield f"{info.name}/licenses/LICENSE is missing or is not the Apache License"
    scripts = info / "entry_points.txt"
    if not scripts.exists() or "tsmla=tsmla.tools.cli:main" not in scripts.read_text("utf-8").replace(" ", ""):
        yield "it does not install the command tsmla"


def _sorted_specifiers(requirement: str) -> str:
    return ",".join(sorted(requirement.replace(" ", "").replace(">=", ",>=", 1).split(",")))


def _content_problems(names: list[str], info: str, tag: str) -> Iterator[str]:
    tops = {name.split("/")[0] for name in names}
    if tops != PACKAGES | {info}:
        yield f"it holds {sorted(tops)} at the top; it has to hold {sorted(PACKAGES | {info})}"
    metadata = {f"{info}/{name}" for name in METADATA}
    yield from (f"{name} is missing" for name in sorted(metadata - set(names)))
    for name in names:
        in_libraries = name.startswith(f"{LIBRARIES}/")
        if in_libraries and tag == JIT_TAG:
            yield f"{name} does not belong in a wheel for any platform"
        elif not (in_libraries or name in metadata or name.endswith(TEXT) or name in SELFTESTS):
            yield f"{name} is neither Python source nor a library of ours"


def _library_problems(root: Path, host: str) -> Iterator[str]:
    directory = root / LIBRARIES
    try:
        audit_directory(directory, matrix.shipped(), host)
        records = read_directory(directory).libraries
    except AuditError as error:
        yield from error.problems
        return
    except ManifestError as error:
        yield str(error)
        return
    digest = toolchain.source_digest(root)
    for record in records:
        if record.manifest.source_digest != digest:
            yield f"{record.file} was not compiled from the kernel sources in this wheel"
        if elf.Elf((directory / record.file).read_bytes()).section(".gnu.version_r"):
            yield f"{record.file} needs versioned system symbols, so its tag may promise too much"


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels/audit_wheel.py", description=__doc__)
    parser.add_argument("wheel", type=archive.wheel_file, nargs="+")
    parser.add_argument("--records", action="store_true", help="selftest records must be of the kernels in the wheel")
    asked, failed = parser.parse_args(), False
    for wheel in asked.wheel:
        found = problems(wheel, asked.records)
        failed |= bool(found)
        parts = ", ".join(f"{part} {size:,}" for part, size in sizes(wheel).items())
        print(f"{wheel.name}: {'fails' if found else 'passes'}; {wheel.stat().st_size:,} bytes: {parts}")
        for problem in found:
            print(f"  - {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
