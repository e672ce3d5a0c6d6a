"""Records that are published: the newest of each kind, in benchmarks/results/current."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

CURRENT = Path(__file__).parent / "results" / "current"
TIE = 0.01
"""Times that differ by no more than this fraction tie, in records that have no confidence interval."""


def superseded() -> list[Path]:
    """Return records in `current` beside which there is a newer one of the same name and device."""
    by_age = sorted(CURRENT.glob("*.json"), key=_stamp)
    newest = {path.stem.removesuffix(_stamp(path)): path for path in by_age}
    return [path for path in by_age if path not in newest.values()]


def _stamp(path: Path) -> str:
    """Return the date that a record's name ends in, such as 20261122T060617."""
    return path.stem[-15:]


@functools.cache
def newest(name: str, device: str = "") -> dict[str, Any]:
    """Return the newest record of this name, of a GPU whose name has `device` in it."""
    return max(of_devices(name, device), key=lambda record: record["certificate"]["date"])


def of_devices(name: str, device: str = "") -> list[dict[str, Any]]:
    """Return the newest record of this name of each GPU whose name has `device` in it, in the order of those names."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(CURRENT.glob(f"{name}-nvidia-*.json"), key=_stamp):
        record = json.loads(path.read_text())
        found[record["certificate"]["device"]] = record
    return [record for name, record in sorted(found.items()) if device in name]


def all_of(name: str) -> list[dict[str, Any]]:
    """Return all current records whose names begin with this, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(CURRENT.glob(f"{name}-*.json"), key=_stamp)]


def results(record: dict[str, Any], regime: str, **fields: object) -> list[dict[str, Any]]:
    return [
        result
        for result in record["results"]
        if result["timings"]["tsmla"]["regime"] == regime
        and all(result[name] == value for name, value in fields.items())
    ]


def text_of(record: dict[str, Any]) -> str:
    """Return the JSON of a record, a line for each field and for each entry of a field that is a list or a dictionary
    of such.

    Fractions have six significant digits: events resolve microseconds to three.
    """
    record = _rounded(record)
    return "{" + ",".join(f"\n{json.dumps(name)}: {_lines(value)}" for name, value in record.items()) + "\n}\n"


def _lines(value: Any) -> str:
    entries = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, (dict, list)) for entry in entries):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ",".join(f"\n {json.dumps(entry)}" for entry in value) + "]"
    return "{" + ",".join(f"\n {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()) + "}"


def _rounded(value: Any) -> Any:
    """Return the value with six significant digits of each fraction in it; dataclasses become dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def names(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for result in record["results"] for name in result["timings"]))


def best_peer(timings: dict[str, Any]) -> dict[str, Any]:
    """Return the shortest timing of another implementation. Raises ValueError where there is none."""
    return min((timing for name, timing in timings.items() if name != "tsmla"), key=lambda timing: timing["median_us"])


def is_tie(timings: dict[str, Any]) -> bool:
    """Whether tsmla and the best of the others tie: where the record has no interval of their ratio, within 1 %."""
    best = best_peer(timings)
    if "ratio" in best:
        lowest, highest = best["ratio"]
        return lowest <= 1 <= highest
    return abs(timings["tsmla"]["median_us"] / best["median_us"] - 1) <= TIE


def bold(ratio: float) -> str:
    """Return a ratio of times as pages have it: in bold where tsmla is slower."""
    return f"**{ratio:.3f}**" if ratio > 1 else f"{ratio:.3f}"


def certificate(record: dict[str, Any]) -> str:
    """Return what pages say of where, when and how a record was measured."""
    born = record["certificate"]
    where = f"{born['device']}, driver {born['driver']}, torch {born['torch']}"
    command = born["command"].split(" --commit")[0].split(" --results")[0]
    return f"{where}, {born['date'][:10]}, commit {born['commit'][:7]}: `{command}`."
