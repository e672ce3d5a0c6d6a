"""Where a published page comes from."""

from __future__ import annotations

import subprocess


def commit() -> str:
    """Return the commit of the working directory, with "-dirty" behind it when files differ; "unknown" outside of a
    repository."""
    try:
        asked = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
