"""Reasons why mutants that no check catches are redundant, as a person found out: emulator/docs/mutation-reasons.json.

    [{"kernels": [name, ..], "mutants": [mutant, ..], "reason": text}, ..]

A mutant is named by its key: "function: what it calls: instruction and what is done to it" (`sites.Site`).
That stands for every copy that the kernel has, or for some: "sm90/decode/row64/attend._score: mma.issue: wgmma.fence
removed (2-4, 6 of 8)". Counts are part of the name: where they no longer fit, the reason is to be looked at again.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from .sites import Site

_COPIES = re.compile(r"(.*) \(([\d, -]+) of (\d+)\)")


@dataclasses.dataclass(frozen=True)
class Mutants:
    """Some copies of a key; all, where `copies` is empty."""

    name: str
    key: str
    copies: frozenset[int] = frozenset()
    total: int = 0

    @classmethod
    def of_name(cls, name: str) -> Mutants:
        """Return the mutants of a name. Raises ValueError for copies that are not there."""
        found = _COPIES.fullmatch(name)
        if found is None:
            return cls(name, name)
        copies: set[int] = set()
        for part in found[2].split(","):
            first, _, last = part.strip().partition("-")
            copies.update(range(int(first), int(last or first) + 1))
        total = int(found[3])
        if not copies or not copies <= set(range(1, total + 1)):
            raise ValueError(f"{name!r} names copies that are not among 1 to {total}")
        return cls(name, found[1], frozenset(copies), total)

    def __contains__(self, site: Site) -> bool:
        return site.key == self.key and (not self.copies or (site.copy in self.copies and site.copies == self.total))


@dataclasses.dataclass(frozen=True)
class Reasons:
    """The reasons for each kernel's mutants."""

    of_kernels: Mapping[str, tuple[tuple[Mutants, str], ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Reasons:
        """Read a file of reasons. Raises ValueError where it is not as the module says."""
        found: dict[str, tuple[tuple[Mutants, str], ...]] = {}
        for entry in json.loads(path.read_text("utf-8")):
            named = tuple((Mutants.of_name(name), entry["reason"]) for name in entry["mutants"])
            for kernel in entry["kernels"]:
                found[kernel] = (*found.get(kernel, ()), *named)
        return cls(found)

    def only(self, text: str) -> Reasons:
        """Return the reasons for mutants with this in their keys."""
        kept = {
            kernel: tuple((mutants, reason) for mutants, reason in of_one if text in mutants.key)
            for kernel, of_one in self.of_kernels.items()
        }
        return Reasons(kept)

    def of(self, kernel: str, site: Site) -> str | None:
        """Return the reason for a mutant; None when nobody has given one."""
        return next((reason for mutants, reason in self.of_kernels.get(kernel, ()) if site in mutants), None)

    def wrong(self, kernel: str, sites: Collection[Site], caught: Collection[Site] = ()) -> Iterator[str]:
        """Yield what is wrong with a kernel's reasons, given all mutants and those that checks catch: a sentence
        each."""
        for mutants, _ in self.of_kernels.get(kernel, ()):
            meant = [site for site in sites if site in mutants]
            if not meant:
                yield f"{mutants.name}: no such mutant; {_nearest(mutants, sites)}"
            yield from (f"{site.label}: a check catches it" for site in meant if site in caught)


def _nearest(mutants: Mutants, sites: Collection[Site]) -> str:
    same = [site for site in sites if site.key == mutants.key]
    if same:
        return f"there are {len(same)} of that key"
    close = difflib.get_close_matches(mutants.key, {site.key for site in sites}, 3, 0.5)
    return "close to it: " + (" | ".join(close) or "none")
