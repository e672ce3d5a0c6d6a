"""Writes the published proof that the checks see every kind of synchronisation: emulator/docs/mutation-table.md."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, PrefillVariant, Variant

from ...run.record import entries
from ..page import command_block, made, table_row
from .hunt import Pace, hunt
from .mutate import Findings, NotClean, Result, Subject
from .reasons import Reasons

if TYPE_CHECKING:
    from ...run.host.compile import Compiled

NO_REASONS = Reasons()

LENGTHS = (
    (285, 130, 129, 140, 128, 128, 128, 128, 140, 120, 120, 128, 129, 128, 128, 200),
    (865, 420, 1, 0, 257, 255, 265, 247, 2570, 128, 160, 161, 1, 162, 193, 300),
)
"""Query and KV lengths of a prefill's sequences, so that mutants of every kind change something:

- three query tiles and seven KV tiles, which use every stage of each ring twice;
- a first query tile that sees no key beside one that does, and two that see none;
- diagonals that cross every column of a tile in rows of both halves of Hopper's fragments, in the last tile of a row
  and in the one before;
- so many KV tiles that each of the loads of a step meets each of Blackwell's ring slots;
- a query tile, of 128 rows or 192, that sees fewer KV tiles than its sequence's last and is one of several of a CTA;
- two query tiles of Blackwell's, of which the second visits three KV tiles, all of them masked, and the first all but
  one of these;
- three KV tiles of Hopper's 8-bit kernel, and behind them, of the same CTA, a query tile whose first warpgroup sees no
  key: it passes over all tiles while another may not have begun with the three.
"""
DECODE_LENGTHS = (
    0, 0, 0, 0, 0, 0, 0, 0, 0, 70, 70, 70, 4208, 0, 0, 0, 70, 170, 130, 0, 0, 10, 330, 70, 130, 330, 200, 0, 330,
)  # fmt: skip
"""Keys of a decode's requests: work of all kinds, as those of `check`, and

- so many requests a CTA that every place of Hopper's ring of tasks is used three times: both parities of its empty
  barriers are waited for, and the last task of some CTAs has the ring's last place;
- requests of many tiles behind an even and behind an odd number of tiles;
- a part of one a ring before a task with keys, with no more tiles between the two than strips have stages;
- keys that end with a box of 16 within a tile and a page, many tiles behind the first.
"""
FEW_DECODE_LENGTHS = (70, 0)
"""Keys of a decode that catches most mutants in a fraction of the time; some of its CTAs have no work."""
_Call = TypeVar("_Call")
_KINDS = ("values", "poison", "deadlock", "race")
_HEAD = ("mutants", *_KINDS, "other", "redundant", "not known", "caught of the others")
_BEFORE = """\
# Mutation table

A mutant is a kernel with one instruction changed. Those that synchronise are removed or weakened: waits that do not
wait, arrivals and waits relaxed or at the next mbarrier, counts, parities, bytes and barrier numbers off, fences of
other memory, commits elsewhere. Copies, loads and products reach other places, masks compare with the other bound,
roles have 8 registers more or fewer. `emulator/tsmla_emulator/prove/mutation/sites.py` has the list.

Counted are mutants that a lane of the unchanged kernel executes. One is caught when a check fails under some schedule
(asynchronous work early, late or at random, each role starved, warps far ahead of each other). The column says which
check failed first: *values* (results are other bytes), *poison* (memory is read that nobody wrote), *deadlock*, *race*
(seen by happens-before alone), or *other* (barriers misused, tensor memory, endless loops). A survivor is *redundant*
where [mutation-reasons.json](mutation-reasons.json) says why nothing goes wrong without it, or where it is caught as
soon as another survivor is changed beside it. All others are *not known*: the instruction may be needed.

