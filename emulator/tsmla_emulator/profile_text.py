"""Profiles as text: a kernel's roles and bounds, kernels side by side, and what they cannot tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import cost
from .cost import CLASSES, QUANTITIES, Work
from .profile import Profile, profile_records, profile_symbol
from .rates import RATES

_WIDTH = 32
CANNOT_KNOW = """\
Not known here: what ptxas makes of the PTX (moves vanish, instructions fuse, registers spill), latency and how well it
is hidden, bank conflicts, hits in caches, clock and power. A bound is what the SM needs at least, at peak rates; "~"
marks estimates, for the reason beside them, which do not count for the tightest."""


def report(
    symbols: Sequence[str], against: Sequence[Sequence[str]], tiles: float = 0, heads: int | None = None
) -> Iterator[str]:
    """The command's output, piece by piece, as it becomes known."""
    profiles: list[Profile] = []
    others = (profile_records(Path(ptx), Path(a), Path(b), float(units)) for ptx, a, b, units in against)
    for profile in itertools.chain((profile_symbol(symbol, heads) for symbol in symbols), others):
        profiles.append(profile)
        yield text_of(profile, tiles) + "\n"
    if len(profiles) > 1:
        yield comparison(profiles) + "\n"
    yield CANNOT_KNOW


def text_of(profile: Profile, tiles: float = 0) -> str:
    """Roles of a profile as a table, then its bounds; with `tiles`, also the time that so many units take at least."""
    title = f"{profile.name} ({profile.arch}), per {profile.unit}"
    several = len({role.entry for role in profile.roles}) > 1
    columns = []
    for role in profile.roles:
        registers = f", {role.registers} registers" if role.registers else ""
        columns.append((f"{role.name}{registers}" + (f" of {role.entry}" if several else ""), role.work))
    rates = RATES[profile.arch]
    heading = f"bound on an SM of {rates.gpu}"
    lines = [title, *_table([*columns, ("all", profile.work)]), "", f"{heading:{_WIDTH}}{'clk':>12}"]
    least = cost.tightest(profile.bounds)
    for bound in profile.bounds:
        amount = ("~" if bound.estimate else "") + _number(bound.clocks)
        notes = "; ".join(filter(None, ("<- tightest" if bound is least else "", bound.estimate)))
        lines.append(f"  {bound.resource:{_WIDTH - 2}}{amount:>12}  {notes}".rstrip())
    if tiles:
        clocks = least.clocks * tiles / rates.processors
        where = f"{tiles:,.0f} of them on {rates.processors} SMs at {rates.clock:g} MHz"
        lines.append(f"  {where}: {'about' if least.estimate else 'at least'} {clocks / rates.clock:,.0f} us")
    return "\n".join(lines)


def comparison(profiles: Sequence[Profile]) -> str:
    """Several profiles in one table, bounds included. Units may differ and are named."""
    columns, resources = [], {}
    for profile in profiles:
        clocks = {f"clk, {bound.resource}": bound.clocks for bound in profile.bounds}
        resources.update(clocks)
        least = cost.tightest(profile.bounds).resource
        columns.append((f"{profile.name} per {profile.unit}; {least} bound", Work(profile.work | clocks)))
    return "\n".join(_table(columns, resources))


def _table(columns: Sequence[tuple[str, Work]], extra: Iterable[str] = ()) -> Iterator[str]:
    for number, (name, _) in enumerate(columns, 1):
        yield f"  [{number}] {name}"
    works = [work for _, work in columns]
    yield " " * _WIDTH + "".join(f"{f'[{n}]':>12}" for n in range(1, len(works) + 1))
    yield _row("warp instructions", [sum(work[name] for name in CLASSES) for work in works])
    for name in (*CLASSES, *QUANTITIES):
        amounts = [work[name] for work in works]
        if any(round(amount, 1) for amount in amounts):
            yield _row(f"  {name}" if name in CLASSES else name, amounts)
    for name in extra:
        yield _row(name, [work.get(name) for work in works])


def _row(name: str, amounts: Iterable[float | None]) -> str:
    return f"{name:{_WIDTH}}" + "".join(f"{'-' if amount is None else _number(amount):>12}" for amount in amounts)


def _number(amount: float) -> str:
    return f"{amount:,.1f}".removesuffix(".0")
