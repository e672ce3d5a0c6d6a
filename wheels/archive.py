"""Reads wheels, and writes them so that their contents decide every byte: order, times, modes, RECORD.

The compressed bytes are zlib's, so that two machines agree when their Pythons use the same zlib; `reproduce.py` says
which one that was.
"""

from __future__ import annotations

import argparse
import base64
import calendar
import csv
import email.parser
import hashlib
import io
import re
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

EARLIEST = 315532800
"""1980-01-01, in seconds since 1970: no file in a zip is older."""
MOST_UNPACKED_BYTES = 1 << 30
_LEVEL = 9
_LOCAL_BYTES, _CENTRAL_BYTES, _END_BYTES = 30, 46, 22
"""Sizes of a zip's local, central and end headers, without the names in them."""


def wheel_file(text: str) -> Path:
    """Read the path of a wheel that exists, for argparse."""
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    if path.suffix != ".whl" or not zipfile.is_zipfile(path):
        raise argparse.ArgumentTypeError(f"{text} is no wheel")
    return path


def info_directory(wheel: Path) -> str:
    """Return the name of the wheel's .dist-info directory, from its file's name."""
    name, version, *_ = wheel.stem.split("-")
    return f"{name}-{version}.dist-info"


def unpack(wheel: Path, directory: Path) -> None:
    """Put a wheel's files into a directory. Look at `problems` first when somebody else made the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)


def epoch_of(wheel: Path) -> int:
    """Return the time of a wheel's first entry, in seconds since 1970."""
    with zipfile.ZipFile(wheel) as archive:
        return calendar.timegm(archive.infolist()[0].date_time)


def requirements(wheel: Path) -> dict[str, str]:
    """Return distribution that a wheel requires -> its accepted range, "" for any. Extras are left out."""
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read(f"{info_directory(wheel)}/METADATA").decode()
    lines = email.parser.Parser().parsestr(text).get_all("Requires-Dist") or []
    parts = (re.match(r"([\w.-]+)\s*\(?([^);]*)\)?\s*(;.*)?$", line) for line in lines)
    return {part[1]: part[2].replace(" ", "") for part in parts if part and not part[3]}


def write(wheel: Path, directory: Path, epoch: int) -> None:
    """Write a wheel of the files in a directory, with a RECORD made anew. Metadata comes last, as PEP 427 wants it.

    epoch: time of every entry, in seconds since 1970, not before EARLIEST.
    """
    info = info_directory(wheel)
    record = directory / info / "RECORD"
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    names = sorted(files.keys() - {f"{info}/RECORD"}, key=_order(info))
    listed = io.StringIO()
    rows = csv.writer(listed, lineterminator="\n")
    rows.writerows([name, *recorded(files[name].read_bytes())] for name in names)
    rows.writerow([f"{info}/RECORD", "", ""])
    record.write_text(listed.getvalue(), "utf-8")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*names, f"{info}/RECORD"]:
            archive.writestr(_entry(name, epoch), (directory / name).read_bytes(), zipfile.ZIP_DEFLATED, _LEVEL)


def recorded(data: bytes) -> tuple[str, int]:
    """Return what RECORD says of a file: hash, size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", len(data)


def _order(info: str) -> Callable[[str], tuple[bool, bool, str]]:
    """Return a key that sorts entries: packages, metadata, RECORD."""
    return lambda name: (name == f"{info}/RECORD", name.startswith(f"{info}/"), name)


def problems(wheel: Path) -> Iterator[str]:
    """Yield what is not as `write` leaves it, one sentence each. Nothing is unpacked: look here before unpacking.

    Every byte of the file has to belong to an entry or to the list of entries, so that no reader can find another
    archive in it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries, comment = archive.infolist(), archive.comment
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        yield f"it cannot be read as a zip archive: {error}"
        return
    names = [entry.filename for entry in entries]
    yield from (f"{name!r} is in it more than once" for name in sorted({n for n in names if names.count(n) > 1}))
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MOST_UNPACKED_BYTES:
        yield f"its files have {unpacked:,} bytes; the limit is {MOST_UNPACKED_BYTES:,}"
    if names != sorted(names, key=_order(info_directory(wheel))):
        yield "its entries are not in order"
    if len({entry.date_time for entry in entries}) > 1:
        yield "its entries have different times"
    at = 0
    for entry in entries:
        name = entry.filename
        if name.startswith("/") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
            yield f"{name!r} is not a plain path of a file"
        if entry.external_attr >> 16 != _mode(name):
            yield f"{name!r} has mode {stat.filemode(entry.external_attr >> 16)}, not {stat.filemode(_mode(name))}"
        if entry.compress_type != zipfile.ZIP_DEFLATED or entry.flag_bits & ~0x800 or entry.extra or entry.comment:
            yield f"{name!r} is not stored as this project's wheels store files"
        if entry.header_offset != at:
            yield f"before {name!r} there are bytes that belong to no file"
        at = entry.header_offset + _LOCAL_BYTES + len(name.encode()) + entry.compress_size
    at += sum(_CENTRAL_BYTES + len(name.encode()) for name in names) + _END_BYTES
    if comment or at != wheel.stat().st_size:
        yield "it has bytes that belong to no file"


def _entry(name: str, epoch: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, time.gmtime(max(epoch, EARLIEST))[:6])
    entry.create_system = 3  # Unix: the mode counts
    entry.external_attr = _mode(name) << 16
    return entry


def _mode(name: str) -> int:
    return stat.S_IFREG | (0o755 if name.endswith(".so") else 0o644)
