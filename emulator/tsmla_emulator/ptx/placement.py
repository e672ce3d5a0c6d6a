"""Register slots: liveness over the control-flow graph, then one linear scan, so that a warp's file stays in cache."""

from __future__ import annotations

import heapq

from .encoding import FIRST_FREE_SLOT, Encoded, op_number, register_width
from .model import Register

_BRANCH, _EXIT = op_number("bra"), op_number("exit")


def place_registers(code: list[Encoded], labels: dict[str, int]) -> tuple[dict[Register, int], int]:
    """(first slot of each register, slots in all).

    A register keeps its slot over the hull of the positions at which it lives. One that is read before it is written
    lives from the start, so its slot still holds poison. Results of asynchronous instructions keep their slot at
    least until the next wait that can land them.
    """
    spans = _spans(code, labels)
    return _scan(spans)


def _spans(code: list[Encoded], labels: dict[str, int]) -> dict[Register, list[int]]:
    numbers: dict[Register, int] = {}
    for item in code:
        for register in _read(item) + item.writes:
            numbers.setdefault(register, len(numbers))
    registers = list(numbers)
    starts = sorted({0, *(p for p in labels.values() if p < len(code)), *_after_jumps(code)})
    ends = [*starts[1:], len(code)]
    block_at = {start: index for index, start in enumerate(starts)}
    used, killed, following = [], [], []
    for start, end in zip(starts, ends, strict=True):
        reads, writes = 0, 0
        for item in code[start:end]:
            for register in _read(item):
                bit = 1 << numbers[register]
                if not writes & bit:
                    reads |= bit
            if item.guard is None:
                for register in item.writes:
                    writes |= 1 << numbers[register]
        used.append(reads)
        killed.append(writes)
        following.append(_successors(code, end, labels, block_at))
    live_in, live_out = _solve(used, killed, following)
    spans: dict[Register, list[int]] = {}

    def extend(register: Register, position: int) -> None:
        span = spans.setdefault(register, [position, position])
        span[0] = min(span[0], position)
        span[1] = max(span[1], position)

    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for register in _members(live_in[index], registers):
            extend(register, start)
        for register in _members(live_out[index], registers):
            extend(register, end)
    landing = len(code)
    for position in range(len(code) - 1, -1, -1):
        item = code[position]
        if item.lands:
            landing = position
        for register in _read(item):
            extend(register, position)
        for register in item.writes:
            extend(register, position)
            # A guarded write keeps the old value in other lanes; the write itself needs the slot one step longer.
            extend(register, landing if item.late_writes else position + 1)
    return spans


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


def _members(bits: int, registers: list[Register]) -> list[Register]:
    found = []
    while bits:
        low = bits & -bits
        found.append(registers[low.bit_length() - 1])
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
