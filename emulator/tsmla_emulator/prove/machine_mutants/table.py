"""What became of mutants of machine code, kept in files and written as emulator/docs/machine-mutants.md."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..page import command_block, made, table_row, wrapped
from .sites import KINDS
from .subject import EXPLAINED, REDUNDANT, SURVIVES, UNREACHED

_SHOWN = ("hazard", "values", "memory", "poison", "race", "deadlock", "barrier", "registers")
"""Verdicts with a column of their own; others are few."""
_BEFORE = """\
# Mutants of machine code

A mutant is a kernel's machine code with one instruction changed: one of its scoreboards is no longer awaited (*wait*),
the next instruction may follow after one clock (*stall*), it no longer waits for a barrier or for what is asynchronous
(*barrier*), a guard or predicate is negated (*predicate*), an operand is the next register (*register*), or one bit of
a matrix's or product's description differs (*descriptor*): `emulator/tsmla_emulator/prove/machine_mutants/sites.py`.

Waits and stall counts are judged by checks of the code itself (`dataflow.hazards`), whatever a call reaches. All others
run in the calls of `check` that reach them, under the schedules of the [mutation table](mutation-table.md), and are
noticed by other bytes in memory, by accesses outside of it (*memory*), by memory read that nobody wrote (*poison*), by
a *race*, a *deadlock* or a misused *barrier*, or afterwards by what *registers* hold: a read of what nobody wrote,
another description of global memory than the driver's. A mutant is redundant by one of three rules, each of which a
program has checked for it:

RULES

For others, [machine-mutant-reasons.json](machine-mutant-reasons.json) says why nothing goes wrong (*reason*). An
instruction of a wait has the reason, too, that [mutation-reasons.json](mutation-reasons.json) gives for the whole wait
of the PTX, which library and PTX tell (`waits.py`). The rest is open.

What is said of packs, caches and key masks of sm_100a holds for sm_103a, where their machine code is the same, byte for
byte. "Reached by no call" are mutants of instructions that no lane executes: of these, only waits and stall counts are
tried, and guards that hold in no lane.

Calls are those of `check`; of kernels that are not attention, rows lie more than 2**32 elements apart in some of them,
and in others, numbers are random bits. Each call of attention is made twice more, with other lengths, cumulative
lengths that go down and other numbers, a prefill once with many query tiles, and a decode where ranks divide the keys,
also with other lengths; these show mutants, but are not asked which instructions they reach.

What the figures do not say: *awaited* and *time* are the other side of the check that finds hazards, so that each wait
and each stall count is in one of the two. That a check is right about waits rests on the code that ptxas writes, in
which it finds nothing; latencies are the shortest that ptxas leaves, not measured ones.

What is open, and why:

- Corrections of quotients of whole numbers, which are for counts of CTAs and tiles that no call has, and what makes a
  reciprocal worse than it needs to be in its last bits.
- Signs of numbers that come from memory, and sizes of tensors, which are 0 in the calls that come there.
- Registers and predicates that hold the right value by chance in all calls, such as a parity, or an address that an
  instruction before left there.
- Waits that always find what they wait for, whoever is late: others have waited before.

