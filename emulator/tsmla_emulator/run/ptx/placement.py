"""Places registers in slots, by liveness over the control-flow graph and one linear scan, so that a warp's registers
stay in cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .encoding import FIRST_FREE_SLOT, Encoded, op_number, register_width
from .model import Register

_BRANCH, _EXIT = op_number("bra"), op_number("exit")


def place_registers(code: list[Encoded], labels: dict[str, int]) -> tuple[dict[Register, int], int]:
    """Return the first slot of each register, and how many slots there are.

    A register keeps its slot over the hull of the positions at which it lives. One that is read before it is written
    lives from the start, so its slot still holds poison. Registers that an asynchronous instruction reads and writes
    when it runs keep their slots until a wait for all of them, on every way.
    """
    spans = _spans(code, labels)
    return _scan(spans)


def _spans(code: list[Encoded], labels: dict[str, int]) -> dict[Register, list[int]]:
    numbers: dict[Register, int] = {}
    reads = [[numbers.setdefault(register, len(numbers)) for register in _read(item)] for item in code]
    writes = [[numbers.setdefault(register, len(numbers)) for register in item.writes] for item in code]
    starts = sorted({0, *(p for p in labels.values() if p < len(code)), *_after_jumps(code)})
    ends = [*starts[1:], len(code)]
    block_at = {start: index for index, start in enumerate(starts)}
    used, killed, following = [], [], []
    for start, end in zip(starts, ends, strict=True):
        needed, defined = set[int](), set[int]()
        for position in range(start, end):
            needed.update(number for number in reads[position] if number not in defined)
            if code[position].guard is None:
                defined.update(writes[position])
        used.append(_bits(needed))
        killed.append(_bits(defined))
        following.append(_successors(code, end, labels, block_at))
    live_in, live_out = _solve(used, killed, following)
    first, last = [len(code)] * len(numbers), [0] * len(numbers)

    def extend(found: Iterable[int], position: int) -> None:
        for number in found:
            if position < first[number]:
                first[number] = position
            if position > last[number]:
                last[number] = position

    late = [
        _bits({numbers[x] for x in item.items if isinstance(x, Register)} if item.runs_late else ()) for item in code
    ]
    late_in, late_out = _late(code, late, starts, ends, following)
    borders = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        borders += [(live_in[index] | late_in[index], start), (live_out[index] | late_out[index], end)]
    for order in (borders, borders[::-1]):  # a register's first border, then its last; those between say nothing new
        known = 0
        for live, position in order:
            extend(_members(live & ~known), position)
            known |= live
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        under_way = late_in[index]
        for position in range(start, end):
            extend(reads[position], position)
            extend(writes[position], position)
            # A guarded write keeps the old value in other lanes; the write itself needs the slot one step longer.
            extend(writes[position], position + 1)
            under_way |= late[position]
            if code[position].awaits_all:
                extend(_members(under_way), position)
                under_way = 0
    return {register: [first[number], last[number]] for register, number in numbers.items()}


def _read(item: Encoded) -> list[Register]:
    return item.reads if item.guard is None else [*item.reads, item.guard[0]]


def _after_jumps(code: list[Encoded]) -> list[int]:
    return [i + 1 for i, item in enumerate(code) if item.op in (_BRANCH, _EXIT) and i + 1 < len(code)]


def _successors(code: list[Encoded], end: int, labels: dict[str, int], block_at: dict[int, int]) -> list[int]:
    last = code[end - 1]
    found = []
    if last.target is not None and labels[last.target] in block_at:
        found.append(block_at[labels[last.target]])
    if end in block_at and not (last.op in (_BRANCH, _EXIT) and last.guard is None):
        found.append(block_at[end])
    return found


def _solve(used: list[int], killed: list[int], following: list[list[int]]) -> tuple[list[int], list[int]]:
    count = len(used)
    live_in, live_out = [0] * count, [0] * count
    changed = True
    while changed:
        changed = False
        for index in range(count - 1, -1, -1):
            out = 0
            for successor in following[index]:
                out |= live_in[successor]
            entering = used[index] | (out & ~killed[index])
            if out != live_out[index] or entering != live_in[index]:
                live_out[index], live_in[index] = out, entering
                changed = True
    return live_in, live_out


def _late(
    code: list[Encoded], late: list[int], starts: list[int], ends: list[int], following: list[list[int]]
) -> tuple[list[int], list[int]]:
    """Return the registers of what may be under way where each block begins and ends."""
    begun, all_awaited = [], []
    for start, end in zip(starts, ends, strict=True):
        under_way, awaited = 0, False
        for position in range(start, end):
            under_way |= late[position]
            if code[position].awaits_all:
                under_way, awaited = 0, True
        begun.append(under_way)
        all_awaited.append(awaited)
    entering, leaving = [0] * len(starts), list(begun)
    waiting = list(range(len(starts)))
    while waiting:
        index = waiting.pop()
        leaving[index] = begun[index] | (0 if all_awaited[index] else entering[index])
        for successor in following[index]:
            if leaving[index] & ~entering[successor]:
                entering[successor] |= leaving[index]
                waiting.append(successor)
    return entering, leaving


def _bits(members: Iterable[int]) -> int:
    return sum(1 << member for member in members)


def _members(bits: int) -> list[int]:
    """Return which numbers are in a set of bits."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _scan(spans: dict[Register, list[int]]) -> tuple[dict[Register, int], int]:
    places: dict[Register, int] = {}
    free: dict[int, list[int]] = {1: [], 2: [], 4: []}
    active: list[tuple[int, int, int]] = []
    top = FIRST_FREE_SLOT
    for register, (start, end) in sorted(spans.items(), key=lambda item: item[1][0]):
        while active and active[0][0] < start:
            _, width, slot = heapq.heappop(active)
            heapq.heappush(free[width], slot)
        width = register_width(register)
        if free[width]:
            slot = heapq.heappop(free[width])
        else:
            slot, top = top, top + width
        places[register] = slot
        heapq.heappush(active, (end, width, slot))
    return places, top
