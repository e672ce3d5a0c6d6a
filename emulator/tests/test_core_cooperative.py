"""Cooperative launches: CTAs that wait for each other, what orders them, and those that wait in vain."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import run
from test_core_races import clean, races
from tsmla_emulator.run.machine import EmulationError

CTAS = 5
# Every warp writes a word; one thread of each CTA arrives and waits; every warp reads a word of the next CTA.
GRID = """mov.u32 %r10, %ctaid.x; mov.u32 %r11, %nctaid.x; shr.u32 %r12, %r1000, 5; and.b32 %r13, %r1000, 31;
mad.lo.u32 %r14, %r10, 2, %r12; mad.wide.u32 %d1, %r14, 4, %d100; setp.ne.u32 %p1, %r13, 0;
@!%p1 st.global.b32 [%d1+64], %r14;
BEFORE setp.ne.u32 %p2, %r1000, 0; @%p2 bra MET;
ARRIVE
AGAIN: LOAD setp.ne.u32 %p3, %r15, ALL; @%p3 bra AGAIN; AFTER
MET: MEET
add.u32 %r16, %r10, 1; rem.u32 %r16, %r16, %r11; mad.lo.u32 %r17, %r16, 2, %r12; mad.wide.u32 %d2, %r17, 4, %d100;
@!%p1 ld.global.b32 %r18, [%d2+64]; @!%p1 st.global.b32 [%d1+192], %r18;"""
RIGHT = {
    "BEFORE": "bar.sync 0;",
    "ARRIVE": "red.release.gpu.global.add.u32 [%d100], 1;",
    "LOAD": "ld.acquire.gpu.global.b32 %r15, [%d100];",
    "ALL": str(CTAS),
    "AFTER": "",
    "MEET": "bar.sync 0;",
}
FENCED = {
    "ARRIVE": "fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %r20, [%d100], 1;",
    "LOAD": "ld.relaxed.gpu.global.b32 %r15, [%d100];",
    "AFTER": "fence.acq_rel.gpu;",
}
WRONG = {
    "nobody releases": {"ARRIVE": "red.relaxed.gpu.global.add.u32 [%d100], 1;"},
    "nobody acquires": {"LOAD": "ld.relaxed.gpu.global.b32 %r15, [%d100];"},
    "not all have arrived": {"ALL": str(CTAS), "LOAD": f"mov.b32 %r15, {CTAS};"},
    "warps do not meet before": {"BEFORE": ""},
    "warps do not meet after": {"MEET": ""},
    "no fence before": FENCED | {"ARRIVE": "atom.relaxed.gpu.global.add.u32 %r20, [%d100], 1;"},
    "no fence after": FENCED | {"AFTER": ""},
    "the word is written over": {"BEFORE": "@!%p1 st.global.b32 [%d100], %r14; bar.sync 0;"},
}


def text(**parts: str) -> str:
    body = GRID
    for name, part in (RIGHT | parts).items():
        body = body.replace(name, part)
    return body


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize("parts", [{}, FENCED], ids=["qualified", "fenced"])
def test_a_barrier_of_the_grid_orders_what_its_ctas_do(mode, parts):
    out = np.zeros(128, np.uint32)
    clean(text(**parts), arguments=(out,), grid=CTAS, cooperative=True, async_mode=mode)
    assert (out[48 : 48 + 2 * CTAS] == np.roll(np.arange(2 * CTAS), -2)).all()


@pytest.mark.parametrize("name", WRONG)
def test_what_a_barrier_of_the_grid_leaves_out_is_a_race(name):
    arrays = (np.zeros(128, np.uint32),)
    races(text(**WRONG[name]), "race: global memory", arguments=arrays, grid=CTAS, cooperative=True)


def test_ctas_that_wait_in_vain_are_a_deadlock():
    with pytest.raises(EmulationError, match="deadlock: no warp can go on(?s:.*)waits for nothing: it polls") as caught:
        run(text(ALL="6"), np.zeros(128, np.uint32), threads=64, grid=CTAS, cooperative=True)
    assert caught.value.kind == "deadlock"
