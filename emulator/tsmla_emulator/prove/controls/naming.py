"""Names findings without line numbers: by memory, functions of the sources, operations, and what is missing."""

from __future__ import annotations

import re
from pathlib import Path

from ...run.host.call_sites import function_at
from ...run.machine import Finding
from ...run.ptx.model import Instruction

_MISSING = {
    "ordered, but without a tcgen05.fence::after_thread_sync before the latter": "no tcgen05.fence::after_thread_sync",
    "ordered, but without a tcgen05.fence::before_thread_sync after the former": "no tcgen05.fence::before_thread_sync",
    "ordered, but without a fence.proxy.async between them": "no fence.proxy.async",
    "not ordered: the former ends at a tcgen05.wait::ld": "no tcgen05.wait::ld",
    "not ordered: they are of different lanes, without a bar.warp.sync between them": "no bar.warp.sync",
    "not ordered": "unordered",
}
_PLACE = re.compile(r"(tensor memory|shared memory|region '[^']*')")
_RACE = re.compile(r".*@ and .*@ are (?P<missing>.*)", re.DOTALL)
_REGION = re.compile(r"past the end of region '(\w+)'")


def name_of(finding: Finding) -> str:
    """Return a line such as `shared memory: decode.softmax ld.shared, decode.softmax st.shared: unordered`."""
    sides = ", ".join(_side(instruction) for instruction in finding.instructions)
    place = _PLACE.match(finding.text)
    if finding.kind == "race" and (race := _RACE.match(finding.text)):
        memory = place[1] if place else "global memory"
        missing = _MISSING.get(race["missing"], race["missing"])
        if missing == "unordered" and finding.instructions[0].opcode.startswith("tcgen05.ld"):
            missing = "no tcgen05.wait::ld"  # whether its warp has come to one by then is of the schedule
        return f"{memory}: {sides}: {missing}"
    if finding.kind == "exit":
        return f"exit: {sides}: not over when its CTA ends"
    if finding.kind == "memory" and (region := _REGION.search(finding.text)):
        return f"memory: {sides}: past the end of {region[1]}"
    return f"{finding.kind}: {sides}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', finding.text.splitlines()[0])}"


def _side(instruction: Instruction) -> str:
    operation = ".".join(instruction.opcode.split(".")[:2])
    source = instruction.source
    if source is None:
        return operation
    stem, function = Path(source.file).stem, ""
    if Path(source.file).is_file():
        function = function_at(source.file, source.line)
    return f"{stem}.{function} {operation}" if function else f"{stem} {operation}"
