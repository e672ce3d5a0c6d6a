"""Launch records: launches with the memory they touch, in a file that any process can run again.

A record is JSON, or NPZ with that JSON as the array "record" beside stored memory. The JSON:

    {"memory":   {"x": {"address": 17592186048512, "bytes": 4096, "writable": true,
                        "fill": "stored" | "random" | "zeros" | "poison"}},
     "launches": [{"entry": "k", "grid": [1, 1, 1], "block": [128, 1, 1], "cluster": [1, 1, 1],
                   "shared_bytes": 0, "pdl": false, "cooperative": false, "params": "00.."}]}

`params` is the parameter block in hex, with the addresses that `memory` states: tensor maps may hold addresses far off
the tensor that they describe, so nothing is relocated. Emulated tensors have addresses that are free in any process; a
hand-written record takes any from 0x100000000000 up, at least 64 KiB apart, that are 512 past a page.
"random" is standard normal float32 from seed 0.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import machine
from .host.memory import GUARD, PAGE, POISON, allocate, check_guards
from .machine import Launch, Module, Options, Region, Report

_ARRAY = "memory/"
_ALIKE = 1152
"""Neighbouring numbers of like sizes."""
_ENDS = frozenset({"cum_seq_lens_q", "cum_seq_lens_kv"})
"""Tensors that say where sequences end."""
_CHANGED = 1 / 4
"""The part of numbers that are others."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What reading a file that is no record raises."""
_APART = 2 * GUARD + 2 * PAGE
"""Bytes between regions with guard zones of their own, at least: the zones, and what is left of pages."""


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


def entries(path: Path) -> frozenset[str]:
    """Return the entries that a record launches."""
    return frozenset(launched["entry"] for launched in json.loads(_read(path)[0])["launches"])


def same(paths: Sequence[Path]) -> str:
    """Return a text that is equal for equal memory and grids. It has nothing of the parameters, whose padding
    varies."""
    digest = hashlib.sha256()
    for path in paths:
        text, stored = _read(path)
        record = json.loads(text)
        launches = [{**launch, "params": None} for launch in record["launches"]]
        digest.update(json.dumps([record["memory"], launches]).encode())
        for _, content in sorted(stored.items()):
            digest.update(content.tobytes())
    return digest.hexdigest()


