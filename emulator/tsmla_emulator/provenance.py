"""What a published page says of where it comes from."""

from __future__ import annotations

import subprocess


def commit() -> str:
    """The commit of the working directory, "-dirty" behind it when files differ; "unknown" outside of a repository."""
    try:
        asked = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
