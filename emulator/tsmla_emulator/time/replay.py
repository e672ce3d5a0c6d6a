"""Replays traces on a machine: prepares what the interpreter recorded and calls core/replay.cpp."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_uint8, c_uint32, c_uint64
from typing import Any

import numpy as np

from ..run.core.binding import core
from ..run.machine import EmulationError, Trace
from ..run.ptx.lower import lower
from .classes import polling_loop
from .costs import KINDS_OF_REPLAY, PIPES, Cost, Text, costs_of, product_clocks
from .machines import Machine

FAILED, IDLE = 1 << 31, 1 << 30
UNKNOWN = 1 << 31
"""Flag beside the place of a test: no run has shown what the warp would have done if it had found what it asked
about."""
ARRIVE, WAIT, STORE, PRODUCT = 1, 2, 4, 6
"""Kinds of notes (core/trace.h)."""
END = Cost("other")
"""What falling off the end costs."""
BIN, BINS = 32, 1 << 15


class _Cost(Structure):
    _fields_ = (
        ("kind", c_uint8), ("pipe", c_uint8), ("slots", c_uint8), ("registers", c_uint8), ("occupancy", c_uint32),
        ("latency", c_uint32), ("port", c_uint32), ("value", c_uint32), ("operands", c_uint32), ("first", c_uint32),
        ("reads", c_uint32), ("writes", c_uint32), ("loads", c_uint8), ("ordered", c_uint8), ("stall", c_uint8),
        ("awaits", c_uint8), ("sets", c_uint8), ("line", c_uint32),
    )  # fmt: skip


_INTEGERS = (
    "window barrier_visible barrier_wake barrier_ready barrier_remote named_base named_warp cluster_barrier copy_issue "
    "copy_latency store_latency wgmma_start wgmma_tail wgmma_registers wgmma_queue product_start product_tail "
    "lines_ahead line_ahead line_behind"
).split()


class _Parameters(Structure):
    _fields_ = (*((name, c_uint32) for name in _INTEGERS), ("beside", c_uint32 * len(PIPES)), ("copy_rate", c_double))


class _WarpTrace(Structure):
    _fields_ = (
        ("instructions", POINTER(c_uint32)),
        ("notes", POINTER(c_uint32)),
        ("instruction_count", c_uint64),
        ("note_count", c_uint64),
        ("rank", c_uint32),
        ("warp", c_uint32),
        ("tests", POINTER(c_uint32)),
        ("test_count", c_uint64),
    )


class _Waited(Structure):
    _fields_ = (("warp", c_uint32), ("pc", c_uint32), ("start", c_uint64), ("end", c_uint64))


class _Busy(Structure):
    _fields_ = (
        ("issue", c_uint64 * 4),
        ("pipes", c_uint64 * len(PIPES) * 4),
        ("tensor", c_uint64),
        ("port", c_uint64),
        ("copied", c_uint64),
        ("tensor_bins", c_uint32 * BINS),
        ("mufu_bins", c_uint32 * BINS),
    )


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a copy finds: clocks until its first byte, and the SM's share of bytes a clock while all SMs copy."""

    latency: float
    rate: float


@dataclasses.dataclass(frozen=True)
class Waited:
    """A warp (rank in the cluster, index in the CTA) at an instruction that waits, from clock to clock."""

    rank: int
    warp: int
    position: int
    start: int
    end: int


@dataclasses.dataclass
class Replayed:
    """One cluster's time in clocks. `busy`: clocks by unit of its first SM, `coverage`: warp instructions by rule."""

    clocks: int
    waits: list[Waited]
    busy: dict[str, float]
    tensor_bins: Any
    mufu_bins: Any
    coverage: collections.Counter[str]
    copied: int


def _row(cost: Cost, first: int, reads: int, writes: int) -> _Cost:
    return _Cost(
        KINDS_OF_REPLAY.index(cost.kind),
        PIPES.index(cost.pipe),
        cost.slots,
        cost.registers,
        cost.occupancy,
        cost.latency,
        cost.port,
        cost.value,
        cost.operands,
        first,
        reads,
        writes,
        cost.loads,
        cost.ordered,
        cost.stall,
        cost.awaits,
        cost.sets,
        cost.line,
    )


