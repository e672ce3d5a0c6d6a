"""Is a downloaded wheel whole and one of ours? `python wheels/verify_release.py WHEEL... [--provenance FILE]`

Needs Python and this checkout, no network, and runs nothing from the wheel. It holds the parts of a wheel against each
other: file layout, tag, licence, RECORD, SBOM, manifest, the digest and manifest inside each library, what libraries
export and need, the kernel sources that they were compiled from. It holds the whole against a provenance statement, if
given, and with --sources against the Python files of this checkout, which has to be of the release.

Someone who can change all of these together is found by the statement alone, and only if its signature holds, which
takes a network: `gh attestation verify WHEEL --repo OWNER/NAME`, or `pypi-attestations verify pypi`.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import archive
import audit_wheel
import provenance
from tsmla.errors import LibraryError, ManifestError
from tsmla.loading import elf, image, manifest, toolchain

from build_aot import link

_MALFORMED = (OSError, ValueError, csv.Error, RecursionError)


def problems(wheel: Path, statement: Any = None, sources: bool = False) -> list[str]:
    """Return everything that does not fit together in a wheel, one sentence each; nothing when all does.

    statement: a provenance statement as JSON gives it, or a signed bundle.
    sources: compare with this checkout's files.
    """
    if not wheel.is_file():
        return ["there is no such file"]
    if not re.fullmatch(r"tsmla-[0-9][\w.+]*-py3-none-\w+\.whl", wheel.name, re.ASCII):
        return ["its file name is not that of a wheel of tsmla: do not rename what you download"]
    found = [] if statement is None else provenance.problems(wheel, statement)
    if unsafe := list(archive.problems(wheel)):
        return found + unsafe
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        try:
            archive.unpack(wheel, root)
            found += audit_wheel.problems_of_files(wheel, root)
            found += _library_problems(root, wheel.stem.split("-")[-1])
        except _MALFORMED as error:
            found.append(f"it is malformed: {type(error).__name__}: {error}")
        if sources:
            found += _source_problems(root)
    return found


def _library_problems(root: Path, platform: str) -> Iterator[str]:
    directory = root / audit_wheel.LIBRARIES
    if platform == "any":
        return  # a library in such a wheel has been complained of as a file
    try:
        records = {record.file: record for record in manifest.read_directory(directory).libraries}
    except ManifestError as error:
        yield str(error)
        return
    for name in sorted({path.name for path in directory.iterdir()} - records.keys() - {manifest.MANIFEST_FILE}):
        yield f"{audit_wheel.LIBRARIES}/{name} is not in the manifest"
    digest = toolchain.source_digest(root)
    for name, record in records.items():
        try:
            manifest.verify_file(directory, record)
            found = image.read_image(directory / name)
            parts = elf.Elf((directory / name).read_bytes())
        except (LibraryError, ManifestError, elf.ElfError) as error:
            yield str(error)
            continue
        if found.manifest != record.manifest:
            yield f"{name} describes itself differently from the directory's manifest"
        if record.manifest.source_digest != digest:
            yield f"{name} was not compiled from the kernel sources in this wheel"
        if found.host != record.manifest.host or not platform.endswith(f"_{found.host}"):
            yield f"{name} holds code for {found.host}, says {record.manifest.host}, and lies in a wheel for {platform}"
        exported = {symbol.name for symbol in parts.symbols(elf.SHT_DYNSYM) if symbol.section != elf.SHN_UNDEF}
        listed = {f"__tvm_ffi_{kernel.variant}" for kernel in record.manifest.kernels}
        yield from (f"{name} exports {other}, which it does not list" for other in sorted(exported - listed))
        yield from (f"{name} lists {other}, which it does not export" for other in sorted(listed - exported))
        if sorted(parts.dynamic_strings(elf.DT_NEEDED)) != sorted(link.NEEDED):
            yield f"{name} loads {parts.dynamic_strings(elf.DT_NEEDED)}; it has to load {sorted(link.NEEDED)}"


def _source_problems(root: Path) -> Iterator[str]:
    """Yield the Python files that are not those of this checkout."""
    for package, here in (("tsmla", Path("python/tsmla")), ("tsmla_kernels", Path("kernels/tsmla_kernels"))):
        theirs, ours = texts(root / package), texts(audit_wheel.ROOT / here)
        for file in sorted(theirs.keys() | ours.keys()):
            if theirs.get(file) != ours.get(file):
                yield f"{package}/{file} is not the one of this checkout"


def texts(package: Path) -> dict[str, bytes]:
    files = (path for path in package.rglob("*") if path.name.endswith(audit_wheel.TEXT))
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="wheels/verify_release.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, nargs="+")
    parser.add_argument("--provenance", type=Path, help="statement or signed bundle, as JSON")
    parser.add_argument("--sources", action="store_true", help="compare Python files with this checkout's, too")
    asked = parser.parse_args()
    try:
        statement = manifest.parse_json(asked.provenance.read_bytes()) if asked.provenance else None
    except _MALFORMED as error:
        print(f"{asked.provenance} cannot be read: {error}", file=sys.stderr)
        return 1
    failed = False
    for wheel in asked.wheel:
        found = problems(wheel, statement, asked.sources)
        failed |= bool(found)
        print(f"{wheel.name}: refused" if found else f"{wheel.name}: whole; sha256 {provenance.sha256(wheel)}")
        for problem in found:
            print(f"  - {problem}")
    left = "" if statement else "where the wheels came from (no --provenance), "
    print(f"Not looked at: {left}{'whose signature the statement has, ' * bool(statement)}what kernels compute.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
