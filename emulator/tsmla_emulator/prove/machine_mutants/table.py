"""What became of mutants of machine code, kept in files and written as emulator/docs/machine-mutants.md."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..page import command_block, made, table_row
from .sites import KINDS
from .subject import REDUNDANT, SURVIVES, UNREACHED

_SHOWN = ("hazard", "values", "memory", "poison", "race", "deadlock", "barrier", "registers")
"""Verdicts with a column of their own; others are few."""
_BEFORE = """\
# Mutants of machine code

A mutant is a kernel's machine code with one instruction changed: one of its scoreboards is no longer awaited (*wait*),
the next instruction may follow after one clock (*stall*), it no longer waits for a barrier or for what is asynchronous
(*barrier*), a guard or predicate is negated (*predicate*), an operand is the next register (*register*), or one bit of
a matrix's or product's description differs (*descriptor*): `emulator/tsmla_emulator/prove/machine_mutants/sites.py`.

Waits and stall counts are judged by checks of the code itself (`prove.hazards`), whatever a call reaches. All others
run in the calls of `check` that reach them, under the schedules of the [mutation table](mutation-table.md), and are
noticed by other bytes in memory, by accesses outside of it (*memory*), by memory read that nobody wrote (*poison*), by
a *race*, a *deadlock* or a misused *barrier*, or afterwards by what *registers* hold: a read of what nobody wrote,
another description of global memory than the driver's. A mutant is redundant by one of three rules, each of which a
program has checked for it:

RULES

All others are open. What is said of packs, caches, quantised queries and key masks of sm_100a holds for sm_103a, where
their machine code is the same, byte for byte. "Reached by no call" are mutants of instructions that no warp comes by:
of these, only waits and stall counts are tried.

What the figures do not say: *awaited* and *time* are the other side of the check that finds hazards, so that each wait
and each stall count is in one of the two. That a check is right about waits rests on the code that ptxas writes, in
which it finds nothing; latencies are the shortest that ptxas leaves, not measured ones.

What is open, and why:

- Upper words of 64-bit products and sums (`UIMAD`, `IMAD`, `LEA.HI.X`, `SHF.R.S32.HI`, `SEL`). No call has tensors of
  more than 4 GiB, so these words are 0, and any register that holds 0 does as well.
- Division. Where a guard behind `FCHK` is negated, the slow way gives the same quotient; and the last correction of a
  quotient changes the result for few numbers only, none of which a call has.
- Guards that only spare work: a later test stops what an earlier one lets through (`write_cache`, a slot behind the
  last), or all lanes store what one of them would.
- Waits that never have to wait in a call: for a ring's place that has been free from the start.
- Others of prefills and decodes, of which samples are small, have not been looked into.

`python -m tsmla_emulator.prove.machine_mutants` writes this page; do not edit."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """What became of a variant's mutants.

    count: how many of each kind were drawn, 0 for all. mutants: how many there are of each kind. verdicts: how often,
    among those of a kind, each verdict of `subject.Result` was given. survivors: in words.
    """

    symbol: str
    count: int
    seed: int
    mutants: dict[str, int]
    verdicts: dict[str, dict[str, int]]
    survivors: list[str]

    def save(self, directory: Path) -> None:
        """Keep this in a file of its own."""
        (directory / f"{self.symbol}.json").write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    def lines(self) -> Iterator[str]:
        """Yield in words what came of the mutants."""
        for kind, verdicts in self.verdicts.items():
            tried, noticed, redundant = _counted(verdicts)
            found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()) if count)
            yield f"{self.symbol}: {kind}: {noticed} noticed, {redundant} redundant of {tried} tried: {found}"
        yield from (f"    {survivor}" for survivor in self.survivors)


def kept(directory: Path) -> list[Findings]:
    """Return what is kept in a directory."""
    return [Findings(**json.loads(path.read_text("utf-8"))) for path in sorted(directory.glob("*.json"))]


def _counted(verdicts: dict[str, int]) -> tuple[int, int, int]:
    """Return how many mutants were tried, how many of these were noticed, and how many are redundant."""
    tried = sum(count for verdict, count in verdicts.items() if verdict != UNREACHED)
    redundant = sum(verdicts.get(rule, 0) for rule in REDUNDANT)
    return tried, tried - redundant - verdicts.get(SURVIVES, 0), redundant


def render(findings: Sequence[Findings]) -> str:
    """Return the page."""
    rules = "\n".join(
        textwrap.fill(f"- *{name}*: {what}.", 120, subsequent_indent="  ") for name, what in REDUNDANT.items()
    )
    counts = sorted({(one.count, one.seed) for one in findings})
    program = "python -m tsmla_emulator.prove.machine_mutants --keep DIRECTORY"
    commands = [
        [
            program,
            *((f"--count {count} --seed {seed}",) if count else ()),
            *(one.symbol for one in findings if (one.count, one.seed) == (count, seed)),
        ]
        for count, seed in counts
    ]
    return (
        "\n".join(
            [
                *_BEFORE.replace("RULES", rules).split("\n"),
                "",
                made(),
                "",
                *command_block(*commands, [program, "--table FILE"]),
                "",
                "## Kernels",
                "",
                "Each cell: noticed + redundant, of how many tried.",
                "",
                table_row("kernel", "sample", *KINDS, "open", "reached by no call", "noticed or redundant"),
                table_row(*"-" * (len(KINDS) + 5)),
                *(_of_kernel(one) for one in findings),
                "",
                "## Kinds",
                "",
                table_row("kind", "tried", *_SHOWN, "other", *REDUNDANT, "open", "noticed or redundant"),
                table_row(*"-" * (len(_SHOWN) + len(REDUNDANT) + 5)),
                *(_of_kind(kind, findings) for kind in KINDS),
                "",
                "## Open",
                "",
                *(line for one in findings for line in _open(one)),
            ]
        ).rstrip()
        + "\n"
    )


def _of_kernel(one: Findings) -> str:
    cells = []
    total = collections.Counter[str]()
    for kind in KINDS:
        verdicts = one.verdicts.get(kind, {})
        tried, noticed, redundant = _counted(verdicts)
        total.update(tried=tried, fine=noticed + redundant, unreached=verdicts.get(UNREACHED, 0))
        cells.append(f"{noticed} + {redundant} of {tried}" if tried else "-")
    share = _share(total["fine"], total["tried"])
    sample = f"{one.count} a kind" if one.count else "all"
    return table_row(one.symbol, sample, *cells, str(total["tried"] - total["fine"]), str(total["unreached"]), share)


def _of_kind(kind: str, findings: Sequence[Findings]) -> str:
    verdicts = collections.Counter[str]()
    for one in findings:
        verdicts.update(one.verdicts.get(kind, {}))
    tried, noticed, redundant = _counted(verdicts)
    shown = [verdicts[name] for name in _SHOWN]
    rules = [verdicts[rule] for rule in REDUNDANT]
    numbers = (tried, *shown, noticed - sum(shown), *rules, verdicts[SURVIVES])
    return table_row(kind, *map(str, numbers), _share(noticed + redundant, tried))


def _open(one: Findings) -> Iterator[str]:
    if one.survivors:
        wrapped = [textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False) for line in one.survivors]
        yield from (f"{one.symbol}:", "", "```", *("\n".join(lines) for lines in wrapped), "```", "")


def _share(part: int, whole: int) -> str:
    """Return a percentage, rounded down so that 100 means all."""
    return f"{1000 * part // whole / 10:.1f} %" if whole else "-"
