"""What no call of a kernel executes is told by the place in its sources, and a reason holds for what it names only."""

from __future__ import annotations

import numpy as np
from small_kernels import run, text_of
from tsmla_emulator.prove import reach
from tsmla_emulator.run.machine import parse

BODY = """
setp.eq.s32 %p1, %r1000, 99;
@%p1 bra NEVER;
mov.b32 %r1, 1;
bra DONE;
NEVER:
mov.b32 %r1, 2;
mov.b32 %r2, 3;
DONE:
@%p1 st.global.b32 [%d100], %r1;
"""


def test_what_no_lane_executes_is_found():
    entry = text_of(BODY, 1, "sm_90a", 32)
    module = parse(entry)
    report = run(BODY, np.zeros(4, np.uint32), count=True)
    reached = {(name, at) for name, _, at in report.lanes}
    (left,), count = reach.unreached(module, reached)
    instructions = module.entries["k"].instructions
    assert (left.count, left.whole, count) == (4, False, len(instructions))  # the jump, two moves, the store
    assert instructions[next(n for n, one in enumerate(instructions) if one.line == left.line)].opcode.startswith("bra")
    (every,), _ = reach.unreached(module, set())
    assert every.whole and every.count == count


def test_a_reason_for_parts_of_places_does_not_hold_for_whole_ones():
    some = reach.Unreached("k", "parts/query.copy_rows: cute.copy", 7, 3, whole=False)
    all_of_it = reach.Unreached("k", "parts/query.copy_rows: cute.copy", 7, 3, whole=True)
    assert reach.Reason("parts/query.*", "why").holds(some)
    assert not reach.Reason("parts/query.*", "why").holds(all_of_it)
    assert reach.Reason("parts/query.*", "why", whole=True).holds(all_of_it)
    assert not reach.Reason("parts/quer", "why").holds(some)
    assert reach.reasons()
