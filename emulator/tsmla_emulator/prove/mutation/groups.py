"""Tries mutants together that the first schedules do not catch: if no check catches a kernel with all of them changed,
one run has settled them all.

One change may hide another. Therefore only one change of an instruction is made at a time, and what is said to survive
without a run of its own needs its reason like everything else (emulator/docs/mutation-reasons.json).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from .mutate import Result, Schedule, Subject
from .sites import MASKS, Site

FIRST = 4
"""How many of the first schedules catch nearly all mutants that any schedule catches."""


@dataclasses.dataclass(frozen=True)
class _Away:
    """A change that the schedule catches beside others, and not without them."""

    site: Site
    schedule: Schedule
    others: tuple[Site, ...]


def settle(subject: Subject, sites: Sequence[Site]) -> Iterator[Result]:
    """Yield what becomes of each mutant under all schedules, in any order. Mutants of masks have only one schedule."""
    yield from (Result(site, True) for site in sites if site.family == MASKS)
    left = [site for site in sites if site.family != MASKS]
    while left:
        of_position = {(site.entry, site.position): site for site in reversed(left)}
        group = [site for site in left if of_position[site.entry, site.position] is site]
        kept, away = _sorted_out(subject, group, subject.schedules)
        yield from (Result(site, True) for site in kept)
        alone = [subject.try_out(one.site, [one.schedule]) for one in away]
        yield from (result for result in alone if result.kind)
        settled = {*kept, *(result.site for result in alone if result.kind)}
        left = [site for site in left if site not in settled]
        left.sort(key=set(group).__contains__)


def find_covers(subject: Subject, survivors: Sequence[Result]) -> list[Result]:
    """Change as many survivors at once as no check catches, and return all, with the covers of the others.

    The others are caught beside earlier ones, which covered them: a single one, if one alone is enough.
    """
    covers: dict[Site, str] = {}
    for of_masks in (False, True):
        sites = [result.site for result in survivors if (result.site.family == MASKS) == of_masks]
        _, away = _sorted_out(subject, sites, subject.schedules[:1] if of_masks else subject.schedules)
        covers.update({one.site: _cover(subject, one) for one in away if one.others})
    return [dataclasses.replace(result, cover=covers.get(result.site, "")) for result in survivors]


def _sorted_out(
    subject: Subject, sites: Sequence[Site], schedules: Sequence[Schedule]
) -> tuple[list[Site], list[_Away]]:
    """Divide changes into those that pass all of the schedules together, and the others."""
    kept, away = list(sites), []
    for number, schedule in enumerate(schedules):
        passes = 0  # so many of the first ones do

        def fails(count: int, number: int = number, schedule: Schedule = schedule) -> bool:
            if count == len(kept) and number >= FIRST:
                subject.announce(kept, schedules[number:])
            return bool(subject.caught(kept[:count], [schedule])[0])

        while kept and fails(len(kept)):
            passes = bisect.bisect_left(range(len(kept)), True, passes + 1, key=fails) - 1
            away.append(_Away(kept.pop(passes), schedule, tuple(kept[:passes])))
    return kept, away


def _cover(subject: Subject, away: _Away) -> str:
    """Return labels of the changes beside which one is caught: the first few of them that are enough, or the last of
    these if it is enough alone."""
    others = away.others

    def is_enough(count: int) -> bool:
        return bool(subject.caught([*others[:count], away.site], [away.schedule])[0])

    enough = bisect.bisect_left(range(len(others)), True, 1, key=is_enough)
    last = others[enough - 1]
    single = enough > 1 and subject.caught([last, away.site], [away.schedule])[0]
    return ", ".join(other.label for other in ([last] if single else others[:enough]))