class Record:
    """A launch record, for as many runs as wanted. Its memory is allocated for each: records may share addresses.

    Raises RecordError.
    """

    def __init__(self, path: Path):
        try:
            text, stored = _read(path)
            record = json.loads(text)
            self._contents = {name: _content(name, memory, stored) for name, memory in record["memory"].items()}
            self.launches = [_launch(described) for described in record["launches"]]
            self.regions = [
                Region(memory["address"], memory["bytes"], name, bool(memory["writable"]))
                for name, memory in record["memory"].items()
            ]
        except _UNREADABLE as error:
            raise RecordError(f"{path} is not a launch record: {type(error).__name__}: {error}") from error

    def run(self, module: Module, options: Options, only: int | None = None) -> tuple[Report, dict[str, np.ndarray]]:
        """Run the launches on entries of `module`, memory as recorded. Returns the report and every writable memory.

        only: the one launch that `options` are for; those before it run without checks, leniently, those after it not
            at all.

        Raises EmulationError and GuardError.
        """
        launches = self.launches
        held = [allocate(end - first, first) for first, end in self._blocks()]  # until the run is over
        addresses = {region.name: region.address for region in self.regions}
        for name, content in self._contents.items():
            ctypes.memmove(addresses[name], content, len(content))
        if only is not None:
            machine.run_launches(module, launches[:only], self.regions, Options(lenient_tensor=True))
            launches = launches[only : only + 1]
        report = machine.run_launches(module, launches, self.regions, options)
        check_guards()
        written = [region for region in self.regions if region.writable]
        results = {r.name: np.frombuffer(ctypes.string_at(r.address, r.size), np.uint8) for r in written}
        del held
        return report, results

    def content(self, name: str) -> bytes:
        """Return what a region holds before a run."""
        return self._contents[name]

    def with_any_numbers(self, names: frozenset[str], seed: int) -> Record:
        """Return the record with random bits in some of its memory: 16-bit numbers of all sizes, above all small ones,
        and those near each other of like sizes."""
        random = np.random.default_rng(seed)
        other = copy.copy(self)
        other._contents = dict(self._contents)
        for name, content in self._contents.items():
            if not names.isdisjoint(name.partition("[")[0].split("+")):
                count = -(-len(content) // 2)
                pieces = -(-count // _ALIKE)
                any_size, small = random.integers(0, 256, pieces), random.integers(0, 16, pieces)
                largest = np.where(random.random(pieces) < 0.5, any_size, small)
                exponents = (largest.repeat(_ALIKE)[:count] - random.integers(0, 12, count)).clip(0)
                numbers = exponents << 7 | random.integers(0, 128, count) | random.integers(0, 2, count) << 15
                other._contents[name] = numbers.astype(np.uint16).tobytes()[: len(content)]
        return other

    def with_other_lengths(self, numbers: frozenset[str], bits: int, mantissa: int, seed: int) -> Record:
        """Return the record of a call of attention with other numbers of keys, with two cumulative lengths exchanged,
        and with some numbers of other sizes, as are all that were NaN: each power of two more is half as frequent.

        numbers: names of the tensors that hold them, of so many bits, and so many of these for the mantissa.
        """
        random = np.random.default_rng(seed)
        other = copy.copy(self)
        other._contents = dict(self._contents)
        for name, content in self._contents.items():
            named = frozenset(name.partition("[")[0].split("+"))
            if not named.isdisjoint(numbers):
                words = np.frombuffer(content, f"uint{bits}")
                top = (1 << bits - 1 - mantissa) - 1
                sizes = words.astype(np.int64) >> mantissa & top
                odd = sizes == top
                more = random.geometric(0.5, len(words)) - random.integers(1, 6, len(words))
                sizes = (np.where(odd, top // 2, sizes) + more).clip(0, top - 1)
                others = sizes << mantissa | words & (1 << mantissa) - 1 | random.integers(0, 2, len(words)) << bits - 1
                changed = odd | (random.random(len(words)) < _CHANGED)
                other._contents[name] = np.where(changed, others, words).astype(words.dtype).tobytes()
            elif "seq_lens" in named:
                lengths = np.frombuffer(content, np.int32)
                changed = random.random(len(lengths)) < 1 / 2
                others = random.integers(0, max(lengths) + 1, len(lengths))
                other._contents[name] = np.where(changed, others, lengths).astype(np.int32).tobytes()
            elif not named.isdisjoint(_ENDS):
                ends = np.frombuffer(content, np.int32).copy()
                one, two = random.choice(len(ends), 2, replace=False)
                ends[[one, two]] = ends[[two, one]]
                other._contents[name] = ends.tobytes()
        return other

    def _blocks(self) -> list[tuple[int, int]]:
        """Return where each piece of memory begins and ends that is allocated at once.

        Its guard zone begins with a page, and regions too near each other for zones of their own are in one.
        """
        blocks: list[tuple[int, int]] = []
        for region in sorted(self.regions, key=lambda region: region.address):
            end = region.address + region.size
            first = region.address - (region.address - GUARD) % PAGE
            if blocks and first - blocks[-1][1] < _APART:
                first, last = blocks.pop()
                end = max(end, last)
            blocks.append((first, end))
        return blocks


def _read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    if path.suffix == ".json":
        return path.read_text("utf-8"), {}
    with np.load(path) as arrays:
        stored = {name.removeprefix(_ARRAY): arrays[name] for name in arrays.files if name.startswith(_ARRAY)}
        return str(arrays["record"]), stored


def _content(name: str, memory: dict[str, Any], stored: dict[str, np.ndarray]) -> bytes:
    size, fill = memory["bytes"], memory["fill"]
    if fill == "stored":
        content = stored[name].tobytes()
    elif fill == "random":
        content = np.random.default_rng(0).standard_normal(-(-size // 4), np.float32).tobytes()[:size]
    elif fill == "zeros":
        content = bytes(size)
    elif fill == "poison":
        content = bytes([POISON]) * size
    else:
        raise ValueError(f"fill of {name} is {fill!r}; known: stored, random, zeros, poison")
    if len(content) != size:
        raise ValueError(f"{name} has {len(content)} stored bytes, its record says {size}")
    return content


def _launch(described: dict[str, Any]) -> Launch:
    sizes = {name: tuple(described[name]) for name in ("grid", "block", "cluster")}
    return Launch(**{**described, **sizes, "params": bytes.fromhex(described["params"])})
