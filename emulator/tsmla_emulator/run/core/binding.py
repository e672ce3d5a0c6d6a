"""ctypes face of the interpreter: runs launches one after the other and turns faults into EmulationError."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from ..host.launch_config import check_of_any_host
from ..machine import SHARED_BYTES_PER_CTA, EmulationError, Finding, Launch, Options, Region, Report, Trace
from ..ptx.model import Entry, Module
from ..ptx.program import Program, build_program
from .build import library

_MODES = {"eager": 0, "random": 1, "late": 2}
_POSITION = re.compile(r"@pc:(\d+)@")
_MAX_TEXT = 1 << 20


class _Region(Structure):
    _fields_ = (("address", c_uint64), ("size", c_uint64), ("writable", c_uint32), ("index", c_uint32))


class _Launch(Structure):
    _fields_ = (
        ("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("cluster", c_uint32 * 3),
        ("static_shared", c_uint32), ("dynamic_shared", c_uint32), ("param_bytes", c_uint32),
        ("architecture", c_uint32), ("pdl", c_uint32), ("clusters_talk", c_uint32),
        ("machine_code", c_uint32), ("cooperative", c_uint32), ("params", c_void_p),
    )  # fmt: skip


class _Options(Structure):
    _fields_ = (
        ("mode", c_uint32), ("quantum", c_uint32), ("happens_before", c_uint32), ("lenient_tensor", c_uint32),
        ("lockstep", c_uint32), ("poison", c_uint32), ("threads", c_uint32), ("elect_highest", c_uint32),
        ("count", c_uint32), ("findings", c_uint32), ("tests_fail", c_uint32), ("hardware_sums", c_uint32),
        ("starved_count", c_uint32), ("starved", POINTER(c_uint32)),
        ("only_traced", c_uint32), ("traced_count", c_uint32), ("traced", POINTER(c_uint32)), ("seed", c_uint64),
        ("limit", c_uint64),
    )  # fmt: skip


class _Program(Structure):
    _fields_ = (
        ("code", c_char_p),
        ("lists", c_void_p),
        ("constants", c_void_p),
        ("code_count", c_uint64),
        ("list_count", c_uint64),
        ("constant_count", c_uint64),
        ("slots", c_uint64),
    )


class _Failure(Structure):
    _fields_ = (
        ("text", c_char_p),
        ("size", c_uint64),
        ("pc", c_int64),
        ("cta", c_uint32 * 3),
        ("warp", c_uint32),
        ("known", c_uint32),
    )


class _Trace(Structure):
    _fields_ = (
        ("instructions", POINTER(c_uint32)),
        ("notes", POINTER(c_uint32)),
        ("instruction_count", c_uint64),
        ("note_count", c_uint64),
    )


@cache
def core() -> ctypes.CDLL:
    """The interpreter's library."""
    loaded = ctypes.CDLL(str(library()))
    loaded.tsmla_emulator_run.restype = c_int
    loaded.tsmla_emulator_free_traces.argtypes = (POINTER(_Trace), c_uint64)
    loaded.tsmla_emulator_free_traces.restype = None
    loaded.tsmla_emulator_run.argtypes = (
        POINTER(_Program), POINTER(_Launch), POINTER(_Region), c_uint64, POINTER(_Options), POINTER(c_uint64),
        POINTER(c_uint64), POINTER(_Trace), POINTER(_Failure),
    )  # fmt: skip
    return loaded


def execute(module: Module, launches: list[Launch], regions: list[Region], options: Options) -> Report:
    """See machine.run_launches."""
    report = Report()
    for number, launch in enumerate(launches):
        entry = module.entries.get(launch.entry)
        if entry is None:
            raise EmulationError(f"no entry {launch.entry!r}; the module has {', '.join(module.entries)}", "launch")
        check_of_any_host(launch, entry)
        _run(module, entry, launch, regions, options, report, number)
    return report


def program_of(module: Module, entry: Entry) -> Program:
    """The entry's program, encoded once; change an entry by replacing it, not its instructions in place."""
    known = module.programs.get(entry.name)
    if not isinstance(known, Program) or known.entry is not entry:
        known = module.programs[entry.name] = build_program(entry)
    return known


