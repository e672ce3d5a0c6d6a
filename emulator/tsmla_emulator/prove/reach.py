"""Tells which instructions of a variant's kernels no call of `check` executes: no mutant of these is ever tried.

Instructions are named as mutants are, by the function of the kernel's sources and what that calls there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from tsmla.identity.variant import Variant

from ..run.emulate import Call
from ..run.machine import Module, Options
from ..run.ptx.calls import place_of
from . import check

REASONS = Path(__file__).parents[2] / "docs" / "reach-reasons.json"
NO_PLACE = "no source"
"""The place of instructions for which PTX does not say what led to them, such as inline assembly."""


@dataclasses.dataclass(frozen=True)
class Unreached:
    """Instructions of one place that no lane executes.

    kernel: the entry; place: function and what it calls.
    lines: of the PTX text. all: whether no lane executes any instruction of this place.
    """

    kernel: str
    place: str
    lines: tuple[int, ...]
    texts: tuple[str, ...]
    all: bool


def reach(variant: Variant) -> tuple[list[Unreached], int]:
    """Return what no call of `check` executes of a variant's kernels, and how many instructions these have.

    Calls are those that mutants are tried with, and their asynchronous work completes as late as it may, so that waits
    are in vain, too; then once more a few of them in which it completes at once. Raises RuntimeError when results are
    wrong.
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
        places: dict[str, tuple[list[int], list[int]]] = {}
        for at, instruction in enumerate(entry.instructions):
            function, callee, _ = place_of(entry, at)
            place = ": ".join(part for part in (function, callee) if part) or NO_PLACE
            places.setdefault(place, ([], []))[(name, at) in reached].append(at)
            count += instruction is not None
        for place, (left, others) in places.items():
            if left:
                lines, texts = zip(
                    *((entry.instructions[at].line, entry.instructions[at].text) for at in left), strict=True
                )
                found.append(Unreached(name, place, lines, texts, not others))
    return found, count


def reasons() -> Mapping[str, str]:
    """Return why no call reaches some places, by place; docs/reach-reasons.json has them."""
    return {place: of["reason"] for of in json.loads(REASONS.read_text("utf-8")) for place in of["places"]}


def told(variant: Variant, explained: Mapping[str, str]) -> tuple[list[str], int]:
    """Return lines that say what no call reaches, those with a reason last, and how many have none."""
    found, count = reach(variant)
    left = [one for one in found if one.place not in explained]
    lines = [
        f"{variant.symbol()}: {sum(len(one.lines) for one in found)} of {count} instructions are reached by no call"
    ]
    for one in [*left, *(one for one in found if one.place in explained)]:
        part = "all" if one.all else "some"
        why = explained.get(one.place, "NO REASON")
        lines.append(f"    {one.place}: {len(one.lines)} ({part}), from PTX line {one.lines[0]}: {why}")
    return lines, len(left)
