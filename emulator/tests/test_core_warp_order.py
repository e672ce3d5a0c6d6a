"""Lanes of one warp are threads: what each does, the others know of after a synchronisation of the warp only."""

from __future__ import annotations

import numpy as np
import pytest
from test_core_races import INIT, SLOT, clean, races

SYNC = "bar.warp.sync -1;"
NEIGHBOUR = "xor.b32 %r6, %r3, 4;"
ELECT = "elect.sync %r5|%p2, -1;"
WAIT = "{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }"
LANES = "of different lanes, without a bar.warp.sync between them"


def needs_sync(body: str, match: str = LANES, instead: str = "", sync: str = SYNC, **options) -> None:
    """`body` has SYNC where lanes must wait for each other."""
    assert body.count("SYNC") == 1
    clean(body.replace("SYNC", sync), **options)
    races(body.replace("SYNC", instead), match, **options)


@pytest.mark.parametrize(
    "first, second",
    [
        ("st.shared.b32 [%r3], 1;", "ld.shared.b32 %r4, [%r6];"),
        ("ld.shared.b32 %r4, [%r3];", "st.shared.b32 [%r6], 1;"),
        ("st.shared.b32 [%r3], 1;", "st.shared.b32 [%r6], 2;"),
    ],
    ids=["write and read", "read and write", "write and write"],
)
@pytest.mark.parametrize("instead", ["", "vote.sync.any.pred %p3, %p4, -1;", ELECT, "bar.warp.sync 1;"])
def test_a_neighbours_word(first, second, instead):
    """Votes and elections order no memory."""
    if "1;" in instead:
        instead = "setp.ne.u32 %p5, %r1001, 0; @%p5 bra OVER; bar.warp.sync 1; OVER:"
    needs_sync(f"setp.eq.u32 %p4, 0, 0; {SLOT} {NEIGHBOUR} {first} SYNC {second}", instead=instead, threads=32)


@pytest.mark.parametrize("sync", ["bar.sync 0;", "barrier.cluster.arrive; barrier.cluster.wait;"])
def test_any_barrier_of_the_whole_warp_will_do(sync):
    needs_sync(f"{SLOT} {NEIGHBOUR} st.shared.b32 [%r3], 1; SYNC ld.shared.b32 %r4, [%r6];", sync=sync, threads=32)


def test_an_mbarrier_that_all_lanes_arrive_at_and_wait_for():
    all_arrive = INIT.replace("[smem+512], 1;", "[smem+512], 32;") + f"{SLOT} {NEIGHBOUR}"
    wait = "mbarrier.arrive.shared.b64 %d1, [smem+512];" + WAIT
    needs_sync(f"{all_arrive} st.shared.b32 [%r3], 1; SYNC ld.shared.b32 %r4, [%r6];", sync=wait, threads=32)


def test_a_lane_sees_its_own_words():
    clean(f"{SLOT} st.shared.b32 [%r3], 1; ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r3], 2;", threads=32)
    wide = SLOT + "shl.b32 %r7, %r1001, 4; mov.b32 %r2, smem; add.s32 %r8, %r2, %r7;"
    clean(wide + "st.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1}; ld.shared.b32 %r4, [%r8+8];", threads=32)
    races(wide + "st.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1}; ld.shared.b32 %r4, [%r3];", LANES, threads=32)


def test_a_lane_alone_sees_its_own_word_and_others_do_not():
    alone = f"{SLOT} setp.eq.u32 %p1, %r1001, 5; @%p1 st.shared.b32 [%r3], 1;"
    clean(alone + "ld.shared.b32 %r4, [%r3];", threads=32)
    races(alone + NEIGHBOUR + "ld.shared.b32 %r4, [%r6];", LANES, threads=32)


def test_one_lane_reads_what_all_wrote():
    needs_sync(f"{SLOT} st.shared.b32 [%r3], 1; SYNC {ELECT} @%p2 ld.shared.b32 %r4, [smem+64];", threads=32)


def test_all_read_what_one_lane_wrote():
    needs_sync(f"{ELECT} @%p2 st.shared.b32 [smem], 1; SYNC ld.shared.b32 %r4, [smem];", threads=32)


COPY = SLOT + "cp.async.ca.shared.global [%r3], [%d100], 4; cp.async.commit_group; cp.async.wait_group 0;"


def test_what_another_lane_copied_and_waited_for():
    clean(COPY + "ld.shared.b32 %r4, [%r3];", threads=32)
    needs_sync(f"{COPY} {NEIGHBOUR} SYNC ld.shared.b32 %r4, [%r6];", "not ordered", threads=32)
    needs_sync(f"{COPY} SYNC {ELECT} @%p2 ld.shared.b32 %r4, [smem+64];", "not ordered", threads=32)
    clean(f"{COPY} {ELECT} @%p2 ld.shared.b32 %r4, [%r3];", threads=32)


def test_a_lane_hands_on_what_all_copied():
    arrive = f"{ELECT} @%p2 mbarrier.arrive.shared.b64 %d1, [smem+512];"
    body = f"{INIT} setp.ge.u32 %p1, %r1000, 32; @%p1 bra READ; {COPY} SYNC {arrive} bra OVER;"
    needs_sync(f"{body} READ: {WAIT} ld.shared.b32 %r4, [smem+64]; OVER:", "not ordered", threads=64)
    all_arrive = body.replace("[smem+512], 1;", "[smem+512], 32;").replace(arrive, arrive.replace("@%p2", ""))
    clean(f"{all_arrive.replace('SYNC', '')} READ: {WAIT} ld.shared.b32 %r4, [smem+64]; OVER:", threads=64)


