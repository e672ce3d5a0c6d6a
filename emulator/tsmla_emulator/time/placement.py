"""Puts machine code in place of PTX in a warp's trace, wherever its way is known, with what that code costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..run.ptx.model import Entry
from .costs import Cost, Text
from .machine_code import Coded, instructions
from .machines import Machine
from .matching import ANCHORS, KINDS, Matcher, anchor_of, code_mix, mix_of

_COUNTERPARTS = {"arrive": "arrive", "load": "load", "store": "store", "copy": "copy", "init": "init"}
"""Kinds that are no anchors but have an effect -> names of machine_code. The n-th of a stretch is the n-th in the
machine code."""
FREE_SCOREBOARDS = ("wait", "tensor_load", "tensor_wait_store")
"""Kinds whose warp goes on until an instruction awaits the scoreboard that they free."""
NOT_CODE = -1

Key = tuple[int, int]
"""Position in the machine code and position in the PTX; NOT_CODE for none."""


class Placer:
    """Turns the traces of one kernel into keys: an instruction of the machine code, one of the PTX, or two that are
    one.

    keys: all that were placed so far; a placed trace counts from `first`.
    matched, all: stretches between anchors.
    asked, given: instructions by kind (matching.KINDS) of the PTX of matched stretches, and of their machine code.
    """

    def __init__(self, code: Sequence[Coded], opcodes: Sequence[str], first: int):
        self.code, self.opcodes, self.first = code, opcodes, first
        self.keys: list[Key] = []
        self.matched, self.all = 0, 0
        self.asked, self.given = np.zeros(len(KINDS), int), np.zeros(len(KINDS), int)
        self._numbers: dict[Key, int] = {}
        self._matcher = Matcher(code)
        self._placed: dict[bytes, tuple[Any, Any, tuple[int, int], Any]] = {}

    def place(self, positions: Any, notes: Any, costs: Sequence[Cost]) -> tuple[Any, Any]:
        """Return the trace of a warp (positions in the PTX, notes of effects) with machine code in it."""
        kept = positions.tobytes()
        if kept not in self._placed:
            self._placed[kept] = self._keys_of(positions.tolist(), costs)
        numbers, moved, (matched, count), (asked, given) = self._placed[kept]
        self.matched, self.all = self.matched + matched, self.all + count
        self.asked, self.given = self.asked + asked, self.given + given
        notes = notes.copy()
        if len(notes):
            notes[:, 0] = moved[notes[:, 0]]
            notes = notes[np.argsort(notes[:, 0], kind="stable")]
        return numbers, np.ascontiguousarray(notes)

    def _keys_of(self, ptx: list[int], costs: Sequence[Cost]) -> tuple[Any, Any, tuple[int, int], Any]:
        ends = [at for at, pc in enumerate(ptx) if pc < len(costs) and costs[pc].kind in ANCHORS]
        starts = [0, *(end + 1 for end in ends)]
        parts = [range(start, end) for start, end in zip(starts, [*ends, len(ptx)], strict=True)]
        mixes = [
            mix_of(
                [self.opcodes[ptx[at]] for at in part if ptx[at] < len(costs)],
                [costs[ptx[at]] for at in part if ptx[at] < len(costs)],
            )
            for part in parts
        ]
        stretches = self._matcher.stretches([anchor_of(costs[ptx[at]], self.opcodes[ptx[at]]) for at in ends], mixes)
        found: list[int] = []
        moved = np.zeros(len(ptx), np.int64)

        def put(at: int | None, position: int = NOT_CODE) -> None:
            if at is not None:
                moved[at] = len(found)
            found.append(self._number((position, NOT_CODE if at is None else ptx[at])))

        for stretch, part, end in zip(stretches, parts, [*ends, None], strict=True):
            if stretch.way is None:
                for at in part:
                    put(at)
            else:
                self._merge(part, ptx, costs, stretch.way, put)
            if end is not None:
                put(end, NOT_CODE if stretch.anchor is None else stretch.anchor)
        known = [number for number, stretch in enumerate(stretches) if stretch.way is not None]
        asked = np.sum([mixes[number] for number in known], axis=0)
        given = np.sum([code_mix(self.code, stretches[number].way or ()) for number in known], axis=0)
        return np.array(found, np.uint32), moved, (len(known), len(stretches)), (asked, given)

    def _merge(self, part: range, ptx: list[int], costs: Sequence[Cost], way: tuple[int, ...], put: Any) -> None:
        """Put the machine code of a stretch with the effects of its PTX, each where its counterpart is, else where it
        lay in the PTX."""
        effects = [at for at in part if ptx[at] < len(costs) and not self._in_scoreboards(ptx[at], costs[ptx[at]])]
        names = [_counterpart(costs[ptx[at]], self.opcodes[ptx[at]]) for at in effects]
        have = {name: sum(self.code[position].name == name for position in way) for name in set(names)}
        waiting: dict[str, list[int]] = {}
        alone = []
        for at, name in zip(effects, names, strict=True):
            if have.get(name, 0) > len(waiting.get(name, [])):
                waiting.setdefault(name, []).append(at)
            else:
                alone.append((len(way) * (at - part.start) // max(1, len(part)), at))
        alone.reverse()
        for number, position in enumerate(way):
            while alone and alone[-1][0] <= number:
                put(alone.pop()[1])
            own = waiting.get(self.code[position].name)
            put(own.pop(0) if own else None, position)
        for _, at in reversed(alone):
            put(at)

    def _in_scoreboards(self, pc: int, cost: Cost) -> bool:
        """Whether machine code has no instruction for this one's effect: it is plain, or scoreboards of others see to
        it."""
        return cost.kind in ("plain", "free", "tensor_wait_load") or self.opcodes[pc].startswith("tcgen05.fence")

    def _number(self, key: Key) -> int:
        if key not in self._numbers:
            self._numbers[key] = self.first + len(self.keys)
            self.keys.append(key)
        return self._numbers[key]


def text_of(entry: Entry, arch: str, library: Path | None) -> Text:
    """Return what an entry's text says, with the machine code that a library has of it, if any."""
    text = Text(entry, arch)
    if library and (code := instructions(library, entry.name)):
        text.placer = Placer(code, [one.opcode for one in entry.instructions], len(entry.instructions) + 1)
    return text