def table_of(costs: Sequence[Cost], operands: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, Any]:
    """Return costs as the replay reads them, and the numbers of the registers that each reads and writes."""
    lists: list[int] = []
    rows = []
    for cost, (reads, writes) in zip(costs, operands, strict=True):
        rows.append(_row(cost, len(lists), len(reads), len(writes)))
        lists += [*reads, *writes]
    return (_Cost * len(rows))(*rows), (c_int32 * max(1, len(lists)))(*lists)


class Prepared:
    """An entry's costs on a machine, made once for many replays.

    costs: by the numbers in traces, which are positions in the PTX here.
    """

    def __init__(self, text: Text, machine: Machine):
        self.entry, self.machine = text.entry, machine
        self.costs = [*costs_of(text, machine), END]
        operands = [*text.operands, ([], [])]
        self.slots = 1 + max((number for pair in operands for numbers in pair for number in numbers), default=0)
        self.table, self.lists = table_of(self.costs, operands)
        opcodes = [instruction.opcode for instruction in self.entry.instructions]
        self._tests = [*text.tests]
        self._mbarriers = [number for number, opcode in enumerate(opcodes) if opcode.startswith("mbarrier.")]
        self._boxes = np.array([*(opcode.startswith("cp.async.bulk.tensor") for opcode in opcodes), False])
        self._products: dict[tuple[int, int, int], int] = {}
        """Clocks by number, descriptor and CTAs."""

    def position(self, number: int) -> int:
        """Return the position in `entry.instructions` of a number in a cleaned trace."""
        return number

    def tests(self, code: Any) -> Any:
        """Return where in a cleaned trace a warp asks whether a phase is complete, and goes on either way."""
        numbers = [number for number in np.unique(code).tolist() if self.position(number) in self._tests]
        return np.flatnonzero(np.isin(code, numbers)).astype(np.uint32)

    def unknown(self, ways: Sequence[tuple[Any, Any]], places: Sequence[Any]) -> Any:
        """Return which tests of a warp's first cleaned trace failed there, so that no run shows what follows when they
        succeed.

        ways: two cleaned traces of the warp; in the second, all tests fail. places: their tests. Where a warp tests
        several barriers in turn, only the last test is in a trace, and the second's may have succeeded instead.
        """
        (first, notes), (second, other_notes) = ways
        instead = {self.position(int(second[at])) for at in places[1] if _noted(other_notes, at)}
        found = [_noted(notes, at) and self.position(int(first[at])) not in instead for at in places[0]]
        return ~np.array(found, bool)

    def clean(self, trace: Trace) -> tuple[Any, Any]:
        """Return the numbers of a trace's instructions without polling, the notes that go with them, and products with
        their clocks."""
        flagged, notes = trace.instructions, trace.notes.copy()
        code = flagged & np.uint32(~(FAILED | IDLE) & 0xFFFFFFFF)
        keep = np.ones(len(code), bool)
        asked = np.flatnonzero(np.isin(code, self._mbarriers))
        tests = np.isin(code[asked], self._tests)
        for pair in np.flatnonzero(tests[1:] & tests[:-1]):  # a warp that asks in turns is where it asks last
            keep[asked[pair] : asked[pair + 1]] = False
        self._leave_out(code, flagged, notes, keep)
        if len(notes):
            again = np.zeros(len(notes), bool)
            again[1:] = (notes[1:] == notes[:-1]).all(axis=1) & (notes[1:, 1] == STORE)
            notes = notes[~(again & self._boxes[code[notes[:, 0]]])]  # the machine's instruction is the warp's
            products = notes[:, 1] == PRODUCT
            of = code[notes[products, 0]]
            notes[products, 4] = [
                self._product(int(number), int(row[2]), int(row[3]))
                for number, row in zip(of, notes[products], strict=True)
            ]
            notes[products, 5] = 0
            notes[:, 0] = (np.cumsum(keep) - 1)[notes[:, 0]]
            notes = notes[np.argsort(notes[:, 0], kind="stable")]
        return np.ascontiguousarray(self._numbers(code, flagged)[keep]), np.ascontiguousarray(notes)

    def _leave_out(self, code: Any, flagged: Any, notes: Any, keep: Any) -> None:
        """Take polling out of `keep`: a try that found the phase open, and its way back."""
        for at in np.flatnonzero(flagged & np.uint32(FAILED)):
            loop = polling_loop(self.entry, int(code[at]))
            if loop and list(code[at : at + len(loop)]) == list(loop):
                keep[at : at + len(loop)] = False

    def _numbers(self, code: Any, _flagged: Any) -> Any:
        return code

    def _product(self, number: int, descriptor: int, ctas: int) -> int:
        key = (number, descriptor, ctas)
        if key not in self._products:
            self._products[key] = product_clocks(self._flags(number), descriptor, ctas)
        return self._products[key]

    def _flags(self, number: int) -> int:
        return lower(self.entry, self.entry.instructions[number]).flags


