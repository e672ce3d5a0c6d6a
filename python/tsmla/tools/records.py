"""Which architectures' kernels have run on hardware, where and when: the selftest records that ship with tsmla.

`records/selftest_ARCH.json` is what `tsmla selftest --full --json` printed on a GPU of that architecture. Its
presence is all that it takes. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..variant import Arch

DIRECTORY = Path(__file__).parents[1] / "records"
SCHEMA = 1
COMMAND = "tsmla selftest --full --json > selftest.json"
UNVERIFIED = (
    f"verified in emulation; not yet run on hardware: run `{COMMAND}` on such a GPU and send the file in an issue of "
    "tsmla's repository"
)


def record_file(arch: Arch) -> Path:
    """Where an architecture's record lies when there is one."""
    return DIRECTORY / f"selftest_{arch}.json"


def passed(record: dict[str, Any], arch: Arch) -> bool:
    """Whether a record says that every kernel of the architecture passed every case on a GPU."""
    expected = {"schema": SCHEMA, "arch": arch.value, "full": True, "complete": True, "emulated": False, "ok": True}
    return all(record.get(name) == value for name, value in expected.items())


def verified(arch: Arch, source_digest: str) -> str:
    """What is known of kernels of these sources on hardware, as a phrase."""
    try:
        record = json.loads(record_file(arch).read_text("utf-8"))
        if not passed(record, arch):
            return f"{UNVERIFIED} ({record_file(arch).name} here records no complete run that passed)"
        of_others = "" if record["source_digest"] == source_digest else ", of other kernel sources"
        return f"selftest passed on {record['gpu']}, {record['date']}{of_others}"
    except FileNotFoundError:
        return UNVERIFIED
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{UNVERIFIED} ({record_file(arch).name} here cannot be read: {type(error).__name__}: {error})"
