"""What no call of a kernel executes is told by the place in its sources, and a reason holds for what it names only."""

from __future__ import annotations

import numpy as np
import pytest
from sass_kernels import assembled, program_of
from small_kernels import run, text_of
from tsmla.identity.arch import Arch
from tsmla.identity.plan import DEALS, plan_decode
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla_emulator import dealt
from tsmla_emulator.prove import check, reach
from tsmla_emulator.prove.calls.decode import DECODE_SMS, decode_rows
from tsmla_emulator.run.machine import parse
from tsmla_emulator.run.ptx.model import Call, Entry, Instruction, Module, Source

REACHED = (
    "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse",
    "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_masked",
    "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_causal_lse",
    "tsmla_decode_sm_90a_bf16_to_bf16_d512x64_nolse",
)
"""Kernels of each kind of loop, few, since each is compiled with the lines that tell places in sources."""
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


def test_a_reason_of_machine_code_does_not_hold_for_ptx(monkeypatch):
    left = reach.Unreached("k", "parts/query.copy_rows", 0x70, 1, whole=False)
    monkeypatch.setattr(reach, "reach", lambda variant, machine_code: ([left], 9))
    variant = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, False)
    given = [reach.Reason("parts/query.*", "why", machine_code=True)]
    assert reach.told(variant, given)[1] == 1
    lines, without = reach.told(variant, given, machine_code=True)
    assert without == 0 and lines[1].strip() == "parts/query.copy_rows: 1 (some), at 0x70: why"


def test_instructions_without_calls_have_the_place_of_what_runs_with_them():
    copied, told = (
        Source("/x/tsmla_kernels/sm90/load.py", 7, (Call("sm90/load.load", 7, callee),)) for callee in ("copy", "tell")
    )
    alone = Source("/x/tsmla_kernels/sm90/work/task.py", 87)
    nothing = Source("/x/tsmla_kernels/entry.py", 67)
    lines = {"mov": copied, "bra": nothing, "ld.param": nothing, "shl": told, "setp": alone, "bra.uni": nothing}
    code = [Instruction(opcode, (), line, "", source=at) for line, (opcode, at) in enumerate(lines.items())]
    entry = Entry("k", (), 0, None, instructions=code)
    copy, tell = "sm90/load.load: copy", "sm90/load.load: tell"
    assert reach._places(entry) == [copy, copy, tell, tell, "sm90/work/task", "sm90/work/task"]
    entry.labels["L"] = 3  # others come there, too
    assert reach._places(entry)[2] == copy


def test_machine_code_that_no_way_leads_to_is_none():
    """Behind the end, and the detour of lanes that are apart."""
    lines = ["@P0 BRA 0x30", "BRA.DIV UR4, 0x50", "MOV R1, R2", "MOV R2, R3", "EXIT", "NOP", "EXIT", "NOP"]
    program = program_of(assembled(lines))
    module = Module("sm_90a", "machine code", {"k": program.entry}, "")
    module.programs["k"] = program
    places = [at for at, one in enumerate(program.entry.instructions) if one.line in (0x10, 0x20)]
    (left,), count = reach.unreached(module, {("k", at) for at in places})
    assert (left.line, left.count, count) == (0, 3, 5)


@pytest.mark.parametrize("symbol", REACHED)
def test_calls_at_bounds_reach_all_that_has_no_reason(symbol):
    lines, without = reach.told(check.find(symbol), reach.reasons())
    assert without == 0, "\n".join(lines)


@pytest.mark.parametrize("arch", DEALS)
def test_a_call_has_requests_with_fewer_row_tiles(arch):
    """Groups have fewer CTAs than the most row tiles then, and a request is split."""
    found = []
    variant = DecodeVariant(arch, Dtype.BF16, Dtype.BF16, False)
    for rows, key_counts, way in check._ways(variant, decode_rows(arch)[-1], True, True):
        heads = way.heads or rows // 2
        q_len = rows // heads
        if way.varies and key_counts:
            plan = plan_decode(arch, DECODE_SMS, len(key_counts), q_len, heads, max(key_counts), varies=True)
            q_lens = [(q_len, 1, q_len, 0)[i % 4] for i in range(len(key_counts))]
            deal = dealt.deal_out(DEALS[arch], key_counts, q_lens, heads, plan.workers, plan.slots)
            found.append(deal.line.own_group > 0 and any(one.slot >= 0 for own in deal.segments for one in own))
    assert any(found)
