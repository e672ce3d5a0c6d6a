"""The command `tsmla-emulator`, which runs kernels without their GPU."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsmla.identity.arch import SHIPPED_ARCHS

from .run.host.memory import GuardError
from .run.machine import EmulationError, Options, Report
from .run.ptx.model import PtxError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 good, 1 the kernel is not, 2 wrong use, or something is missing."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (EmulationError, GuardError, PtxError) as error:
        print(f"tsmla-emulator: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        print(f"tsmla-emulator: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tsmla-emulator", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "run tsmla kernels on small problems and compare with torch, or a PTX file with a launch record"
    run = commands.add_parser("run", help=text, description=text)
    run.set_defaults(run=_run)
    run.add_argument("symbols", nargs="*", metavar="SYMBOL", help="kernels of tsmla, such as tsmla_pack_sm_100a_...")
    run.add_argument("--ptx", type=Path, help="PTX text of some kernel")
    run.add_argument("--record", type=Path, help="its launches and memory, JSON or NPZ")
    run.add_argument("--save", type=Path, help="with --record: write the memory that launches could write to, as NPZ")
    _add_options(run)
    text = "model how long kernels take: clk, busy units, waits by edge, a timeline; see emulator/docs/timing-model.md"
    timing = commands.add_parser("time", help=text, description=text)
    timing.set_defaults(run=_time)
    timing.add_argument("symbols", nargs="*", metavar="SYMBOL", help="kernels of tsmla, or a peer's")
    timing.add_argument("--peers", action="store_true", help="print what kernels of other packages the model knows")
    timing.add_argument(
        "--shape",
        nargs="+",
        default=[],
        metavar="SxQxKxH",
        help="sequences x queries x keys x heads, such as 1x8Kx8Kx128",
    )
    timing.add_argument("--machine", help=f"{', '.join(arch.gpus for arch in SHIPPED_ARCHS)}; default: by architecture")
    timing.add_argument("--clock", type=float, metavar="MHZ", help="SM clock; memory is so many bytes a clock")
    timing.add_argument(
        "--machine-code",
        action=argparse.BooleanOptionalAction,
        help="run machine code or PTX; default: as was held against a GPU",
    )
    timing.add_argument("--no-band", action="store_true", help="do not vary uncertain numbers")
    text = "tell which instructions of kernels no call of the checks executes, so that no mutant of them is ever tried"
    reached = commands.add_parser("reach", help=text, description=text)
    reached.set_defaults(run=_reach)
    reached.add_argument("symbols", nargs="+", metavar="SYMBOL", help="kernels of tsmla")
    reached.add_argument("--machine-code", action="store_true", help="of what ptxas made of them")
    text = "change an instruction that synchronises, places or masks, one at a time, and tell which no check catches"
    mutate = commands.add_parser("mutate", help=text, description=text)
    mutate.set_defaults(run=_mutate)
    mutate.add_argument("symbols", nargs="*", metavar="SYMBOL", help="kernels of tsmla")
    mutate.add_argument(
        "--kernel",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "PTX", "RECORD"),
        help="another kernel and the record of a call",
    )
    mutate.add_argument("--reasons", type=Path, help="JSON that says why survivors are redundant")
    mutate.add_argument("--only", default="", metavar="TEXT", help="mutants with this in their names, such as a file's")
    mutate.add_argument("--list", action="store_true", help="print tsmla's mutants and try none; check reasons' names")
    mutate.add_argument("--table", type=Path, help="write the results as Markdown")
    mutate.add_argument("--processes", type=int, default=2)
    mutate.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="keep what is compiled and found, to go on there, or on another machine",
    )
    mutate.add_argument("--prepare", action="store_true", help="with --keep: only compile")
    mutate.add_argument("--seconds", type=float, help="with --keep: go on for so long")
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    """Add the fields of `Options`, for every command that runs kernels."""
    default = Options()
    command.add_argument("--async-mode", choices=["eager", "random", "late"], default=default.async_mode)
    command.add_argument("--seed", type=int, default=default.seed, help="of everything that varies")
    command.add_argument("--quantum", type=int, default=default.quantum, help="instructions between two warps' turns")
    command.add_argument("--starve", type=int, nargs="+", metavar="WARP", help="run only when nothing else can")
    command.add_argument("--happens-before", action="store_true", help="report unordered conflicting accesses")
    text = "tcgen05 as kernels of others use it: without fences, loads that end where their values are used, and lanes "
    text += "of the warp at any address"
    command.add_argument("--lenient-tensor", action="store_true", help=text)
    text = "take each lane of a warp to know what the others do, for kernels that rely on it"
    command.add_argument("--lockstep", action="store_true", help=text)
    command.add_argument("--elect-highest", action="store_true", help="elect.sync picks the highest lane")
    command.add_argument("--limit", type=int, default=default.limit, help="instructions after which a run is endless")
    command.add_argument("--threads", type=int, default=default.threads, help="clusters that run at the same time")
    command.add_argument("--machine-code", action="store_true", help="run the machine code in the library, not its PTX")
    command.add_argument("--hardware-sums", action="store_true", help="sum products of matrices as tensor cores do")


def _options(given: argparse.Namespace) -> Options:
    return Options(
        async_mode=given.async_mode,
        seed=given.seed,
        quantum=given.quantum,
        starve=tuple(given.starve) if given.starve else None,
        happens_before=given.happens_before,
        lenient_tensor=given.lenient_tensor,
        lockstep=given.lockstep,
        elect_highest=given.elect_highest,
        threads=given.threads,
        machine_code=given.machine_code,
        hardware_sums=given.hardware_sums,
        limit=given.limit,
    )


def _run(given: argparse.Namespace) -> int:
    if bool(given.symbols) == bool(given.ptx) or bool(given.ptx) != bool(given.record):
        raise ValueError("run takes either symbols of tsmla kernels, or --ptx together with --record")
    if given.symbols and given.save:
        raise ValueError("--save goes with --record: it writes the memory that a record's launches could write to")
    if given.record and given.machine_code:
        raise ValueError("--machine-code goes with symbols of tsmla kernels: a record has PTX alone")
    return _run_symbols(given) if given.symbols else _run_record(given)


def _run_symbols(given: argparse.Namespace) -> int:
    from .prove import check
    from .run.host.compile import compile_all

    if files := [symbol for symbol in given.symbols if Path(symbol).suffix]:
        raise ValueError(f"{files[0]} is a file, and no symbol of a kernel; files go with --ptx FILE --record FILE")
    variants = [check.find(symbol) for symbol in given.symbols]
    for number, (variant, seconds) in enumerate(compile_all(variants), 1):
        print(f"compiled {number}/{len(variants)}: {variant.symbol()} ({seconds:.1f} s)", flush=True)
    wrong = 0
    for number, variant in enumerate(variants, 1):
        print(f"[{number}/{len(variants)}] {variant.symbol()}", flush=True)
        started = time.perf_counter()
        verdict = check.check(variant, _options(given))
        wrong += bool(verdict.error)
        state = f"WRONG: {verdict.error}" if verdict.error else f"ok: {verdict.measured}"
        reports = [call.report for call in verdict.calls]
        print(f"    {state}; {_spent(reports, time.perf_counter() - started)}", flush=True)
    return 1 if wrong else 0


def _run_record(given: argparse.Namespace) -> int:
    import numpy as np

    from .run import machine, record

    started = time.perf_counter()
    module = machine.parse(given.ptx.read_text("utf-8"))
    report, results = record.Record(given.record).run(module, _options(given))
    print(f"ran {given.record} on {given.ptx}: {_spent([report], time.perf_counter() - started)}")
    for name, content in results.items():
        poison = int((content == 0xFF).sum())
        print(f"    {name}: {content.size} bytes, {poison} of them 0xff")
    if given.save:
        stored: dict[str, Any] = dict(results)
        np.savez_compressed(given.save, **stored)
    return 0


def _time(given: argparse.Namespace) -> int:
    from .time import text
    from .time.machines import MACHINES, OF_ARCH
    from .time.peers import peers
    from .time.problem import Shape, arch_of, traced

    if given.peers:
        print(*peers(), sep="\n")
        return 0
    if not given.symbols or not given.shape:
        raise ValueError("time takes symbols of kernels and --shape, or --peers")
    for symbol in given.symbols:
        name = given.machine or OF_ARCH.get(arch := arch_of(symbol), f"of {arch}")
        if name not in MACHINES:
            raise ValueError(f"no machine {name!r}; there are {', '.join(MACHINES)}")
        machine = MACHINES[name]
        if given.clock:
            clock = dataclasses.replace(machine.clock, value=given.clock, source="as asked for")
            machine = dataclasses.replace(machine, clock=clock)
        for shape in given.shape:
            found = traced(symbol, Shape.parse(shape), machine, machine_code=given.machine_code)
            print(text.report(symbol, shape, found, machine, not given.no_band), flush=True)
    return 0


def _reach(given: argparse.Namespace) -> int:
    from .prove import check, reach

    reasons, left = reach.reasons(), 0
    for variant in [check.find(symbol) for symbol in given.symbols]:
        lines, without = reach.told(variant, reasons, given.machine_code)
        print(*lines, sep="\n", flush=True)
        left += without
    return 1 if left else 0


def _mutate(given: argparse.Namespace) -> int:
    from .prove.mutation import table as mutation_table

    others = [(name, Path(ptx), Path(record)) for name, ptx, record in given.kernel]
    if given.keep:
        return _mutate_kept(given)
    if given.prepare or given.seconds is not None:
        raise ValueError("--prepare and --seconds go with --keep")
    if not given.symbols and not others:
        raise ValueError("mutate takes symbols of tsmla kernels, --kernel, or both")
    reasons = mutation_table.Reasons.read(given.reasons) if given.reasons else mutation_table.Reasons()
    reasons = reasons.only(given.only)
    if given.list:
        labels, problems = mutation_table.listed(given.symbols, reasons, given.only)
        for name, of_one in labels.items():
            print(name, *of_one, sep="\n    ")
    else:
        try:
            results = mutation_table.results(given.symbols, others, given.processes, given.only, reasons)
        except mutation_table.NotClean as error:
            return _told([f"tsmla-emulator: {error}"])
        names = [word for name, ptx, record in others for word in ("--kernel", repr(name), ptx.name, record.name)]
        only = ["--only", repr(given.only)] if given.only else []
        command = ["tsmla-emulator", "mutate", *given.symbols, *names, *only, *_reasons(given)]
        page, problems = mutation_table.render(results, reasons, command)
        _publish(page, given.table)
    return _told(problems)


def _mutate_kept(given: argparse.Namespace) -> int:
    from .prove.mutation import table as mutation_table
    from .prove.mutation.directory import Hunt

    if given.kernel or given.only or given.list:
        raise ValueError("--keep does not go with --kernel, --only or --list")
    reasons = mutation_table.Reasons.read(given.reasons) if given.reasons else mutation_table.Reasons()
    hunt = Hunt.prepare(given.keep, given.symbols) if given.symbols else Hunt(given.keep)
    if given.prepare:
        return 0
    try:
        done = hunt.go_on(given.processes, given.seconds, reasons)
    except RuntimeError as error:
        return _told([f"tsmla-emulator: {error}"])
    if not done:
        return _told([f"not done, to go on with --keep {given.keep}: {name}" for name in hunt.left()])
    command = ["tsmla-emulator", "mutate", *hunt.symbols, *_reasons(given)]
    page, problems = mutation_table.render(hunt.findings(), reasons, command, hunt.made)
    _publish(page, given.table)
    return _told(problems)


def _reasons(given: argparse.Namespace) -> list[str]:
    """Return what names the file of reasons, if there is one."""
    return [f"--reasons {shlex.quote(str(given.reasons))}"] if given.reasons else []


def _publish(page: str, table: Path | None) -> None:
    if table:
        table.write_text(page, "utf-8")
    else:
        print(page, end="")


def _told(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _spent(reports: list[Report], seconds: float) -> str:
    return f"{sum(report.warp_instructions for report in reports)} warp instructions, {seconds:.1f} s in all"


if __name__ == "__main__":
    sys.exit(main())