PLACES = (
    SLOT
    + """
and.b32 %r7, %r1001, WORDS; shl.b32 %r7, %r7, 2; add.s32 %r8, %r2, %r7; mad.wide.u32 %d1, %r7, 1, %d100;
"""
)


@pytest.mark.parametrize("words", [1, 2], ids=["all lanes", "every other lane"])
@pytest.mark.parametrize("space, place", [("shared", "%r8"), ("global", "%d1")])
def test_a_lane_writes_what_several_read(space, place, words):
    """It may not before all have read it, and it is one of them."""
    body = PLACES.replace("WORDS", str(words - 1)) + f"ld.{space}.b32 %r4, [{place}]; SYNC {ELECT}"
    needs_sync(body + f"@%p2 st.{space}.b32 [{place}], 7;", threads=32)


@pytest.mark.parametrize("space, place", [("shared", "%r8"), ("global", "%d1")])
def test_lanes_write_what_they_alone_read_many_times(space, place):
    body = PLACES.replace("WORDS", "31") + f"mov.b32 %r5, 0; AGAIN: ld.{space}.b32 %r4, [{place}]; add.u32 %r5, %r5, 1;"
    body += "setp.lt.u32 %p2, %r5, 3; @%p2 bra AGAIN;"
    clean(body + f"st.{space}.b32 [{place}], 7;", threads=32)
    races(body + f"xor.b32 %r8, %r8, 4; xor.b64 %d1, %d1, 4; st.{space}.b32 [{place}], 7;", LANES, threads=32)


def test_lanes_that_store_to_one_word_of_global_memory_store_the_same():
    clean("st.global.b32 [%d100], 7;", threads=32)
    races("add.u32 %r1, %r1001, 1; st.global.b32 [%d100], %r1;", LANES, threads=32)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_lane_writes_what_another_read_before_it(lanes):
    """One lane alone, and lanes side by side that have a word each."""
    pick = f"div.u32 %r9, %r1001, {lanes}; setp.eq.u32 %p1, %r9, 2; setp.eq.u32 %p2, %r9, 4;"
    reads = "@%p1 ld.shared.b32 %r4, [%r8]; SYNC @%p2 ld.shared.b32 %r4, [%r8]; @%p2 st.shared.b32 [%r8], 7;"
    needs_sync(PLACES.replace("WORDS", str(lanes - 1)) + pick + reads, threads=32)


def test_a_lane_makes_a_barrier_anew_that_all_have_waited_for():
    body = f"{INIT} {ELECT} @%p2 mbarrier.arrive.shared.b64 %d1, [smem+512]; {WAIT} SYNC @!%p2 bra OVER;"
    needs_sync(body + "mbarrier.inval.shared.b64 [smem+512]; mbarrier.init.shared.b64 [smem+512], 1; OVER:", threads=32)


SECOND_WARP = "setp.ge.u32 %p1, %r1000, 32; @%p1 bra SECOND;"


def test_one_lane_arrives_for_all():
    body = f"{INIT} {SLOT} {SECOND_WARP} st.shared.b32 [%r3], 1; SYNC {ELECT}"
    body += f"@%p2 mbarrier.arrive.shared.b64 %d1, [smem+512]; ret; SECOND: {WAIT} ld.shared.b32 %r4, [smem+64];"
    needs_sync(body, "are not ordered")


def test_one_lane_waits_for_all():
    all_arrive = INIT.replace("[smem+512], 1;", "[smem+512], 32;")
    body = f"{all_arrive} {SLOT} {SECOND_WARP} st.shared.b32 [%r3], 1; mbarrier.arrive.shared.b64 %d1, [smem+512]; ret;"
    body += f"SECOND: {ELECT} @!%p2 bra OVER; {WAIT} OVER: SYNC ld.shared.b32 %r4, [%r3];"
    needs_sync(body, "are not ordered")


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_one_lane_stores_what_all_wrote_and_fenced(mode):
    body = f"{SLOT} st.shared.b32 [%r3], 1; fence.proxy.async.shared::cta; SYNC {ELECT} @!%p2 bra OVER;"
    body += "cp.async.bulk.global.shared::cta.bulk_group [%d100], [smem], 128; cp.async.bulk.commit_group;"
    body += "cp.async.bulk.wait_group 0; OVER:"
    needs_sync(body, "are not ordered", threads=32, arguments=(np.zeros(64, np.uint32),), async_mode=mode)


def test_what_lanes_did_before_they_met_stays_known():
    """A lane that acts alone again still knows what it heard alone."""
    body = f"{INIT} {SLOT} {SECOND_WARP} st.shared.b32 [%r3], 1; {SYNC} {ELECT}"
    body += f"@%p2 mbarrier.arrive.shared.b64 %d1, [smem+512]; ret; SECOND: {ELECT} @!%p2 bra OVER; {WAIT} OVER:"
    clean(body + f"{SYNC} {ELECT} @%p2 ld.shared.b32 %r4, [smem+64];")


def test_lanes_in_step_know_what_each_does():
    body = f"{SLOT} {NEIGHBOUR} st.shared.b32 [%r3], 1; ld.shared.b32 %r4, [%r6];"
    races(body, LANES, threads=32)
    clean(body, threads=32, lockstep=True)
    alone = f"{INIT} {SLOT} {SECOND_WARP} st.shared.b32 [%r3], 1; {ELECT}"
    alone += f"@%p2 mbarrier.arrive.shared.b64 %d1, [smem+512]; ret; SECOND: {WAIT} ld.shared.b32 %r4, [%r3];"
    races(alone, "are not ordered")
    clean(alone, lockstep=True)
    races(alone.replace(WAIT, ""), "are not ordered", lockstep=True)