def _run(
    module: Module, entry: Entry, launch: Launch, regions: list[Region], options: Options, report: Report, number: int
) -> None:
    program = program_of(module, entry)
    used = program.static_shared - 0x400 + launch.shared_bytes
    if used > SHARED_BYTES_PER_CTA:
        raise EmulationError(f"{entry.name}: {used} bytes of shared memory, a CTA has {SHARED_BYTES_PER_CTA}", "budget")
    size = program.block_bytes(launch)
    params = (ctypes.c_uint8 * (size + 64))()
    base = -(-ctypes.addressof(params) // 64) * 64
    ctypes.memmove(base, program.block(launch, base), size)
    architecture = int(re.sub(r"\D", "", module.target) or 0)
    launch_c = _Launch(
        launch.grid,
        launch.block,
        launch.cluster,
        program.static_shared,
        launch.shared_bytes,
        size,
        architecture,
        int(launch.pdl),
        int(program.clusters_talk),
        int(entry.machine_code),
        int(launch.cooperative),
        base,
    )
    regions_c = (_Region * max(1, len(regions)))(
        *(_Region(r.address, r.size, int(r.writable), i) for i, r in enumerate(regions))
    )
    starve = options.starve or ()
    clusters = math.prod(a // b for a, b in zip(launch.grid, launch.cluster, strict=True))
    traced = [cluster for cluster in options.trace if cluster < clusters]
    options_c = _Options(
        _MODES[options.async_mode],
        options.quantum,
        int(options.happens_before),
        int(options.lenient_tensor or entry.machine_code),
        int(options.lockstep or entry.machine_code),
        int(options.poison),
        options.threads,
        int(options.elect_highest),
        int(options.count),
        options.findings,
        int(options.tests_fail),
        int(options.hardware_sums),
        len(starve),
        (c_uint32 * max(1, len(starve)))(*starve),
        int(options.only_traced),
        len(traced),
        (c_uint32 * max(1, len(traced)))(*traced),
        options.seed,
        options.limit,
    )
    lists = (ctypes.c_int32 * max(1, len(program.lists)))(*program.lists)
    constants = (c_uint32 * max(1, len(program.constants)))(*program.constants)
    size = len(program.code) // 48
    program_c = _Program(
        program.code,
        ctypes.addressof(lists),
        ctypes.addressof(constants),
        size,
        len(program.lists),
        len(program.constants),
        program.slots,
    )
    text = ctypes.create_string_buffer(_MAX_TEXT)
    failure = _Failure(ctypes.cast(text, c_char_p), len(text))
    executed = c_uint64()
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
    lanes = (c_uint64 * (warps * size))() if options.count else None
    ranks = math.prod(launch.cluster)
    traces = (_Trace * max(1, len(traced) * ranks * warps))()
    failed = core().tsmla_emulator_run(
        byref(program_c),
        byref(launch_c),
        regions_c,
        len(regions),
        byref(options_c),
        byref(executed),
        lanes,
        traces,
        byref(failure),
    )
    report.warp_instructions += executed.value
    for at, count in enumerate(lanes or ()):
        warp, position = divmod(at, size)
        if count and position < len(entry.instructions):
            key = entry.name, warp, position
            report.lanes[key] = report.lanes.get(key, 0) + count
    for position, data in enumerate(traces[: len(traced) * ranks * warps]):
        at, warp = divmod(position, warps)
        place = (entry.name, number, traced[at // ranks], at % ranks, warp)
        report.traces.append(
            Trace(
                *place, _copied(data.instructions, data.instruction_count, 1), _copied(data.notes, data.note_count, 6)
            )
        )
    core().tsmla_emulator_free_traces(traces, len(traced) * ranks * warps)
    if failed:
        raise _error(entry, failure, text.value.decode(), regions)


def _copied(words: Any, count: int, width: int) -> Any:
    """Rows of `width` words; a plain array where they are single."""
    if not count:
        return np.zeros((0, width) if width > 1 else 0, np.uint32)
    flat = np.ctypeslib.as_array(words, (count * width,)).copy()
    return flat.reshape(count, width) if width > 1 else flat


def _error(entry: Entry, failure: _Failure, text: str, regions: list[Region]) -> EmulationError:
    kind, _, message = text.partition("\n")
    message = re.sub(r"@region:(\d+)@", lambda found: repr(regions[int(found[1])].name), message)
    findings = tuple(_findings(entry, failure, kind, message))
    message = _POSITION.sub(lambda found: place(entry, int(found[1])), message)
    where, line, source = "", 0, ""
    if failure.known and failure.pc < len(entry.instructions):
        instruction = entry.instructions[failure.pc]
        line = instruction.line
        if instruction.source is not None:
            source = f"{instruction.source.file}:{instruction.source.line}"
        where = (
            f"\n  CTA {tuple(failure.cta)} warp {failure.warp}, {place(entry, failure.pc)}: {instruction.text[:160]}"
        )
    return EmulationError(f"{kind}: {message}\n  kernel {entry.name}{where}", kind, line, source, findings)


def _findings(entry: Entry, failure: _Failure, kind: str, message: str) -> Iterator[Finding]:
    """The parts of a message, each with its own kind. A failure that names no instruction is at the one that ran."""
    for count, text in enumerate(message.partition("\n  roles: ")[0].split("\n  and ")):
        if ending := re.match(r"then, ([\w ]+): ", text):
            kind, text = ending[1], text[ending.end() :]
        elif count:
            kind = "exit" if " ends, and nothing says" in text else "race"
        positions = [int(position) for position in _POSITION.findall(text)]
        if not positions and not ending and failure.known:
            positions = [failure.pc]
        known = tuple(entry.instructions[p] for p in positions if p < len(entry.instructions))
        yield Finding(kind, _POSITION.sub("@", text), known)


def place(entry: Entry, position: int) -> str:
    """Where an instruction is, for people: its line, and the role, function and what this calls, as far as known."""
    if position >= len(entry.instructions):
        return "the end of the kernel"
    line, source = entry.instructions[position].line, entry.instructions[position].source
    if entry.machine_code:
        return f"machine code 0x{line:04x}, {entry.instructions[position].opcode}"
    if source is None:
        return f"PTX line {line}"
    said = [f"{source.file}:{source.line}"]
    if source.asker is not None:
        call = source.calls[source.asker]
        said.insert(0, f"{call.function}: {call.callee}" if call.callee else call.function)
    if source.role:
        said.insert(0, f"role {source.role}")
    return f"PTX line {line} ({', '.join(said)})"
