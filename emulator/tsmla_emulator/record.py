"""Launch records: launches with the memory they touch, in a file that any process can run again.

A record is JSON, or NPZ with that JSON as the array "record" beside stored memory. The JSON:

    {"memory":   {"x": {"address": 17592186048512, "bytes": 4096, "writable": true,
                        "fill": "stored" | "random" | "zeros" | "poison"}},
     "launches": [{"entry": "k", "grid": [1, 1, 1], "block": [128, 1, 1], "cluster": [1, 1, 1],
                   "shared_bytes": 0, "pdl": false, "params": "00.."}]}

`params` is the parameter block in hex, with the addresses that `memory` states: tensor maps may hold addresses far off
the tensor that they describe, so nothing is relocated. Emulated tensors have addresses that are free in any process; a
hand-written record takes any from 0x100000000000 up, at least 64 KiB apart, that are 512 past a page.
"random" is standard normal float32 from seed 0.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from . import machine
from .host.memory import allocate, check_guards
from .machine import Launch, Module, Options, Region, Report

_ARRAY = "memory/"


class RecordError(ValueError):
    """A launch record cannot be read; the text names the file and what is wrong."""


def save(path: Path, launches: list[Launch], regions: list[Region]) -> None:
    """Write launches and the present content of their memory as NPZ."""
    memory = {
        r.name: {"address": r.address, "bytes": r.size, "writable": r.writable, "fill": "stored"} for r in regions
    }
    described = [{**dataclasses.asdict(launch), "params": launch.params.hex()} for launch in launches]
    text = json.dumps({"memory": memory, "launches": described}, indent=1)
    arrays: dict[str, Any] = {
        _ARRAY + r.name: np.frombuffer(ctypes.string_at(r.address, r.size), np.uint8) for r in regions
    }
    np.savez_compressed(path, record=np.array(text), **arrays)


def run(path: Path, module: Module, options: Options) -> tuple[Report, dict[str, np.ndarray]]:
    """Run a record's launches on an entry of `module`. Returns the report and every writable memory as bytes.

    Raises RecordError, EmulationError and GuardError.
    """
    try:
        text, stored = _read(path)
        record = json.loads(text)
        held = {name: _filled(name, memory, stored) for name, memory in record["memory"].items()}
        launches = [_launch(described) for described in record["launches"]]
        regions = [
            Region(memory["address"], memory["bytes"], name, bool(memory["writable"]))
            for name, memory in record["memory"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a launch record: {type(error).__name__}: {error}") from error
    report = machine.run_launches(module, launches, regions, options)
    check_guards()
    return report, {r.name: np.frombuffer(bytes(held[r.name]), np.uint8) for r in regions if r.writable}


def _read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    if path.suffix == ".json":
        return path.read_text("utf-8"), {}
    with np.load(path) as arrays:
        stored = {name.removeprefix(_ARRAY): arrays[name] for name in arrays.files if name.startswith(_ARRAY)}
        return str(arrays["record"]), stored


def _filled(name: str, memory: dict[str, Any], stored: dict[str, np.ndarray]) -> ctypes.Array:
    size, fill = memory["bytes"], memory["fill"]
    block, buffer = allocate(size, memory["address"])
    if fill == "stored":
        content = stored[name].tobytes()
    elif fill == "random":
        content = np.random.default_rng(0).standard_normal(-(-size // 4), np.float32).tobytes()[:size]
    elif fill == "zeros":
        content = bytes(size)
    elif fill == "poison":
        return buffer
    else:
        raise ValueError(f"fill of {name} is {fill!r}; known: stored, random, zeros, poison")
    if len(content) != size:
        raise ValueError(f"{name} has {len(content)} stored bytes, its record says {size}")
    ctypes.memmove(block.address, content, size)
    return buffer


def _launch(described: dict[str, Any]) -> Launch:
    sizes = {name: tuple(described[name]) for name in ("grid", "block", "cluster")}
    return Launch(**{**described, **sizes, "params": bytes.fromhex(described["params"])})
