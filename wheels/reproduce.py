"""Do two builds of these sources give the same wheel? `python wheels/reproduce.py [--kind binary|jit] [--out DIR]`

Builds the checkout twice from nothing, the second time as far from the first as this machine can: in another folder, by
another user with another home, under another umask, from files of another date, hours of another time zone. The full
binary wheel takes twice the build's time. Fails when anything differs but machine code that ptxas chose.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import archive
import build_wheel
from tsmla.loading import elf
from tsmla.loading.image import DIGEST_SECTION

ROOT = Path(__file__).resolve().parent.parent


class Build(NamedTuple):
    """One of the two builds. folder: below the scratch directory. prefix: command that the build is run by."""

    folder: str
    umask: int
    age: int
    prefix: tuple[str, ...]
    environment: dict[str, str]


def builds() -> tuple[Build, Build]:
    """Return the two builds, as different as this machine lets them be."""
    other = ("unshare", "--user", "--map-user=4321", "--map-group=4321")
    possible = shutil.which(other[0]) and not subprocess.run([*other, "true"], capture_output=True).returncode
    return (
        Build("one", 0o022, 0, (), {"TZ": "UTC"}),
        Build("two/a longer way", 0o077, 10**9, other if possible else (), {"TZ": "Asia/Tokyo", "USER": "other"}),
    )


def reproduce(kind: str, out: Path, isolated: bool = True, settings: Sequence[str] = ()) -> tuple[Path, Path]:
    """Build the wheel twice, into two directories below `out`, and return both paths; they may differ.

    Raises RuntimeError with the output of a build that fails. isolated, settings: as in `build_wheel`.
    """
    made = []
    for build in builds():
        with tempfile.TemporaryDirectory() as scratch:
            project = _copy(Path(scratch, build.folder, "tsmla"), build.age)
            home = Path(scratch, build.folder, "home")
            home.mkdir()
            target = out / build.folder.split("/")[0]
            target.mkdir(parents=True, exist_ok=True)
            command = [*build.prefix, sys.executable, str(project / "wheels" / "build_wheel.py"), "--kind", kind]
            command += ["--out", str(target)] + [f"-C{setting}" for setting in settings]
            done = subprocess.run(
                command if isolated else [*command, "--no-isolation"],
                cwd=project,
                env={**os.environ, **build.environment, "HOME": str(home), "TMPDIR": str(home)},
                umask=build.umask,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stdout)
            made.append(target / Path(done.stdout.splitlines()[-1]).name)
    return made[0], made[1]


def differences(one: Path, two: Path) -> tuple[list[str], list[str]]:
    """Return what differs in two wheels, one sentence each: what ptxas chose, and everything else. Both are empty for
    equal bytes.

    ptxas 12.9 allocates registers of large Blackwell kernels differently from run to run, of the same PTX. Such machine
    code, and the hashes of it that the wheel holds, are the first kind.
    """
    if one.read_bytes() == two.read_bytes():
        return [], []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(two) as second:
        a = {entry.filename: first.read(entry) for entry in first.infolist()}
        b = {entry.filename: second.read(entry) for entry in second.infolist()}
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    shared = [name for name in differing if name in a and name in b]
    chosen = [name for name in shared if name.endswith(".so") and _rest(a[name]) == _rest(b[name])]
    hashes = [pair for name in chosen for pair in zip(_hashes(a[name]), _hashes(b[name]), strict=True)]
    for name in shared if chosen else []:
        text = a[name]
        for old, new in hashes:
            text = text.replace(old, new)
        if name.endswith(("/RECORD", "/manifest.json", ".cdx.json")) and _lines(text) == _lines(b[name]):
            chosen.append(name)
    found = [f"{name} differs" for name in differing if name not in chosen]
    alike = [] if differing else ["their files are the same, and lie differently in the archives"]
    return [f"{name} differs in machine code that ptxas chose, or its hash" for name in chosen], found + alike


def _rest(library: bytes) -> bytes:
    """Return a library with zeros for machine code, what describes its registers, and the library's digest."""
    rest, start = bytearray(library), library.find(elf.MAGIC, 1)
    spans = []
    while start >= 0:
        if library[start + 18 : start + 20] == elf.EM_CUDA.to_bytes(2, "little"):
            sections = elf.Elf(library[start:]).sections
            named = [section for section in sections if section.name.startswith((".text.", ".nv.capmerc"))]
            spans += [(start + section.offset, section.size) for section in named]
        start = library.find(elf.MAGIC, start + 1)
    digest = elf.Elf(library).section(DIGEST_SECTION)
    for place, size in [*spans, *([(digest.offset, digest.size)] if digest else [])]:
        rest[place : place + size] = bytes(size)
    return bytes(rest)


def _hashes(library: bytes) -> tuple[bytes, bytes]:
    """Return a library's hash as RECORD and as JSON spell it."""
    return archive.recorded(library)[0].encode(), hashlib.sha256(library).hexdigest().encode()


def _lines(text: bytes) -> list[bytes]:
    """Return a file's lines; RECORD's without the hashes of the two files that hold hashes of libraries."""
    return [re.sub(rb"^(.*(?:/manifest|[.]cdx)[.]json),sha256=[^,]*", rb"\1", line) for line in text.splitlines()]


def _copy(target: Path, age: int) -> Path:
    """Copy the checkout without anything that was built, with files dated `age` seconds ago."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
            then = (ROOT / name).stat().st_mtime - age
            os.utime(target / name, (then, then))
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels/reproduce.py", description=__doc__)
    parser.add_argument("--kind", choices=[*build_wheel.ENVIRONMENT], default="binary", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default %(default)s")
    parser.add_argument("--no-isolation", action="store_true", help="use this environment's compiler and build tools")
    parser.add_argument("-C", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="as pip's")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar="DIR", help="build nothing: compare the wheels of two folders"
    )
    asked = parser.parse_args()
    if asked.compare:
        first, second = (sorted(folder.glob("*.whl")) for folder in asked.compare)
        if not first or [path.name for path in first] != [path.name for path in second]:
            print("the folders hold different wheels, or none", file=sys.stderr)
            return 1
        return max(_report(*pair) for pair in zip(first, second, strict=True))
    for build in builds():
        by = f"user {build.prefix[-1].split('=')[1]}" if build.prefix else f"user {os.getuid()}"
        print(f"in {build.folder!r} by {by}, umask {build.umask:03o}, files {build.age} s older, {build.environment}")
    try:
        pair = reproduce(asked.kind, asked.out, not asked.no_isolation, asked.settings)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return _report(*pair)


def _report(one: Path, two: Path) -> int:
    for wheel in (one, two):
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel}")
    chosen, found = differences(one, two)
    print(*(chosen + found or ["the same bytes"]), sep="\n")
    print(f"with Python {platform.python_version()}, zlib {zlib.ZLIB_RUNTIME_VERSION}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
