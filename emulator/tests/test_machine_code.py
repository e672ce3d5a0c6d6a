"""Machine code in the timing model: read, matched with what a warp ran, and replayed with ptxas's order and waits."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np
import pytest
from small_kernels import run, text_of
from test_core_wgmma import descriptor, results
from tsmla_emulator.prove import check
from tsmla_emulator.run.host.compile import compile_for_emulation
from tsmla_emulator.run.machine import parse
from tsmla_emulator.run.sass.decode import decoded
from tsmla_emulator.run.sass.model import BYTES
from tsmla_emulator.time import machine_code, problem
from tsmla_emulator.time.costs import Text
from tsmla_emulator.time.machine_code import Coded, instructions
from tsmla_emulator.time.machines import B200, H100
from tsmla_emulator.time.matching import KINDS, NOTHING, Matcher
from tsmla_emulator.time.placement import Placer
from tsmla_emulator.time.replay import Memory, Prepared, replay

PREFILL = "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_full_nolse"
NEAR = Memory(latency=500, rate=64)
PLAIN = Coded("other", False, None, 1, 0, None, None, 0)


def coded(name: str, **values) -> Coded:
    return dataclasses.replace(PLAIN, name=name, **values)


def mix(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(kind, 0) for kind in KINDS)


def replayed(body: str, code: list[Coded] | None, threads: int = 32, **options) -> int:
    """Clocks of a kernel, with this machine code or from PTX."""
    report = run(body, threads=threads, trace=(0,), **options)
    entry = parse(text_of(body, 0, "sm_90a", threads)).entries["k"]
    text = Text(entry, "sm_90a")
    if code is not None:
        text.placer = Placer(code, [i.opcode for i in entry.instructions], len(entry.instructions) + 1)
    return replay(Prepared(text, H100), report.traces, NEAR).clocks


def test_a_kernel_s_code_holds_what_its_ptx_asks_for():
    compiled = compile_for_emulation(check.find(PREFILL))
    entry = next(iter(parse(compiled.ptx.read_text()).entries.values()))
    code = instructions(compiled.library, entry.name)
    have = collections.Counter(one.name for one in code)
    asked = collections.Counter(".".join(i.opcode.split(".")[:2]) for i in entry.instructions)
    assert have["wgmma"] == asked["wgmma.mma_async"] and have["wgmma_wait"] == asked["wgmma.wait_group"]
    assert have["arrive"] == asked["mbarrier.arrive"] and have["stmatrix"] == asked["stmatrix.sync"]
    assert have["load"] == sum(
        i.opcode.startswith("cp.async.bulk.tensor") and "global.tile" in i.opcode for i in entry.instructions
    )
    assert all(0 <= one.target < len(code) for one in code if one.name == "branch")
    assert {one.stall for one in code if one.name == "wgmma"} <= set(range(16))
    assert instructions(compiled.library, "another_kernel") == []


BLACKWELL = "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_full_nolse"


def test_a_blackwell_kernel_s_code_is_what_its_warps_ran():
    found = problem.PrefillTraced(check.find(BLACKWELL), problem.Shape(1, 256, 1024, 1), 148)
    assert not found.machine_code  # by default as was held against a GPU
    from_ptx = found.model(B200)
    assert from_ptx.prepared.placer is None
    other = problem.PrefillTraced(check.find(BLACKWELL), problem.Shape(1, 256, 1024, 1), 148)
    other.machine_code = True
    shown = other.model(B200)
    placer = shown.prepared.placer
    assert placer is not None and placer.matched == placer.all > 1000
    assert shown.shown.coverage["code"] > 0.98 * sum(shown.shown.coverage.values())
    # Of the sum that a key with NaN replaces, in each step but the first, ptxas makes a product behind a predicate.
    guarded = 8 * sum(tiles - 1 for tiles in problem.TILES_TRACED)
    for kind, asked, given in zip(KINDS, placer.asked, placer.given, strict=True):
        if kind == "select":  # of a loop with masks there would be thirty times as many
            assert given == pytest.approx(asked - guarded, rel=0.05)
        elif asked > 1000:
            assert given == pytest.approx(asked, rel=0.05), kind
    names = {one.name for one in placer.code}
    assert {"product", "commit", "tensor_load", "tensor_store", "tensor_fence", "wait"} <= names
    assert shown.per_tile != from_ptx.per_tile


def test_every_stretch_of_a_prefill_is_found():
    found = problem.PrefillTraced(check.find(PREFILL), problem.Shape(1, 128, 1024, 1), 132)
    shown = found.model(H100)
    placer = shown.prepared.placer
    assert placer is not None and placer.matched == placer.all > 1000
    assert shown.shown.coverage["code"] > 0.9 * sum(shown.shown.coverage.values())


def test_of_two_ways_the_one_is_taken_whose_instructions_are_there():
    code = [
        coded("branch", target=3, guarded=True),
        *[coded("special")] * 1,
        coded("branch", target=6),
        *[coded("fma")] * 3,
        coded("wait"),
        coded("exit"),
    ]
    matcher = Matcher(code)
    first, last = matcher.stretches(["wait"], [mix(special=1), NOTHING])
    assert (first.way, first.anchor, last.way) == ((0, 1, 2), 6, ())
    assert Matcher(code).stretches(["wait"], [mix(fma=3), NOTHING])[0].way == (0, 3, 4, 5)


def test_a_loop_runs_as_often_as_its_instructions_did_and_what_has_no_way_is_said():
    code = [coded("special"), coded("branch", target=0, guarded=True), coded("wait"), coded("exit")]
    first, _ = Matcher(code).stretches(["wait"], [mix(special=5), NOTHING])
    assert first.way is not None and first.way.count(0) == 5
    lost, _ = Matcher([coded("exit"), coded("wait"), coded("exit")]).stretches(["wait"], [NOTHING, NOTHING])
    assert (lost.way, lost.anchor) == (None, 1)


def test_stalls_and_scoreboards_say_when_an_instruction_may_follow():
    body = 10 * "ex2.approx.ftz.f32 %r1, %r1001;\n"
    end = [coded("exit")]
    spaced = replayed(body, [coded("special", size=2, stall=12)] * 10 + end)
    waiting = replayed(
        body, [coded("special", size=2, result=0)] + [coded("special", size=2, result=0, awaits=1)] * 9 + end
    )
    assert spaced == pytest.approx(9 * 12, abs=16)
    assert waiting == pytest.approx(9 * H100.special_latency.value, abs=16)
    assert replayed(body, [coded("special", size=2)] * 10 + end) == pytest.approx(9 * 8, abs=16)


WAITED = """
mov.b32 %r1, smem;
setp.ne.s32 %p1, %r1000, 0;
@%p1 bra DONE;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
add.s32 %r2, %r1, 1024;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d100], 1024, [%r1];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra WAIT;
DONE:
"""


@pytest.mark.parametrize(("scoreboard", "more"), [(None, 300), (0, 0)])
def test_a_warp_goes_on_behind_a_wait_until_it_awaits_its_scoreboard(scoreboard, more):
    """ptxas asks for a phase early, and branches on the answer where it is needed."""
    source = np.zeros(1024, np.uint8)

    def taken(between: int) -> int:
        code = [
            coded("init"),
            coded("fence"),
            coded("arrive"),
            coded("load"),
            coded("wait", result=scoreboard),
            *[coded("special", size=2)] * between,
            coded("fma", awaits=1),
            coded("exit"),
        ]
        report = run(WAITED, source, shared=4096, trace=(0,))
        entry = parse(text_of(WAITED, 1, "sm_90a", 32)).entries["k"]
        text = Text(entry, "sm_90a")
        text.placer = Placer(code, [i.opcode for i in entry.instructions], len(entry.instructions) + 1)
        found = replay(Prepared(text, H100), report.traces, NEAR)
        assert any(wait.end - wait.start > 100 for wait in found.waits)  # said to be waited for, one way or the other
        return found.clocks

    assert taken(40) - taken(2) == pytest.approx(more, abs=20)


def test_the_way_with_nothing_too_much_is_found_among_many():
    """Forty choices in a row, each of an instruction of one of four kinds or none: a million million ways."""
    kinds = ("shuffle", "load_global", "stmatrix", "convert")
    code = []
    for at in range(40):
        skipped = coded("branch", target=3 * at + 3)
        code += [coded("branch", target=3 * at + 2, guarded=True), skipped, coded(kinds[at % 4])]
    code += [coded("copy"), coded("wait"), coded("exit")]
    first, _ = Matcher(code).stretches(["wait"], [mix(copy=1), NOTHING])
    assert first.way is not None and not {code[position].name for position in first.way} & {*kinds}


def test_of_tests_in_turns_the_last_is_the_anchor():
    code = [
        coded("test"),
        coded("branch", target=5, guarded=True),
        coded("special"),
        coded("test"),
        coded("branch", target=0, guarded=True),
        coded("wait"),
        coded("exit"),
    ]
    for first_mix, way, anchor in ((NOTHING, (), 0), (mix(special=1), (0, 1, 2), 3)):
        tested, waited, _ = Matcher(code).stretches(["test", "wait"], [first_mix, NOTHING, NOTHING])
        assert (tested.way, tested.anchor, waited.anchor) == (way, anchor, 5)


@pytest.mark.parametrize(
    ("high", "low", "name"),
    [
        (0x000FD8000B800000, 0x0000012E042C7947, "other"),  # BRA.DIV UR4, as nvdisasm 13.5 has it
        (0x000EE40000000200, 0x00000000000073C6, "tensor_fence"),  # FENCE.VIEW.ASYNC.T
        (0x000EB60000000000, 0x00000000000073C6, "fence"),  # FENCE.VIEW.ASYNC.S
        (0x000E6400080011FF, 0x00000008030075A7, "wait"),  # SYNCS.PHASECHK.TRANS64.TRYWAIT
        (0x0062A400080010FF, 0x00001007040075A7, "test"),  # SYNCS.PHASECHK.TRANS64
        (0x0005E200085000FF, 0x0000000300FF79A7, "arrive"),  # SYNCS.ARRIVE.TRANS64.ART0
        (0x000FD20000000000, 0x000000FF00027208, "select"),
    ],  # FSEL
)
def test_instructions_of_blackwell_are_named(high, low, name):
    code = decoded((high << 64 | low).to_bytes(BYTES, "little"), "sm_100a")
    assert machine_code.coded(code, 0).name == name


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
        replayed(re.sub(r"(%r600, )0(;\n\s*@)", rf"\g<1>{count}\2", body), None, 256, shared=65536, poison=False)
        for count in (10, 30)
    )
    assert (many - few) / 20 == pytest.approx(measured, rel=0.04)  # turns.ss.batch20, shared.cu