`tsmla-emulator mutate` writes this page and prints where each mutant is that is not known: do not edit.""".split("\n")
_LENIENT = (
    "PTX orders tcgen05 operations of different threads by `tcgen05.fence` on both sides of a barrier, and ends a",
    "`tcgen05.ld` at `tcgen05.wait::ld` only (PTX ISA 9.7.16.6.3 and 9.7.16.6.4.5). These kernels lack some of either,",
    "and are judged as if every barrier were a fence and a load were over where its values are used. Lanes of a warp",
    "are threads, which `bar.warp.sync` orders; kernels with such a finding are judged as if lanes went in step.",
)


def results(
    symbols: Sequence[str],
    others: Sequence[tuple[str, Path, Path]],
    processes: int = 1,
    only: str = "",
    reasons: Reasons = NO_REASONS,
) -> dict[str, Findings]:
    """Try out every mutant of tsmla's kernels, and of others given as name, PTX and record.

    only: mutants with this in their keys. Raises NotClean and ValueError.
    """
    found = {}

    def try_out(name: str, *calls: Any) -> None:
        subject = Subject.of_files(name, *calls)
        subject.sites = [site for site in subject.sites if only in site.key]
        found[name] = hunt(subject, Pace.of(processes), survives=lambda site: reasons.of(name, site) is not None)

    with tempfile.TemporaryDirectory() as scratch:
        for symbol in symbols:
            for name, calls in recorded(symbol, Path(scratch)).items():
                try_out(name, *calls)
    for name, ptx, record in others:
        try_out(name, ptx, [record])
    if only and not any(of_one.results for of_one in found.values()):
        raise ValueError(f"no mutant has {only!r} in its name; --list prints their names")
    return found


def listed(symbols: Sequence[str], reasons: Reasons, only: str = "") -> tuple[dict[str, list[str]], list[str]]:
    """Return every kernel's mutants by label, without trying them out, and a sentence about each reason that names
    none.

    only: mutants with this in their keys. Raises NotClean and ValueError.
    """
    labels, problems = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for symbol in symbols:
            for name, calls in recorded(symbol, Path(scratch)).items():
                subject = Subject.of_files(name, *calls)
                labels[name] = [site.label for site in subject.sites if only in site.key]
                problems += [f"{name}: a reason is given for {what}" for what in reasons.wrong(name, subject.sites)]
    if only and not any(labels.values()):
        raise ValueError(f"no mutant has {only!r} in its name; --list prints their names")
    return labels, problems


def recorded(
    symbol: str, directory: Path, compiled: Callable[[Variant], Compiled] | None = None
) -> dict[str, tuple[Path, list[Path], list[Path]]]:
    """Record calls of each kernel of a tsmla variant, and return by its name PTX, records, and records for mutants of
    masks.

    Results are compared with torch. First comes a small problem, then some that are large enough for every ring to
    wrap. A prefill that can is called in pieces that merge, too, and decodes with packs. Calls of few rows that reach
    only kernels for more rows are left out: these have calls of their own. Calls that are there from before are taken
    as they are.

    Raises ValueError for a symbol that cannot be built, NotClean when the results are wrong.
    """
    from .. import check

    variant = check.find(symbol)
    few, many = (directory / symbol / made for made in ("few", "many"))
    done = directory / symbol / "done"
    if not done.exists():
        for made in (few, many):
            made.mkdir(parents=True, exist_ok=True)
        same: dict[str, Any] = {"compiled": compiled, "all_ways": True}
        verdicts = (
            check.check(variant, decode_lengths=FEW_DECODE_LENGTHS, record_to=few, **same),
            check.check(
                variant, lengths=LENGTHS, decode_lengths=DECODE_LENGTHS, record_to=many, at_bounds=True, **same
            ),
        )
        for verdict in verdicts:
            if verdict.error:
                raise NotClean(f"{symbol}: {verdict.error}")
        done.touch()
    small, records = (sorted(made.glob("*.npz")) for made in (few, many))
    ptx = records[0].with_suffix(".ptx")
    names, of_order = kernels(variant), 6 if isinstance(variant, DecodeVariant) else 2
    parts = len(_rows(variant)) or len(names)
    found: dict[str, tuple[Path, list[Path], list[Path]]] = {}
    of_others: frozenset[str] = frozenset()
    for number, name in reversed([*enumerate(names)]):
        of_name = range(number * parts // len(names), (number + 1) * parts // len(names))
        first, own = ([part_of(some, part, parts) for part in of_name] for some in (small, records))
        in_order = [*sum(first, []), *sum((paths[:of_order] for paths in own), [])]
        calls, of_masks = (
            [path for path in paths if not entries(path) <= of_others]
            for paths in (in_order, sum((paths[of_order:] for paths in own), []))
        )
        of_others = of_others.union(*map(entries, calls))
        found[name] = ptx, calls, of_masks
    return {name: found[name] for name in names}


def kernels(variant: Variant) -> list[str]:
    """Return the names of a variant's kernels in the table.

    A decode has one for each count of rows of its small calls. Hopper's decode of rows with one scale has one in
    all: forms of one kernel take few rows and more.
    """
    from ..calls.prefill import prefill_kernels

    symbol = variant.symbol()
    if isinstance(variant, DecodeVariant):
        rows = _rows(variant)
        one = variant.arch is Arch.SM90A and variant.row.scales is not None and variant.row.scales.whole_row
        return [symbol] if one or len(rows) == 1 else [f"{symbol}, {count} rows" for count in rows]
    if isinstance(variant, PrefillVariant):
        return [symbol, f"{symbol}, long sequences"][: prefill_kernels(variant)]
    return [symbol]


def _rows(variant: Variant) -> tuple[int, ...]:
    """Return the query rows of a decode's calls; none for other operators."""
    from ..calls.decode import decode_rows

    return decode_rows(variant.arch, variant.row, variant.gathers) if isinstance(variant, DecodeVariant) else ()


