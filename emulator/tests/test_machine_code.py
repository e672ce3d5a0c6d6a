"""Machine code in the timing model: executed, and replayed with ptxas's order, stall counts and scoreboards."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from sass_kernels import assembled, program_of, run_program
from shipped_kernels import BUILT
from small_kernels import run, text_of
from test_core_wgmma import descriptor, results
from tsmla_emulator.prove import check
from tsmla_emulator.run.host.compile import compile_for_emulation
from tsmla_emulator.run.machine import Options, parse
from tsmla_emulator.run.ptx.calls import place_of
from tsmla_emulator.run.sass.decode import decoded
from tsmla_emulator.run.sass.kernel import kernels
from tsmla_emulator.run.sass.lower_async import asks_once
from tsmla_emulator.run.sass.model import BYTES, Control
from tsmla_emulator.time import problem
from tsmla_emulator.time.costs import Text
from tsmla_emulator.time.executed import LINE, Code, Executed
from tsmla_emulator.time.machine_code import plain
from tsmla_emulator.time.machines import B200, H100
from tsmla_emulator.time.replay import Memory, Prepared, Replayed, replay

PREFILL = "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_full_nolse"
NEAR = Memory(latency=500, rate=64)
TRACED = Options(trace=(0,))

Line = str | tuple[str, Control]
"""An instruction as nvdisasm prints it, with what it tells the scheduler; a stall of one clock by default."""


def replayed(lines: list[Line], threads: int = 32, cold: bool = False) -> Replayed:
    """Run machine code and replay what ran."""
    texts = [line if isinstance(line, str) else line[0] for line in lines]
    controls = [Control(1) if isinstance(line, str) else line[1] for line in lines]
    both = zip(assembled(texts), controls, strict=True)
    program = program_of([dataclasses.replace(one, control=control) for one, control in both], threads=threads)
    report = run_program(program, np.zeros(32, np.uint32), TRACED, shared_bytes=64)
    return replay(Executed(Code(program), H100), report.traces, NEAR, cold=cold)


def from_ptx(body: str, threads: int, **options) -> int:
    """Clocks of a kernel of PTX."""
    report = run(body, threads=threads, trace=(0,), **options)
    entry = parse(text_of(body, 0, "sm_90a", threads)).entries["k"]
    return replay(Prepared(Text(entry, "sm_90a"), H100), report.traces, NEAR).clocks


EXPONENTIAL = "MUFU.EX2 R1, R1"


def test_stalls_and_scoreboards_say_when_an_instruction_may_follow():
    spaced = replayed([(EXPONENTIAL, Control(12))] * 10 + ["EXIT"]).clocks
    waiting = replayed([(EXPONENTIAL, Control(1, result=0, awaits=1))] * 10 + ["EXIT"]).clocks
    assert spaced == pytest.approx(9 * 12, abs=16)
    assert waiting == pytest.approx(9 * H100.special_latency.value, abs=16)
    assert replayed([EXPONENTIAL] * 10 + ["EXIT"]).clocks == pytest.approx(9 * 8, abs=16)


def test_an_instruction_whose_guard_is_false_takes_its_turn_alone():
    start = ["ISETP.NE.U32.AND P0, PT, RZ, RZ, PT"]
    taken = [replayed([*start, *[f"{guard}{EXPONENTIAL}"] * 40, "EXIT"]).clocks for guard in ("@P0 ", "@!P0 ")]
    assert taken[0] == pytest.approx(40, abs=8) and taken[1] == pytest.approx(40 * 8, abs=16)


@pytest.mark.parametrize("jumped", [0, 8, 600])
def test_code_that_no_cache_holds_is_waited_for_a_line_at_a_time(jumped):
    """Longer behind what a launch brings ahead; once by all warps that run it."""
    of_line = LINE // BYTES
    lines = [f"BRA {(1 + jumped * of_line) * BYTES:#x}", *["MOV R1, RZ"] * ((jumped + 8) * of_line), "EXIT"]
    more = [replayed(lines, threads, True).clocks - replayed(lines, threads).clocks for threads in (32, 256)]
    each = H100.line_behind if jumped > H100.lines_ahead.value else H100.line_ahead
    lines_behind_the_jump = 9 if jumped else 8  # they begin in the middle of one
    assert more[0] == pytest.approx(H100.line_ahead.value + lines_behind_the_jump * each.value, abs=10)
    assert 0 < more[1] <= more[0]


def waiting(between: int, scoreboard: int | None) -> list[Line]:
    """A barrier at which warp 1 arrives after 60 exponentials in a row. Warp 0 asks for it, computes `between`
    exponentials, and branches on the answer to a loop that waits if need be."""
    done = 0 if scoreboard is None else 1 << scoreboard
    waits = Control(1, result=scoreboard)
    lines: list[Line] = [
        "S2R R0, SR_TID.X", "UMOV UR4, 0x1ffffe", "UMOV UR5, 0x7ffff800",
        "ISETP.EQ.U32.AND P1, PT, R0, RZ, PT", "@P1 SYNCS.EXCH.64 URZ, [URZ+0x400], UR4",
        "BAR.SYNC.DEFER_BLOCKING 0x0", "ISETP.GE.U32.AND P2, PT, R0, 0x20, PT", "@P2 BRA {other}",
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [URZ+0x400], RZ", waits), *[EXPONENTIAL] * between,
        ("@!P0 BRA {slow}", Control(1, awaits=done)), "FADD R2, R2, R2", "EXIT",
    ]  # fmt: skip
    back = len(lines) - 2
    slow: list[Line] = [
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [URZ+0x400], RZ", "@!P0 NANOSLEEP.SYNCS 0x989680",
        "@!P0 SYNCS.PHASECHK.TRANS64 P0, [URZ+0x400], RZ", "@!P0 BRA {slow}", f"BRA {16 * back:#x}",
    ]  # fmt: skip
    other: list[Line] = [(EXPONENTIAL, Control(1, result=0, awaits=1))] * 60
    other += [("ISETP.EQ.U32.AND P3, PT, R0, 0x20, PT", Control(1, awaits=1))]
    other += ["@P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [URZ+0x400], RZ", "EXIT"]
    places = {"slow": f"{16 * len(lines):#x}", "other": f"{16 * (len(lines) + len(slow)):#x}"}

    def placed(line: Line) -> Line:
        return line.format(**places) if isinstance(line, str) else (line[0].format(**places), line[1])

    return [placed(line) for line in [*lines, *slow, *other]]


@pytest.mark.parametrize(("scoreboard", "more"), [(None, 80 * 8), (0, 0)])
def test_a_warp_goes_on_behind_a_wait_until_it_awaits_its_scoreboard(scoreboard, more):
    """ptxas asks for a phase early, and branches on the answer where it is needed. What polls is left out."""
    few, many = (replayed(waiting(between, scoreboard), threads=64) for between in (2, 82))
    assert any(one.end - one.start > 300 for one in few.waits)  # said to be waited for, one way or the other
    assert few.clocks > 60 * H100.special_latency.value
    assert many.clocks - few.clocks == pytest.approx(more, abs=20)


def test_polling_is_left_out_and_its_wait_is_the_first_look_s():
    lines = waiting(2, 0)
    texts = [line if isinstance(line, str) else line[0] for line in lines]
    program = program_of(assembled(texts), threads=64)
    report = run_program(program, np.zeros(32, np.uint32), TRACED, shared_bytes=64)
    (waits,) = [trace for trace in report.traces if trace.warp == 0]
    code = Code(program)
    numbers, notes = Executed(code, H100).clean(waits)
    names = [code.instructions[code.of[number % len(code.of)]].name for number in numbers]
    look = names.index("SYNCS.PHASECHK.TRANS64.TRYWAIT")
    assert names[look:] == ["SYNCS.PHASECHK.TRANS64.TRYWAIT", "MUFU.EX2", "MUFU.EX2", "BRA", "FADD", "EXIT"]
    assert len(waits.instructions) > len(numbers) + 4  # it did poll
    assert notes[-1, 0] == look


@pytest.mark.parametrize(
    ("line", "once"),
    [
        ("SYNCS.PHASECHK.TRANS64 P0, [R4+URZ+0x8], R3", True),
        ("@!P0 SYNCS.PHASECHK.TRANS64 P0, [R4+URZ+0x8], R3", False),  # of a loop that waits
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ+0x8], R3", False),
        ("FADD R1, R1, R1", False),
    ],
)
def test_what_asks_once_is_told_from_what_waits(line, once):
    (instruction,) = assembled([line])
    assert asks_once(instruction) is once


def test_a_prefill_is_replayed_as_it_ran_and_says_where_it_waits():
    found = problem.PrefillTraced(check.find(PREFILL), problem.Shape(1, 128, 1024, 1), 132)
    shown = found.model(H100)
    assert [*shown.shown.coverage] == ["code"]
    places = {place_of(shown.prepared.entry, one.position)[1] for one in shown.shown.waits}
    assert {"k.acquire", "k.wait_full", "v.wait_full", "warpgroup.wait_group"} <= places


def test_lines_of_the_ptx_are_those_that_instructions_were_made_of():
    compiled = compile_for_emulation(check.find(PREFILL))
    text = compiled.ptx.read_text().splitlines()
    made = {"UTMALDG": "cp.async.bulk.tensor", "MUFU.EX2": "ex2.", "SYNCS.ARRIVE": "mbarrier.arrive"}
    for kernel in kernels(compiled.library).values():
        for start, opcode in made.items():
            told = [one for one in decoded(kernel.code, kernel.architecture) if one.name.startswith(start)]
            lines = [text[kernel.lines[one.address] - 1] for one in told if one.address in kernel.lines]
            assert len(lines) > 5 and all(opcode in line for line in lines)


BLACKWELL = "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_full_nolse"


def test_a_blackwell_kernel_runs_as_ptx_or_as_machine_code():
    shape = problem.Shape(1, 256, 1024, 1)
    of_ptx, of_code = (problem.PrefillTraced(check.find(BLACKWELL), shape, 148, BUILT, m) for m in (None, True))
    assert not of_ptx.machine_code  # by default as was held against a GPU
    ptx, code = of_ptx.model(B200), of_code.model(B200)
    assert "code" not in ptx.shown.coverage and [*code.shown.coverage] == ["code"]
    assert code.shown.busy["tensor"] == ptx.shown.busy["tensor"]  # the same products
    assert 0.8 < code.per_tile / ptx.per_tile < 1.25


@pytest.mark.parametrize(
    ("high", "low", "pipe"),
    [
        (0x000FD8000B800000, 0x0000012E042C7947, "none"),  # BRA.DIV UR4, as nvdisasm 13.5 has it
        (0x000FD20000000000, 0x000000FF00027208, "alu"),  # FSEL
    ],
)
def test_instructions_of_blackwell_have_a_pipe(high, low, pipe):
    (instruction,) = decoded((high << 64 | low).to_bytes(BYTES, "little"), "sm_100a")
    assert plain(instruction, B200).pipe == pipe


def turns(batch: int, pause: int, count: int) -> str:
    """Both warpgroups multiply in batches and then compute, as microbench/shared.cu has it."""
    one = (
        f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {results(128)}, {descriptor(0, 16, 1024, 128)}, "
        f"{descriptor(16384, 16, 1024, 128)}, 1, 1, 1, 0, 0;\n"
    )
    return f"""
    mov.b32 %r600, 0;
    LOOP:
    wgmma.fence.sync.aligned;
    {one * batch}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {"ex2.approx.ftz.f32 %r601, %r601;" * pause}
    add.s32 %r600, %r600, 1;
    setp.lt.s32 %p1, %r600, {count};
    @%p1 bra LOOP;
    """


@pytest.mark.parametrize(("pause", "measured"), [(100, 2559.7), (600, 2559.7), (1200, 2643.6), (1800, 3229.7)])
def test_two_warpgroups_fall_into_turns_as_they_do_on_an_h100(pause, measured):
    body = "mov.b32 %r601, 0f3F000000;\n" + turns(20, round(pause / H100.special_latency.value), 0)
    few, many = (
        from_ptx(re.sub(r"(%r600, )0(;\n\s*@)", rf"\g<1>{count}\2", body), 256, shared=65536, poison=False)
        for count in (10, 30)
    )
    assert (many - few) / 20 == pytest.approx(measured, rel=0.04)  # turns.ss.batch20, shared.cu
