"""Finds which machine code a warp ran, from the PTX that it ran.

Barriers, waits and matrix instructions are anchors: ptxas keeps each of them, in order. The anchors that a warp ran are
a sentence, and the control flow of its machine code is an automaton. Of the ways through it, the one is taken whose
instructions between anchors are most like those of the PTX (exponentials, sums, maxima, conversions, shared and global
memory, shuffles, arrivals, copies, products of warps).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from .costs import Cost
from .machine_code import TEST, Coded

ANCHORS = {
    "wait": "wait", "wgmma": "wgmma", "wgmma_wait": "wgmma_wait", "named_sync": "named", "named_arrive": "named",
    "cluster_arrive": "cluster", "cluster_wait": "cluster", "product": "product", "commit": "commit",
    "tensor_load": "tensor_load", "tensor_store": "tensor_store",
}  # fmt: skip
"""Kinds of costs.KINDS_OF_REPLAY that are anchors -> names of machine_code."""
TESTED = "mbarrier.test_wait"
"""An opcode that is a test in the machine code, though it has the cost of a wait."""
KINDS = "special fma maximum convert shared shuffle global arrive load store copy init select warp_product".split()
"""Kinds of instructions by which ways between two anchors are told apart."""
_KIND_OF = {
    "special": 0, "fma": 1, "fma2": 1, "maximum": 2, "convert": 3, "ldmatrix": 4, "stmatrix": 4, "load_shared": 4,
    "store_shared": 4, "shuffle": 5, "load_global": 6, "store_global": 6, "arrive": 7, "load": 8, "store": 9,
    "copy": 10, "init": 11, "select": 12, "warp_product": 13,
}  # fmt: skip
_WEIGHTS = (4, 1, 1, 2, 6, 6, 6, 12, 12, 12, 6, 6, 6, 6)
MOST_STEPS, MOST_STATES = 4000, 8
LOST = 400.0
"""The price of a stretch for which no way is found."""

Mix = tuple[int, ...]
NOTHING: Mix = (0,) * len(KINDS)


@dataclasses.dataclass(frozen=True)
class Stretch:
    """What a warp ran between two anchors.

    It has positions in the machine code, None where no way was found, and the position of the anchor at its end (None:
    the warp ended, or it was not found).
    """

    way: tuple[int, ...] | None
    anchor: int | None


class Matcher:
    """Finds the ways of warps through the machine code of one kernel."""

    def __init__(self, code: Sequence[Coded]):
        self.code = code
        self._anchors = {*ANCHORS.values(), TEST}
        self._runs: dict[int, tuple[tuple[int, ...], Mix, int]] = {}
        self._found: dict[tuple[int, str, Mix], list[tuple[int, float, tuple[int, ...]]]] = {}
        self._slow = [self._polls(position) for position in range(len(code))]

    def stretches(self, anchors: Sequence[str], mixes: Sequence[Mix]) -> list[Stretch]:
        """Return the way of a warp that ran these anchors (names of machine_code).

        mixes: the instructions before each anchor and, last, behind all.
        """
        states: dict[int, float] = {-1: 0.0}
        back: list[dict[int, tuple[int, tuple[int, ...] | None]]] = []
        for anchor, mix in zip([*anchors, "exit"], mixes, strict=True):
            following: dict[int, float] = {}
            origin: dict[int, tuple[int, tuple[int, ...] | None]] = {}
            for state, price in states.items():
                for target, more, way in self._ways(state + 1, anchor, mix):
                    if price + more < following.get(target, float("inf")):
                        following[target], origin[target] = price + more, (state, way)
            if not following:  # goes on wherever there is such an anchor
                least = min(states, key=states.__getitem__)
                for target, coded in enumerate(self.code):
                    if coded.name == anchor:
                        following[target], origin[target] = states[least] + LOST, (least, None)
                if not following:  # it has no counterpart: as if it were not there
                    following, origin = dict(states), {state: (state, None) for state in states}
            kept = sorted(following, key=following.__getitem__)
            if len(kept) > MOST_STATES and following[kept[0]] + LOST / 2 > following[kept[MOST_STATES]]:
                kept = kept if any(origin[k][1] is None for k in kept) else kept[:MOST_STATES]
            else:
                kept = kept[:MOST_STATES]
            states = {state: following[state] for state in kept}
            back.append(origin)
        state = min(states, key=states.__getitem__)
        found = []
        for number in reversed(range(len(back))):
            before, taken = back[number][state]
            stayed = taken is None and before == state
            found.append(Stretch(taken, None if number == len(anchors) or stayed else state))
            state = before
        return found[::-1]

    def _ways(self, start: int, anchor: str, mix: Mix) -> list[tuple[int, float, tuple[int, ...]]]:
        """Return (anchor's position, price, positions before it) of ways from a position to an anchor of this name."""
        key = (start, anchor, mix)
        if key not in self._found:
            self._found[key] = self._search(start, anchor, mix)
        return self._found[key]

    def _search(self, start: int, anchor: str, mix: Mix) -> list[tuple[int, float, tuple[int, ...]]]:
        """Search for ways, going on where least is beyond the mix: a loop around all others has more ways than are
        tried."""
        best: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        heap: list[tuple[float, int, int, Mix, tuple[int, ...]]] = [(0.0, 0, start, NOTHING, ())]
        seen = set()
        pushed = itertools.count(1)

        def go(position: int, so_far: Mix, way: tuple[int, ...]) -> None:
            """First comes what has the least too much of anything; ways are continued latest first among equals."""
            over = sum(w * max(0, a - b) for w, a, b in zip(_WEIGHTS, so_far, mix, strict=True))
            heapq.heappush(heap, (over, -next(pushed), position, so_far, way))

        for _ in range(MOST_STEPS):
            if not heap:
                break
            _, _, position, so_far, way = heapq.heappop(heap)
            if (position, so_far) in seen:
                continue
            seen.add((position, so_far))
            run, own, end = self._run(position)
            so_far = tuple(a + b for a, b in zip(so_far, own, strict=True))
            if (run or (end,))[0] in way and any(have > 1.3 * want + 8 for have, want in zip(so_far, mix, strict=True)):
                continue  # ptxas moves instructions over anchors, but a loop that runs again shows
            way += run
            if end >= len(self.code):
                continue
            coded = self.code[end]
            if coded.name == anchor:
                different = sum(w * abs(a - b) for w, a, b in zip(_WEIGHTS, so_far, mix, strict=True))
                best.setdefault(end, []).append((different + 0.01 * len(way), way))
            if coded.name == "branch":
                assert coded.target is not None
                if coded.guarded:
                    go(end + 1, so_far, (*way, end))
                if 0 <= coded.target < len(self.code) and not self._slow[end]:
                    go(coded.target, so_far, (*way, end))
            elif coded.name == TEST or coded.guarded and (coded.name == "exit" or coded.name in self._anchors):
                # Of tests that a warp made in turns only the last is an anchor.
                go(end + 1, so_far, (*way, end))
        return [(end, *min(ways)) for end, ways in best.items()]

    def _run(self, position: int) -> tuple[tuple[int, ...], Mix, int]:
        """Return the positions from here to the next anchor, branch or exit, what they are, and its position."""
        if position not in self._runs:
            end, mix = position, [0] * len(KINDS)
            while end < len(self.code):
                name = self.code[end].name
                if name in self._anchors or name in ("branch", "exit"):
                    break
                if name in _KIND_OF:
                    mix[_KIND_OF[name]] += 1
                end += 1
            run = tuple(at for at in range(position, end) if self.code[at].name not in ("poll", "sleep"))
            self._runs[position] = (run, tuple(mix), end)
        return self._runs[position]

    def _polls(self, position: int) -> bool:
        """Whether a branch goes where a wait that was in vain sleeps and tries again. Polling is left out."""
        coded = self.code[position]
        if coded.name != "branch" or coded.target is None:
            return False
        if position >= 2 and "sleep" in (self.code[position - 1].name, self.code[position - 2].name):
            return True
        before = next(
            (c.name for c in self.code[max(0, position - 24) : position][::-1] if c.name in ("wait", "branch")), ""
        )
        after = [c.name for c in self.code[coded.target : coded.target + 24]] if coded.target < len(self.code) else []
        return before == "wait" and "sleep" in after and "wait" in after[: after.index("sleep")]


def anchor_of(cost: Cost, opcode: str) -> str:
    """Return the name in the machine code of a PTX instruction that is an anchor."""
    return TEST if opcode.startswith(TESTED) else ANCHORS[cost.kind]


def code_mix(code: Sequence[Coded], way: Sequence[int]) -> Mix:
    """Count these instructions of the machine code by KINDS."""
    mix = [0] * len(KINDS)
    for position in way:
        if (name := code[position].name) in _KIND_OF:
            mix[_KIND_OF[name]] += 1
    return tuple(mix)


def mix_of(opcodes: Sequence[str], costs: Sequence[Cost]) -> Mix:
    """Count these PTX instructions by KINDS."""
    mix = [0] * len(KINDS)
    for opcode, cost in zip(opcodes, costs, strict=True):
        kind = _kind(opcode, cost)
        if kind is not None:
            mix[KINDS.index(kind)] += 1
    return tuple(mix)


def _kind(opcode: str, cost: Cost) -> str | None:
    if cost.kind in ("arrive", "load", "store", "copy", "init"):
        return cost.kind
    if cost.kind != "plain":
        return None
    if cost.pipe == "fma":
        return "fma"
    if cost.pipe == "mufu":
        return "special"
    if cost.pipe == "warp_product":
        return "warp_product"
    if cost.rule == "rate" and opcode.startswith("max."):
        return "maximum"
    if cost.rule == "rate" and opcode.startswith("cvt"):
        return "convert"
    if opcode == "selp.f32":
        return "select"
    if cost.pipe == "move":
        if opcode.startswith("shfl"):
            return "shuffle"
        return "shared" if cost.port else "global"
    return None
