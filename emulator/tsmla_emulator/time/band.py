"""The band of a modelled time: how far it moves when numbers that are not certain take their extremes, one at a
time."""

from __future__ import annotations

import dataclasses
from typing import Any

from .machines import Machine, Value


def uncertain(machine: Machine) -> list[str]:
    """Return the names of the machine's numbers that have a range and are not the clock."""
    return [
        field.name
        for field in dataclasses.fields(machine)
        if isinstance(value := getattr(machine, field.name), Value) and value.low is not None and field.name != "clock"
    ]


def changes(machine: Machine) -> dict[tuple[str, float], Machine]:
    """Return the machine with one number at an extreme, by what was changed and to what."""
    results = {}
    for name in uncertain(machine):
        value: Value = getattr(machine, name)
        for extreme in (value.low, value.high):
            if extreme is not None and extreme != value.value:
                changed = dataclasses.replace(value, value=extreme)
                results[name, extreme] = dataclasses.replace(machine, **{name: changed})  # type: ignore[arg-type]
    return results


def outcomes(found: Any, machine: Machine) -> dict[tuple[str, float], float]:
    """Return clocks, launches included, by what was changed and to what."""
    results = {}
    for key, changed in changes(machine).items():
        modelled = found.model(changed)
        results[key] = modelled.clocks + modelled.launch
    return results


def band(found: Any, machine: Machine) -> tuple[float, float]:
    """Return the least and the most clocks, launches included, of these outcomes and the machine as it stands."""
    modelled = found.model(machine)
    clocks = [modelled.clocks + modelled.launch, *outcomes(found, machine).values()]
    return min(clocks), max(clocks)
