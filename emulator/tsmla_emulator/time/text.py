"""Writes what the timing model says: times and their band, busy units, waits by role and edge, a timeline."""

from __future__ import annotations

import collections
from typing import Any

from ..run.ptx.calls import place_of
from .band import outcomes
from .costs import RULES
from .machines import Machine
from .problem import Modelled
from .replay import BIN, Prepared, Waited

COLUMNS = 100
TILES_SHOWN = 2.5
_SIGNS = {
    "wait": ".", "wgmma_wait": "m", "tensor_wait_load": "t", "tensor_wait_store": "t", "named_sync": "b",
    "cluster_wait": "c", "store_wait": "s", "copy_wait": ".", "stall": "|",
}  # fmt: skip
_LEGEND = "# issues, . waits at an mbarrier, m for wgmma, t for tensor memory, b at a named barrier, s for stores"
_SHADES = " ░▒▓█"


def report(symbol: str, shape: str, found: Any, machine: Machine, with_band: bool) -> str:
    """Return the whole report of one kernel at one shape."""
    modelled = found.model(machine)
    mhz = machine.clock.value
    total = modelled.clocks + modelled.launch
    lines = [
        f"{symbol}  {shape}",
        f"modelled on {machine.name}, {machine.processors} SMs at {mhz:.0f} MHz; nothing here was measured",
        f"time: {total / mhz:,.1f} us = {total:,.0f} clk, {modelled.launch:,.0f} of them to start what is launched",
        *(f"  {name}: {value:,.0f}" for name, value in modelled.details.items()),
    ]
    if with_band:
        lines += _band(found, machine, total, mhz)
    parts = (busy, waits, timeline, coverage) if modelled.per_tile else (busy, coverage)
    return "\n".join([*lines, *(line for part in parts for line in ("", *part(modelled)))])


def _band(found: Any, machine: Machine, total: float, mhz: float) -> list[str]:
    changed = outcomes(found, machine)
    if not changed:
        return []
    least, most = min(total, *changed.values()), max(total, *changed.values())
    lines = [f"band: {least / mhz:,.1f} to {most / mhz:,.1f} us, one uncertain number at its extreme at a time:"]
    for (name, value), clocks in sorted(changed.items(), key=lambda item: -abs(item[1] - total)):
        if abs(clocks / total - 1) >= 0.005:
            lines.append(f"  {name} {value:g} instead of {getattr(machine, name).value:g}: {clocks / total - 1:+.1%}")
    return lines


def busy(modelled: Modelled) -> list[str]:
    """Return the share of its time that each unit of the SM that is shown is busy."""
    shown = modelled.shown
    shares = sorted(shown.busy.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {clocks / shown.clocks:.0%}" for name, clocks in shares if clocks >= 0.005 * shown.clocks)
    return [f"units busy over the {shown.clocks:,} clk that were replayed: {text}"]


def role_of(prepared: Prepared, trace: Any) -> str:
    """Return what a warp does, as its code says; else its number."""
    roles = collections.Counter(
        source.role
        for position in set((trace.instructions & 0x3FFFFFFF).tolist())
        if position < len(prepared.entry.instructions) and (source := prepared.entry.instructions[position].source)
    )
    roles.pop("", None)
    return roles.most_common(1)[0][0] if roles else f"warp {trace.warp}"


def label_of(prepared: Prepared, waited: Waited) -> str:
    """Return an edge's name where the text tells it, else the instruction."""
    function, callee, _ = place_of(prepared.entry, waited.position)
    opcode = prepared.entry.instructions[waited.position].opcode
    kind = {
        "wgmma": "wgmma", "mbarrier": "mbarrier", "tcgen05": "tensor memory", "bar": "named barrier",
        "WARPGROUP": "wgmma", "SYNCS": "mbarrier", "LDTM": "tensor memory", "BAR": "named barrier",
    }  # fmt: skip
    name = kind.get(opcode.split(".")[0], opcode)
    return callee or (f"{name} in {function.rpartition('.')[2]}" if function else name)


def waits(modelled: Modelled) -> list[str]:
    """Return the clocks that warps of each role wait, on average, by what they wait for, per KV tile."""
    prepared, shown = modelled.prepared, modelled.shown
    roles = {(t.rank, t.warp): role_of(prepared, t) for t in modelled.traces}
    warps = collections.Counter(roles.values())
    spent: dict[tuple[str, str], float] = collections.defaultdict(float)
    for one in shown.waits:
        role = roles[one.rank, one.warp]
        spent[role, label_of(prepared, one)] += (one.end - one.start) / warps[role]
    tiles = shown.clocks / modelled.per_tile if modelled.per_tile else 1.0
    lines = [f"waits of a warp, clk per KV tile of {modelled.per_tile:,.0f}:"]
    for role in sorted(warps):
        own = [(clocks / tiles, label) for (who, label), clocks in spent.items() if who == role]
        shown_ones = [f"{label} {clocks:,.0f}" for clocks, label in sorted(own, reverse=True)[:6] if clocks >= 1]
        if shown_ones:
            lines.append(f"  {role} (x{warps[role]}): " + ", ".join(shown_ones))
    return lines


def timeline(modelled: Modelled, tiles: float = TILES_SHOWN) -> list[str]:
    """Return what the first warp of every warpgroup of each role does, and how busy the matrix and exponential units
    are, over a few tiles in the middle."""
    prepared, shown = modelled.prepared, modelled.shown
    span = min(modelled.per_tile * tiles, shown.clocks)
    start = max(0.0, shown.clocks / 2 - span / 2)
    step = span / COLUMNS
    rows = []
    seen = set()
    longest = max(len(trace.instructions) for trace in modelled.traces)
    for trace in modelled.traces:
        role = role_of(prepared, trace)
        key = (trace.rank, role, trace.warp // 4)
        if key in seen or len(trace.instructions) < longest / 50:
            continue
        seen.add(key)
        rows.append((f"{role} {trace.warp}" + (f" of CTA {trace.rank}" if trace.rank else ""), trace.rank, trace.warp))
    width = max([8, *(len(name) for name, _, _ in rows)])
    lines = [f"timeline from clk {start:,.0f}, {step:.0f} clk a column. {_LEGEND}"]
    for name, rank, warp in rows:
        cells = ["#"] * COLUMNS
        for one in shown.waits:
            if (one.rank, one.warp) != (rank, warp) or one.end - one.start < step / 2:
                continue
            sign = _SIGNS.get(prepared.costs[one.position].kind, ".")
            for column in range(COLUMNS):
                middle = start + (column + 0.5) * step
                if one.start <= middle < one.end:
                    cells[column] = sign
        lines.append(f"  {name:>{width}} {''.join(cells)}")
    for name, bins in (("matrix", shown.tensor_bins), ("ex2", shown.mufu_bins)):
        cells = []
        for column in range(COLUMNS):
            first, last = int((start + column * step) / BIN), max(int((start + (column + 1) * step) / BIN), 1)
            share = float(bins[first : max(last, first + 1)].mean()) / BIN
            cells.append(_SHADES[min(4, round(4 * share))])
        lines.append(f"  {name:>{width}} {''.join(cells)}")
    return lines


def coverage(modelled: Modelled) -> list[str]:
    """Return how many executed warp instructions got their cost by which rule."""
    total = sum(modelled.shown.coverage.values())
    lines = [f"cost of {total:,} warp instructions replayed, polling left out:"]
    for rule, times in modelled.shown.coverage.most_common():
        lines.append(f"  {times / total:5.1%} {rule}: {RULES[rule]}")
    return lines