def _counterpart(cost: Cost, opcode: str) -> str:
    if cost.kind == "tensor_wait_store":
        return "tensor_fence"
    if cost.kind == "stall":
        return "registers" if opcode.startswith("setmaxnreg") else "fence"
    return _COUNTERPARTS.get(cost.kind, "")


def cost_of(key: Key, code: Sequence[Coded], ptx: Sequence[Cost], machine: Machine) -> Cost:
    """Return what an instruction of a placed trace costs."""
    position, pc = key
    if position == NOT_CODE:
        cost = ptx[pc] if pc < len(ptx) else Cost("other")
        return cost if cost.kind in ("plain", "free") else dataclasses.replace(cost, ordered=1, slots=0)
    coded = code[position]
    cost = _plain(coded, machine) if pc == NOT_CODE else ptx[pc]
    frees = pc == NOT_CODE or cost.kind in FREE_SCOREBOARDS
    result = coded.result + 1 if frees and coded.result is not None else 0
    operands = 0 if coded.operands is None else coded.operands + 1
    return dataclasses.replace(
        cost, rule="code", ordered=1, slots=1, stall=coded.stall, awaits=coded.awaits, sets=result | operands << 4
    )


def _plain(coded: Coded, m: Machine) -> Cost:
    name = coded.name
    if name in ("fma", "integer", "fma2"):
        return Cost("code", pipe="fma", occupancy=m.fma.clocks * (2 if name == "fma2" else 1))
    if name in ("alu", "maximum", "select"):
        return Cost("code", pipe="alu", occupancy=m.alu.clocks)
    if name == "convert":
        return Cost("code", pipe=m.convert_pipe, occupancy=m.convert.clocks)
    if name == "special":
        clocks = m.exponential.clocks if coded.size == 2 else m.special.clocks
        return Cost("code", pipe="mufu", occupancy=clocks, latency=m.special_latency.clocks)
    if name == "warp_product":
        clocks, latency = m.warp_product.clocks, m.warp_product_latency.clocks
        return Cost("code", pipe="warp_product", occupancy=clocks, latency=latency)
    if name == "shuffle":
        return Cost("code", pipe="move", occupancy=m.shuffle.clocks, latency=m.shuffle_latency.clocks, port=1)
    if name in ("ldmatrix", "load_shared"):
        return Cost("code", pipe="move", occupancy=1, latency=m.shared_latency.clocks, port=coded.size, loads=1)
    if name in ("stmatrix", "store_shared"):
        return Cost("code", pipe="move", occupancy=1, port=coded.size)
    if name in ("load_global", "store_global", "copy"):
        latency = m.load_latency.clocks if name == "load_global" else 0
        return Cost("code", pipe="move", occupancy=m.shuffle.clocks, latency=latency)
    if name == "constant":
        return Cost("code", latency=m.constant_latency.clocks)
    return Cost("code")