def _noted(notes: Any, place: int) -> bool:
    return len(notes) > 0 and bool((notes[:, 0] == place).any())


def _c_trace(trace: Trace, code: Any, notes: Any, tests: Any) -> _WarpTrace:
    code_c, notes_c, tests_c = (words.ctypes.data_as(POINTER(c_uint32)) for words in (code, notes, tests))
    return _WarpTrace(code_c, notes_c, len(code), len(notes), trace.rank, trace.warp, tests_c, len(tests))


def replay(
    prepared: Prepared, traces: Sequence[Trace], memory: Memory, others: Sequence[Trace] = (), cold: bool = False
) -> Replayed:
    """Replay one cluster.

    others: what its warps ran with `Options.tests_fail`. Each test then goes the way of what it finds in the replay;
    without them, tests wait for what they found in the trace. cold: no cache of the SM holds the code; of machine code
    only. Raises EmulationError when warps wait for each other, which shows a hole of the model.
    """
    machine = prepared.machine
    values = {name: getattr(machine, name).clocks for name in _INTEGERS}
    values["copy_latency"] = round(memory.latency)
    if not cold:
        values["line_ahead"] = values["line_behind"] = 0
    parameters = _Parameters(**values, copy_rate=memory.rate)
    for number, pipe in enumerate(PIPES):
        slower = getattr(machine, f"beside_{pipe}", None)
        parameters.beside[number] = round(64 * slower.value) if slower else 64
    cleaned = [prepared.clean(trace) for trace in traces]
    none = np.zeros(0, np.uint32)
    tests, second = [none] * len(traces), [(none, none, none)] * len(traces)
    failing = {(other.rank, other.warp): other for other in others}
    for number, trace in enumerate(traces):
        if other := failing.get((trace.rank, trace.warp)):
            ways = [cleaned[number], prepared.clean(other)]
            places = [prepared.tests(code) for code, _ in ways]
            if len(places[0]) == len(places[1]):
                unknown = prepared.unknown(ways, places)
                tests[number], second[number] = places[0] | (unknown * np.uint32(UNKNOWN)), (*ways[1], places[1])
    every = zip(traces, cleaned, tests, second, strict=True)
    firsts, seconds = zip(*((_c_trace(t, *way, at), _c_trace(t, *other)) for t, way, at, other in every), strict=True)
    warps, alternatives = ((_WarpTrace * len(traces))(*each) for each in (firsts, seconds))
    ranks = 1 + max(trace.rank for trace in traces)
    busy = (_Busy * ranks)()
    waits, count = POINTER(_Waited)(), c_uint64()
    call = core().tsmla_emulator_replay
    call.restype = c_uint64
    clocks = call(
        prepared.table,
        prepared.lists,
        c_uint32(prepared.slots),
        byref(parameters),
        warps,
        alternatives,
        c_uint64(len(traces)),
        busy,
        byref(waits),
        byref(count),
    )
    waited = [
        Waited(traces[w.warp].rank, traces[w.warp].warp, prepared.position(w.pc), w.start, w.end)
        for w in waits[: count.value]
    ]
    core().tsmla_emulator_free.argtypes = (ctypes.c_void_p,)
    core().tsmla_emulator_free(waits)
    if clocks == 2**64 - 1:
        raise EmulationError("the replay of the trace stands still: its warps wait for each other", "deadlock")
    first = busy[0]
    units = {"issue": sum(first.issue) / 4, "tensor": float(first.tensor), "shared memory": float(first.port)}
    for number, pipe in enumerate(PIPES[1:], 1):
        units[pipe] = sum(first.pipes[part][number] for part in range(4)) / 256
    units["copies"] = first.copied / memory.rate
    coverage: collections.Counter[str] = collections.Counter()
    for code, _ in cleaned:
        for position, times in zip(*np.unique(code, return_counts=True), strict=True):
            coverage[prepared.costs[int(position)].rule] += int(times)
    return Replayed(
        int(clocks), waited, units, np.array(first.tensor_bins), np.array(first.mufu_bins), coverage, int(first.copied)
    )
