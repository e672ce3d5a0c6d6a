"""Which architectures' kernels have run on hardware, where and when: the selftest records that ship with tsmla.

`records/selftest_ARCH.json` is what `tsmla selftest --full --json` printed on a GPU of that architecture. Its
presence is all that it takes. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..identity.arch import Arch

DIRECTORY = Path(__file__).parents[1] / "records"
SCHEMA = 1
COMMAND = "tsmla selftest --full --json > selftest.json"
UNVERIFIED = (
    f"verified in emulation; not yet run on hardware: run `{COMMAND}` on such a GPU and send the file in an issue of "
    "tsmla's repository"
)


class Record(NamedTuple):
    """What a selftest that passed ran on: the GPU, the date, and the digest of the kernel sources."""

    gpu: str
    date: str
    source_digest: str


class RecordError(Exception):
    """A record's file is of no use; the text is a phrase that follows its name."""


def record_file(arch: Arch) -> Path:
    """Return where an architecture's record lies when there is one."""
    return DIRECTORY / f"selftest_{arch}.json"


def passed(record: dict[str, Any], arch: Arch) -> bool:
    """Whether a record says that every kernel of the architecture passed every case on a GPU."""
    expected = {"schema": SCHEMA, "arch": arch.value, "full": True, "complete": True, "emulated": False, "ok": True}
    return all(record.get(name) == value for name, value in expected.items())


def read(file: Path, arch: Arch) -> Record:
    """Read the record in a file. Raises FileNotFoundError when there is none, and RecordError for one of no use."""
    try:
        record = json.loads(file.read_text("utf-8"))
        if not passed(record, arch):
            raise RecordError("records no complete run that passed")
        return Record(record["gpu"], record["date"], record["source_digest"])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RecordError(f"cannot be read: {type(error).__name__}: {error}") from error


def verified(arch: Arch, source_digest: str) -> str:
    """Return what is known of kernels of these sources on hardware, as a phrase."""
    try:
        record = read(record_file(arch), arch)
    except FileNotFoundError:
        return UNVERIFIED
    except RecordError as error:
        return f"{UNVERIFIED} ({record_file(arch).name} here {error})"
    of_others = "" if record.source_digest == source_digest else ", of other kernel sources"
    return f"selftest passed on {record.gpu}, {record.date}{of_others}"


def release_problem(file: Path, arch: Arch, source_digest: str) -> str:
    """Return why a record must not ship beside kernels of these sources, as a sentence; "" where there is none, or a
    right one."""
    try:
        record = read(file, arch)
    except FileNotFoundError:
        return ""  # `verified` says so
    except RecordError as error:
        problem = str(error)
    else:
        if record.source_digest == source_digest:
            return ""
        problem = f"is of kernel sources {record.source_digest[:12]}, those beside it are {source_digest[:12]}"
    return (
        f"{file.name} {problem}: install these sources where there is a GPU of {arch}, run `{COMMAND}` there, and let "
        f"what it writes take the place of python/tsmla/records/{file.name}; or delete that file, and nothing claims "
        f"any more that kernels for {arch} have run on hardware"
    )
