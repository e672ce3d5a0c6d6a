"""What the command of a plug-in says of the engine that is installed, before the flags to use."""

from __future__ import annotations

from typing import Any

from . import entry_points


def reported(engine: str, versions: str, contract: Any, group: str, allowed: str, backends: str) -> int:
    """Print which version is installed, where it finds the plug-in, and whether they fit. Return the exit status of the
    command: 0 when they fit, 1 when they do not, 2 without the engine.

    versions: those that the plug-in is for. contract: the plug-in's module of that name. group, allowed: as
    `entry_points.found` has them. backends: what is not to be selected where they do not fit.
    """
    version = contract.version()
    if version is None:
        print(f"{engine} is not installed in this environment; the plug-in is for {engine} {versions}")
        return 2
    read = "one of the versions" if version in contract.KNOWN else "not one of those"
    print(f"{engine} {version} ({read} that the plug-in was tested with: {', '.join(contract.KNOWN)})")
    print(f"entry point: {entry_points.found(group, allowed)}")
    complaints = contract.broken()
    for complaint in complaints:
        print(f"  does not fit: {complaint}")
    if complaints:
        print(f"This {engine} has moved on. Do not select {backends}; please report the lines above.")
        return 1
    print("contract: fits")
    return 0
