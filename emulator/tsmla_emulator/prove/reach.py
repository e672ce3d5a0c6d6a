"""Tells which instructions of a variant's kernels no call of `check` executes: no mutant of these is ever tried.

Instructions are named as mutants are, by the function of the kernel's sources and what that calls there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from pathlib import Path

from tsmla.identity.variant import Variant

from ..run.emulate import Call
from ..run.machine import Module, Options
from ..run.ptx.calls import place_of
from . import check

REASONS = Path(__file__).parents[2] / "docs" / "reach-reasons.json"


@dataclasses.dataclass(frozen=True)
class Unreached:
    """Instructions of one place that no lane executes.

    kernel: the entry. place: the function and what it calls; of inline assembly, for which PTX has none, that of the
    instruction before. line: of the first in the PTX text. count: how many they are. whole: whether they are all of the
    place.
    """

    kernel: str
    place: str
    line: int
    count: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why no call reaches some places.

    places: a pattern of their names. whole: whether it also holds where nothing of a place is reached.
    """

    places: str
    reason: str
    whole: bool = False

    def holds(self, one: Unreached) -> bool:
        return (self.whole or not one.whole) and re.fullmatch(self.places, one.place) is not None


def reach(variant: Variant) -> tuple[list[Unreached], int]:
    """Return what no call of `check` executes of a variant's kernels, and how many instructions these have.

    Calls are those that mutants are tried with. Their asynchronous work completes as late as it may, so that waits are
    in vain, too; then, in a few calls, at once. Raises RuntimeError when results are wrong.
    """
    late = check.check(variant, Options(async_mode="late", count=True), all_ways=True, at_bounds=True)
    eager = check.check(variant, Options(count=True))
    for verdict in (late, eager):
        if verdict.error:
            raise RuntimeError(f"{variant.symbol()}: {verdict.error}")
    return unreached(late.calls[0].module, executed([*late.calls, *eager.calls]))


def executed(calls: Collection[Call]) -> frozenset[tuple[str, int]]:
    """Return entry and position of the instructions that some lane executed in these calls."""
    return frozenset((entry, at) for call in calls for entry, _, at in call.report.lanes)


def unreached(module: Module, reached: Collection[tuple[str, int]]) -> tuple[list[Unreached], int]:
    """Return what is not among the instructions that were reached, by place, and how many instructions there are."""
    found, count = [], 0
    for name, entry in module.entries.items():
        places: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        place = "entry"
        for at in range(len(entry.instructions)):
            function, callee, _ = place_of(entry, at)
            place = ": ".join(part for part in (function, callee) if part) or place
            sizes[place] = sizes.get(place, 0) + 1
            if (name, at) not in reached:
                places.setdefault(place, []).append(at)
        count += len(entry.instructions)
        found += [
            Unreached(name, place, entry.instructions[left[0]].line, len(left), len(left) == sizes[place])
            for place, left in places.items()
        ]
    return found, count


def reasons() -> list[Reason]:
    """Return what docs/reach-reasons.json says."""
    return [Reason(**one) for one in json.loads(REASONS.read_text("utf-8"))]


def told(variant: Variant, given: Collection[Reason]) -> tuple[list[str], int]:
    """Return lines that say what no call reaches, without a reason first, and how many places have none."""
    found, count = reach(variant)
    why = {one: next((reason.reason for reason in given if reason.holds(one)), "") for one in found}
    lines = [f"{variant.symbol()}: {sum(one.count for one in found)} of {count} instructions are reached by no call"]
    for one in sorted(found, key=lambda one: bool(why[one])):
        part = "all" if one.whole else "some"
        lines.append(f"    {one.place}: {one.count} ({part}), PTX line {one.line}: {why[one] or 'no reason is given'}")
    return lines, sum(not reason for reason in why.values())