`python -m tsmla_emulator.prove.machine_mutants` writes this page; do not edit."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """What became of a variant's mutants.

    count: how many of each kind were drawn, 0 for all. mutants: how many there are of each kind. verdicts: how often,
    among those of a kind, each verdict of `subject.Result` was given. survivors: in words. reasons: of those that are
    explained.
    """

    symbol: str
    count: int
    seed: int
    mutants: dict[str, int]
    verdicts: dict[str, dict[str, int]]
    survivors: list[str]
    reasons: list[str]

    def explained(self, reasons: Reasons) -> dict[str, int]:
        """Return how many survivors of each kind have a reason."""
        named = [one.partition(" ")[0] for one in self.survivors if reasons.of(self.symbol, one)]
        of_ptx = {kind: verdicts.get(EXPLAINED, 0) for kind, verdicts in self.verdicts.items()}
        return collections.Counter(named) + collections.Counter(of_ptx)

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
    return tried, tried - redundant - verdicts.get(SURVIVES, 0) - verdicts.get(EXPLAINED, 0), redundant


@dataclasses.dataclass(frozen=True)
class Reasons:
    """Why mutants that no check notices are redundant, as a person found out (docs/machine-mutant-reasons.json).

        [{"kernels": [symbol, ..], "mutants": [pattern, ..], "reason": text}, ..]

    A pattern is a regular expression for all of a mutant's words. A symbol that ends with "*" stands for all that begin
    so.
    """

    entries: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Reasons:
        entries = json.loads(path.read_text("utf-8"))
        return cls(tuple((x["reason"], tuple(x["kernels"]), tuple(x["mutants"])) for x in entries))

    def of(self, symbol: str, mutant: str) -> str | None:
        """Return the reason for a mutant; None when nobody has given one."""
        for reason, symbols, patterns in self.entries:
            if any(fnmatch.fnmatchcase(symbol, one) for one in symbols):
                if any(re.fullmatch(pattern, mutant) for pattern in patterns):
                    return reason
        return None

    def unused(self, findings: Sequence[Findings]) -> list[str]:
        """Return the patterns that no survivor fits."""
        left = []
        for _, symbols, patterns in self.entries:
            fitting = [x for x in findings if any(fnmatch.fnmatchcase(x.symbol, one) for one in symbols)]
            survivors = [mutant for x in fitting for mutant in x.survivors]
            left += [one for one in patterns if not any(re.fullmatch(one, mutant) for mutant in survivors)]
        return left


def render(findings: Sequence[Findings], reasons: Reasons = Reasons(), file: Path | None = None) -> str:  # noqa: B008
    """Return the page.

    file: where the reasons were read, if any were, for the command that makes the page.
    """
    rules = "\n".join(wrapped(f"- *{name}*: {what}.") for name, what in REDUNDANT.items())
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
                *command_block(*commands, [program, "--table FILE", *([f"--reasons {file}"] if file else ())]),
                "",
                "## Kernels",
                "",
                "Each cell: noticed + redundant, of how many tried.",
                "",
                table_row("kernel", "sample", *KINDS, "reason", "open", "reached by no call", "noticed or redundant"),
                table_row(*"-" * (len(KINDS) + 6)),
                *(_of_kernel(one, reasons) for one in findings),
                "",
                "## Kinds",
                "",
                table_row("kind", "tried", *_SHOWN, "other", *REDUNDANT, "reason", "open", "noticed or redundant"),
                table_row(*"-" * (len(_SHOWN) + len(REDUNDANT) + 6)),
                *(_of_kind(kind, findings, reasons) for kind in KINDS),
                "",
                "## Reasons",
                "",
                *_with_reason(findings, reasons),
                "",
                "## Open",
                "",
                *(line for one in findings for line in _open(one, reasons)),
            ]
        ).rstrip()
        + "\n"
    )


def _with_reason(findings: Sequence[Findings], reasons: Reasons) -> Iterator[str]:
    counts = collections.Counter(reasons.of(one.symbol, mutant) for one in findings for mutant in one.survivors)
    counts.update(reason for one in findings for reason in one.reasons)
    for reason, count in counts.items():
        if reason is not None:
            yield wrapped(f"- {count}: {reason}")


def _of_kernel(one: Findings, reasons: Reasons) -> str:
    cells = []
    total = collections.Counter[str]()
    for kind in KINDS:
        verdicts = one.verdicts.get(kind, {})
        tried, noticed, redundant = _counted(verdicts)
        explained = one.explained(reasons).get(kind, 0)
        total.update(tried=tried, fine=noticed + redundant + explained, unreached=verdicts.get(UNREACHED, 0))
        total.update(explained=explained)
        cells.append(f"{noticed} + {redundant} of {tried}" if tried else "-")
    share = _share(total["fine"], total["tried"])
    sample = f"{one.count} a kind" if one.count else "all"
    left = total["tried"] - total["fine"]
    return table_row(one.symbol, sample, *cells, *map(str, (total["explained"], left, total["unreached"])), share)


def _of_kind(kind: str, findings: Sequence[Findings], reasons: Reasons) -> str:
    verdicts = collections.Counter[str]()
    for one in findings:
        verdicts.update(one.verdicts.get(kind, {}))
    tried, noticed, redundant = _counted(verdicts)
    shown = [verdicts[name] for name in _SHOWN]
    rules = [verdicts[rule] for rule in REDUNDANT]
    explained = sum(one.explained(reasons).get(kind, 0) for one in findings)
    left = tried - noticed - sum(rules) - explained
    numbers = (tried, *shown, noticed - sum(shown), *rules, explained, left)
    return table_row(kind, *map(str, numbers), _share(noticed + redundant + explained, tried))


def _open(one: Findings, reasons: Reasons) -> Iterator[str]:
    if left := [mutant for mutant in one.survivors if reasons.of(one.symbol, mutant) is None]:
        told = [textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False) for line in left]
        yield from (f"{one.symbol}:", "", "```", *("\n".join(lines) for lines in told), "```", "")


def _share(part: int, whole: int) -> str:
    """Return a percentage, rounded down so that 100 means all."""
    return f"{1000 * part // whole / 10:.1f} %" if whole else "-"
