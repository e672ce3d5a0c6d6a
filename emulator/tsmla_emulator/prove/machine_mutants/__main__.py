"""Tries mutants of machine code, and writes what came of them to emulator/docs/machine-mutants.md.

    python -m tsmla_emulator.prove.machine_mutants SYMBOL... [--count N] [--seed S] [--keep DIRECTORY] [--table FILE]
        [--compiled DIRECTORY] [--processes N]

What a kernel tells the scheduler (scoreboards, stall counts) is judged by `hazards` and `latencies`, all else by runs
of the calls of `check` under schedules that become ever harsher, with the happens-before check, and where these notice
nothing by what registers hold (`values`, `unwritten`).
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tsmla.identity.variant import Variant

from ...run.host.compile import Compiled, compile_for_emulation
from .. import check
from .sites import Mutant
from .subject import EXPLAINED, SURVIVES, UNREACHED, Subject, judge_all
from .table import Findings, Reasons, kept, render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symbols", nargs="*")
    parser.add_argument("--count", type=int, default=0, help="mutants of each kind, drawn at random; 0 (default): all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a directory for what was found, which other runs add to")
    parser.add_argument("--compiled", type=Path, help="a directory with SYMBOL.so and SYMBOL.ptx: nothing is compiled")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--table", type=Path, help="write what is in that directory as Markdown")
    parser.add_argument("--reasons", type=Path, help="JSON that says why survivors are redundant")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for symbol in given.symbols:
            compiled = _files_in(given.compiled) if given.compiled else compile_for_emulation
            findings = tried(Subject(check.find(symbol), compiled), given.count, given.seed, given.processes)
            findings.save(directory)
            print(*findings.lines(), sep="\n", flush=True)
        if given.table:
            reasons = Reasons.read(given.reasons) if given.reasons else Reasons()
            given.table.write_text(render(kept(directory), reasons, given.reasons), "utf-8")
            print(*(f"a reason is given for {one}: no survivor" for one in reasons.unused(kept(directory))), sep="\n")
    return 0


def tried(subject: Subject, count: int = 0, seed: int = 0, processes: int = 1) -> Findings:
    """Judge mutants of each kind of a variant's kernels: all, or so many drawn at random among those that a call
    reaches."""
    of_kind = collections.defaultdict(list)
    for kernel in subject.kernels.values():
        for mutant in kernel.mutants():
            of_kind[mutant.kind].append(mutant)
    source = random.Random(seed)
    findings = Findings(subject.symbol, count, seed, {}, {}, [], [])
    drawn: dict[str, list[Mutant]] = {}
    for kind, every in of_kind.items():
        reached = [mutant for mutant in every if subject.reaches(mutant)]
        drawn[kind] = source.sample(reached, min(count or len(reached), len(reached)))
        findings.mutants[kind] = len(every)
        findings.verdicts[kind] = {UNREACHED: len(every) - len(reached)}
    results = iter(judge_all(subject, [mutant for some in drawn.values() for mutant in some], processes))
    for kind, some in drawn.items():
        of_one = [next(results) for _ in some]
        findings.verdicts[kind] |= collections.Counter(result.verdict for result in of_one)
        findings.survivors.extend(str(result.mutant) for result in of_one if result.verdict == SURVIVES)
        findings.reasons.extend(result.text for result in of_one if result.verdict == EXPLAINED)
    return findings


def _files_in(directory: Path) -> Callable[[Variant], Compiled]:
    def files(variant: Variant) -> Compiled:
        symbol = variant.symbol()
        return Compiled((directory / f"{symbol}.so").resolve(), (directory / f"{symbol}.ptx").resolve(), symbol)

    return files


if __name__ == "__main__":
    sys.exit(main())