def part_of(calls: list[_Call], number: int, count: int) -> list[_Call]:
    """Return one of so many parts of the same length; what is left is the last one's."""
    length = len(calls) // count
    return calls[number * length : (number + 1) * length if number + 1 < count else None]


def render(
    findings: dict[str, Findings], reasons: Reasons, command: Sequence[str], when: str = ""
) -> tuple[str, list[str]]:
    """Return the page, and a sentence about each survivor without a reason and each reason that is no survivor's.

    when: as `made` says it; by default now.
    """
    results = {name: of_one.results for name, of_one in findings.items()}
    everything = [(name, result) for name, of_one in results.items() for result in of_one]
    lines = [
        *_BEFORE,
        "",
        when or made(),
        "",
        *command_block(command),
        "",
        "## Kernels",
        "",
        table_row("kernel", *_HEAD),
        table_row(*"-" * (len(_HEAD) + 1)),
        *(
            table_row(name, *_counted([(name, result) for result in of_one], reasons))
            for name, of_one in results.items()
        ),
        table_row("all", *_counted(everything, reasons)),
        "",
        *_roles(everything, reasons),
        *_open(everything, reasons),
    ]
    if lenient := {name: of_one.lenient for name, of_one in findings.items() if of_one.lenient}:
        lines += ["", "## Kernels that rely on more than PTX promises", "", *_LENIENT, ""]
        lines += [table_row("kernel", "first finding in the unchanged kernel"), table_row("-", "-")]
        lines += [table_row(name, found) for name, found in lenient.items()]
    return "\n".join(lines) + "\n", _problems(results, reasons)


def _roles(everything: list[tuple[str, Result]], reasons: Reasons) -> list[str]:
    """Return how many mutants survive in each file of the kernels, which mostly has one role."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for name, result in everything:
        if result.survived:
            known = reasons.of(name, result.site) is not None
            counts[result.site.role][0 if known else 1 if result.cover else 2] += 1
    head = ("role", "a reason is given", "another makes up for it", "not known")
    rows = [table_row(f"`{role}`", *map(str, of_one)) for role, of_one in sorted(counts.items())]
    return ["## Survivors of each role", "", table_row(*head), table_row(*"-" * len(head)), *rows, ""]


def _open(everything: list[tuple[str, Result]], reasons: Reasons) -> list[str]:
    """Return survivors for which nobody has given a reason, most frequent first, and how many kernels each is of."""
    left: dict[str, list[str]] = collections.defaultdict(list)
    for name, result in everything:
        if result.survived and not _is_explained(name, result, reasons):
            left[result.site.key].append(name)
    total = sum(map(len, left.values()))
    head = ("mutant", "copies", "kernels")
    rows = [
        table_row(f"`{key}`", str(len(names)), str(len({*names})))
        for key, names in sorted(left.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return [
        "## Open",
        "",
        f"{total} survivors without a reason:",
        "",
        table_row(*head),
        table_row(*"-" * len(head)),
        *rows,
    ]


def _problems(results: dict[str, list[Result]], reasons: Reasons) -> list[str]:
    problems = []
    for name, of_one in results.items():
        for result in of_one:
            if result.survived and not _is_explained(name, result, reasons):
                site = result.site
                place = f"{site.source}, " if site.source else ""
                what = f"{site.label} ({place}PTX line {site.line} `{site.text}`)"
                problems.append(f"{name}: {what}: no check catches it, and no reason is given")
        caught = {result.site for result in of_one if result.kind}
        wrong = reasons.wrong(name, [result.site for result in of_one], caught)
        problems += [f"{name}: a reason is given for {what}" for what in wrong]
    return problems


def _is_explained(kernel: str, result: Result, reasons: Reasons) -> bool:
    """Whether somebody has said why a survivor is redundant, or a check catches it beside another one."""
    return bool(result.cover) or reasons.of(kernel, result.site) is not None


def _counted(results: list[tuple[str, Result]], reasons: Reasons) -> list[str]:
    """Return the cells below `_HEAD` for some mutants, each with its kernel."""
    executed = [(name, result) for name, result in results if result.executed]
    kinds = collections.Counter(result.kind for _, result in executed)
    caught = len(executed) - kinds.pop("", 0)
    other = caught - sum(kinds[kind] for kind in _KINDS)
    redundant = sum(result.survived and _is_explained(name, result, reasons) for name, result in executed)
    matter = len(executed) - redundant
    counts = (len(executed), *(kinds[kind] for kind in _KINDS), other, redundant, matter - caught)
    return [*map(str, counts), _percent(caught, matter)]


def _percent(part: int, whole: int) -> str:
    """Return a percentage, rounded down so that 100 means all."""
    return f"{1000 * part // whole / 10:.1f} %" if whole else "-"
