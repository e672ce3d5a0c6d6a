"""Finds the wait of the PTX that an instruction of machine code is part of, and what is said of that wait's mutants.

ptxas makes three instructions of a wait: a first try, and a loop out of the way, whose line the library says.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping

from ...run.machine import Module
from ...run.sass.code import predicate_slot
from ...run.sass.model import BYTES, Instruction, Target
from ...run.sass.uses import Uses
from ..dataflow.flow import PREDICATES
from ..mutation.actions import ALWAYS_TRUE
from ..mutation.reasons import Reasons
from ..mutation.sites import Site, sites

_NEAR = 8
"""Instructions from a first try to the jump, and from its target to the loop's first wait, at most."""


class Waits:
    """The waits of one kernel.

    module: its PTX. lines: address -> line of that, as `Kernel.lines` has them.
    """

    def __init__(self, code: list[Instruction], uses: list[Uses], lines: Mapping[int, int], module: Module, entry: str):
        self._code, self._uses, self._lines = code, uses, lines
        self._addresses = sorted(lines)
        self._sites = {site.line: site for site in sites(module, {entry}) if site.action == ALWAYS_TRUE}

    def of(self, at: int) -> Site | None:
        """Return the mutant of the PTX that never waits where an instruction waits for a barrier, or jumps if it has
        waited in vain; None if it is not known which that is."""
        if self._code[at].opcode == "BRA":
            slot = predicate_slot(self._code[at].guard)
            before = range(at - 1, max(at - 1 - _NEAR, -1), -1)
            at = next((place for place in before if slot in self._uses[place].written), at)
        return self._said(at) or next(filter(None, map(self._said, self._loop_behind(at))), None)

    def reason(self, at: int, names: Collection[str], reasons: Reasons) -> str | None:
        """Return why nothing goes wrong without that wait: None unless it is said for all names that the kernel has in
        the mutation table."""
        site = self.of(at)
        found = [reasons.of(name, site) for name in names] if site else []
        return found[0] if found and all(found) else None

    def _said(self, at: int) -> Site | None:
        place = bisect.bisect_right(self._addresses, self._code[at].address)
        waits = self._code[at].modifiers[:1] == ("PHASECHK",)
        return self._sites.get(self._lines[self._addresses[place - 1]]) if place and waits else None

    def _loop_behind(self, at: int) -> range:
        """The positions to which a jump leads that is made where the try was in vain."""
        written = self._uses[at].written & PREDICATES
        for one in self._code[at + 1 : at + 1 + _NEAR]:
            if one.opcode == "BRA" and predicate_slot(one.guard) in written and one.guard.negated:
                first = next(x.address // BYTES for x in one.operands if isinstance(x, Target))
                return range(first, min(first + _NEAR, len(self._code)))
        return range(0)
