"""How engines find plug-ins."""

from __future__ import annotations

import importlib.metadata
import os


def found(group: str, allowed: str) -> str:
    """Return where an engine finds tsmla's plug-in of a group of entry points, or why it will not.

    allowed: the variable that names the plug-ins that the engine loads; all of them where it is unset.
    """
    points = [point.value for point in importlib.metadata.entry_points(group=group) if point.name == "tsmla"]
    if not points:
        return "missing: tsmla is not installed in this environment (pip install tsmla)"
    names = os.environ.get(allowed)
    if names is not None and "tsmla" not in names.split(","):
        return f"{points[0]}, which {allowed}={names} leaves out; add tsmla to it"
    return points[0]
