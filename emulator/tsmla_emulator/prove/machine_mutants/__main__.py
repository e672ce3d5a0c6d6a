"""Tries mutants of machine code, and writes what came of them to emulator/docs/machine-mutants.md.

    python -m tsmla_emulator.prove.machine_mutants SYMBOL... [--count N] [--seed S] [--keep DIRECTORY] [--table FILE]

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
from pathlib import Path

from .. import check
from .subject import SURVIVES, UNREACHED, Subject
from .table import Findings, kept, render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symbols", nargs="*")
    parser.add_argument("--count", type=int, default=0, help="mutants of each kind, drawn at random; 0 (default): all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a directory for what was found, which other runs add to")
    parser.add_argument("--table", type=Path, help="write what is in that directory as Markdown")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for symbol in given.symbols:
            findings = tried(Subject(check.find(symbol)), given.count, given.seed)
            findings.save(directory)
            print(*findings.lines(), sep="\n", flush=True)
        if given.table:
            given.table.write_text(render(kept(directory)), "utf-8")
    return 0


def tried(subject: Subject, count: int = 0, seed: int = 0) -> Findings:
    """Judge mutants of each kind of a variant's kernels: all, or so many drawn at random among those that a call
    reaches."""
    of_kind = collections.defaultdict(list)
    for kernel in subject.kernels.values():
        for mutant in kernel.mutants():
            of_kind[mutant.kind].append(mutant)
    source = random.Random(seed)
    findings = Findings(subject.symbol, count, seed, {}, {}, [])
    for kind, every in of_kind.items():
        reached = [mutant for mutant in every if subject.reaches(mutant)]
        some = source.sample(reached, min(count or len(reached), len(reached)))
        results = [subject.judged(mutant) for mutant in some]
        verdicts = collections.Counter(result.verdict for result in results)
        findings.mutants[kind] = len(every)
        findings.verdicts[kind] = {UNREACHED: len(every) - len(reached), **verdicts}
        findings.survivors.extend(str(result.mutant) for result in results if result.verdict == SURVIVES)
    return findings


if __name__ == "__main__":
    sys.exit(main())
