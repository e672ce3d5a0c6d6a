"""Each check on the smallest kernel that offends it, and on the same kernel put right."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from small_kernels import run
from tsmla_emulator.run.machine import EmulationError

SLOT = "shl.b32 %r1, %r1001, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1;"
HANDOVER = (
    SLOT
    + """
setp.ge.u32 %p1, %r1000, 32;
@%p1 bra SECOND;
st.shared.b32 [%r3], %r1001;
FIRST_SYNC
ret;
SECOND:
SECOND_SYNC
ld.shared.b32 %r4, [%r3];
"""
)
INIT = (
    "setp.ne.u32 %p30, %r1000, 0; @%p30 bra READY; mbarrier.init.shared.b64 [smem+512], 1;"
    "fence.mbarrier_init.release.cluster; READY: bar.sync 0;"
)


def races(body: str, match: str, threads: int = 64, **options) -> str:
    with pytest.raises(EmulationError, match=match) as caught:
        clean(body, threads, **options)
    assert caught.value.kind == "race"
    return str(caught.value)


def clean(body: str, threads: int = 64, **options) -> None:
    arguments = options.pop("arguments", (np.zeros(256, np.uint32),))
    checks = options.pop("happens", True)
    run(body, *arguments, threads=threads, shared=8192, happens_before=checks, **{"poison": False, **options})


def test_a_write_and_a_read_need_a_barrier_between():
    text = races(HANDOVER.replace("FIRST_SYNC", "").replace("SECOND_SYNC", ""), "shared memory offset 0x4.. of CTA 0")
    assert "write by CTA 0 warp 0 at PTX line" in text and "read by CTA 0 warp 1 at PTX line" in text
    assert text.splitlines()[0].endswith("are not ordered")
    clean(HANDOVER.replace("FIRST_SYNC", "bar.arrive 1, 64;").replace("SECOND_SYNC", "bar.sync 1, 64;"))


TWICE = """
setp.ge.u32 %p1, %r1000, 32;
mov.b32 %r5, 0;
AGAIN:
@!%p1 st.shared.b32 [smem+64], %r5;
@%p1 ld.shared.b32 %r4, [smem+64];
@!%p1 st.shared.b32 [smem+128], %r5;
@%p1 ld.shared.b32 %r4, [smem+128];
add.u32 %r5, %r5, 1;
setp.lt.u32 %p2, %r5, 3;
@%p2 bra AGAIN;
"""


def test_findings_are_reported_together_and_each_pair_of_instructions_once():
    text = races(TWICE, "offset 0x440 of CTA 0")
    assert "offset 0x480 of CTA 0" in text
    lines = text.splitlines()
    together = [lines[0], *itertools.takewhile(lambda line: line.startswith("  and "), lines[1:])]
    pairs = [tuple(re.findall(r"at PTX line (\d+)", line)) for line in together]
    assert len(set(pairs)) == len(pairs) >= 4
    assert f"warp {re.search(r'warp (.) at PTX', lines[0])[1]}" in text
    one = races(TWICE, "offset 0x440 of CTA 0", findings=1)
    assert "\n  and " not in one and one.splitlines()[0] == lines[0]
    assert races(TWICE, "offset 0x440", findings=2).count("\n  and ") == 1


PARTS = """
mov.u32 %r6, %ctaid.x; setp.ge.u32 %p1, %r1000, 32; mov.b32 %r5, 0;
setp.eq.u32 %p2, %r6, 1; setp.eq.u32 %p3, %r6, 2; @%p2 bra SECOND; @%p3 bra OVER;
@!%p1 st.shared.b32 [smem+64], %r5; @%p1 ld.shared.b32 %r4, [smem+64]; bra OVER;
SECOND: @!%p1 st.shared.b32 [smem+128], %r5; @%p1 ld.shared.b32 %r4, [smem+128];
OVER:
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_every_cluster_is_judged(workers):
    """Clusters after one with findings run, too; the same pair of instructions is reported once."""
    with pytest.raises(EmulationError) as caught:
        clean(PARTS, grid=6, workers=workers)
    assert len(caught.value.findings) == 2
    assert {finding.text[:30] for finding in caught.value.findings} == {
        "shared memory offset 0x440 of ",
        "shared memory offset 0x480 of ",
    }
    assert str(caught.value).count("\n  and shared memory") == 1
    assert races(PARTS, "shared memory", grid=6, workers=workers, findings=1).count("shared memory") == 1


def test_a_finding_hides_no_other_at_the_same_place():
    """Three warps, unordered: the last write conflicts with the first one, and with the read between."""
    body = """
    shr.u32 %r20, %r1000, 5; setp.eq.u32 %p1, %r20, 0; setp.eq.u32 %p2, %r20, 1; setp.eq.u32 %p3, %r20, 2;
    @%p1 st.shared.b32 [smem+64], %r20;
    @%p2 ld.shared.b32 %r4, [smem+64];
    @%p3 st.shared.b32 [smem+64], %r20;
    """
    with pytest.raises(EmulationError) as caught:
        clean(body, threads=96, lockstep=True)
    pairs = {tuple(instruction.line for instruction in finding.instructions) for finding in caught.value.findings}
    first = min(line for pair in pairs for line in pair)
    assert {tuple(sorted(pair)) for pair in pairs} == {(first, first + 1), (first, first + 2), (first + 1, first + 2)}


def test_findings_name_their_instructions():
    with pytest.raises(EmulationError) as caught:
        clean(TWICE + "@%p1 bra END; bar.sync 2, 64; END:")
    *found, last = caught.value.findings
    opcodes = [[instruction.opcode for instruction in finding.instructions] for finding in found]
    assert opcodes and all(
        len(both) == 2 and "st.shared.b32" in both and set(both) <= {"st.shared.b32", "ld.shared.b32"}
        for both in opcodes
    )
    assert {finding.kind for finding in found} == {"race"} and last.kind == "deadlock"
    with pytest.raises(EmulationError) as caught:
        clean("mov.b32 %r5, 3; ld.shared.b32 %r4, [%r5];")
    (only,) = caught.value.findings
    assert only.kind == "memory" and [instruction.opcode for instruction in only.instructions] == ["ld.shared.b32"]


def test_what_was_found_before_a_failure_is_reported_before_it():
    text = races(TWICE + "@%p1 bra END; bar.sync 2, 64; END:", "offset 0x440 of CTA 0")
    assert "\n  and then, deadlock: " in text


def test_a_finding_is_where_it_was_found_not_where_the_run_ended():
    body = HANDOVER.replace("FIRST_SYNC", "").replace("SECOND_SYNC", "") + "mov.b32 %r9, 1; add.u32 %r9, %r9, 1;"
    text = races(body, "shared memory")
    assert re.search(r"\n  CTA \(0, 0, 0\) warp 1, PTX line \d+.*: ld.shared.b32", text)


def test_one_way_barriers_order_one_way_only():
    body = HANDOVER.replace("FIRST_SYNC", "bar.arrive 1, 64; st.shared.b32 [%r3], 5;").replace(
        "SECOND_SYNC", "bar.sync 1, 64;"
    )
    races(body, "are not ordered")
    races(body, "are not ordered", starve=(0,))


def test_neighbouring_words_are_no_conflict():
    body = "mov.b32 %r2, smem; shr.u32 %r1, %r1000, 5; shl.b32 %r1, %r1, 2; add.s32 %r3, %r2, %r1;"
    body += "st.shared.b32 [%r3], %r1;"
    clean(body)


def test_a_read_before_the_slots_next_write_is_ordered_by_an_arrival():
    """Two rounds through one slot: the second write must know that the first was read."""
    wait = "{{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }}".format()
    body = (
        INIT
        + SLOT
        + """
    setp.ge.u32 %p1, %r1000, 32;
    @%p1 bra SECOND;
    st.shared.b32 [%r3], 1;
    bar.arrive 1, 64;
    WAIT
    st.shared.b32 [%r3], 2;
    ret;
SECOND:
    bar.sync 1, 64;
    ld.shared.b32 %r4, [%r3];
    bar.warp.sync -1;
    elect.sync %r5|%p2, -1;
    @%p2 mbarrier.arrive.shared.b64 %d1, [smem+512];
    """
    )
    clean(body.replace("WAIT", wait))
    races(body.replace("WAIT", ""), "are not ordered")


def apart(first: str, second: str) -> str:
    """What one warp does and what another does, with nothing that orders the two."""
    start = "setp.eq.u32 %p4, %r1000, 0; @%p4 st.shared.b32 [smem+64], 0; bar.sync 0;"
    return f"{start} setp.ge.u32 %p1, %r1000, 32; @%p1 bra SECOND; {first} bra OVER; SECOND: {second} OVER:"


@pytest.mark.parametrize("atomic", ["atom.shared.add.u32 %r5, [smem+64], 1;", "red.shared.or.b32 [smem+64], 1;"])
@pytest.mark.parametrize("lane", ["setp.eq.u32 %p2, %r1001, 3; @%p2 ", ""], ids=["a lane", "a warp"])
def test_atomics_of_shared_memory_race_with_plain_accesses(atomic, lane):
    store, load, atomic = (
        lane + access for access in ("st.shared.b32 [smem+64], 1;", "ld.shared.b32 %r4, [smem+64];", atomic)
    )
    clean(apart(atomic, atomic))
    for plain in (store, load):
        for first, second in ((atomic, plain), (plain, atomic)):
            text = races(apart(first, second), "shared memory offset 0x440 of CTA 0")
            assert f"write by CTA 0 warp {int(second is atomic)} at PTX line" in text
    meet = "bar.sync 1, 64;"
    clean(apart(f"{atomic} {meet}", f"{meet} {load}"))
    clean(apart(f"{load} {meet}", f"{meet} {atomic}"))
    clean(apart("ld.volatile.shared.b32 %r4, [smem+64];", atomic))
    races(apart("ld.volatile.shared.b32 %r4, [smem+64];", store), "shared memory offset 0x440")


def test_an_atomic_hides_no_access_that_another_atomic_races_with():
    """A warp's own plain accesses before its atomic, and another's atomic before one that something orders."""
    atomic, meet = "red.shared.add.u32 [smem+64], 1;", "bar.sync 1, 64;"
    for plain in ("st.shared.b32 [smem+64], 1;", "ld.shared.b32 %r4, [smem+64];"):
        first = f"{plain} bar.warp.sync -1; {atomic}"
        races(apart(first, atomic), "shared memory offset 0x440")
        clean(apart(f"{first} {meet}", f"{meet} {atomic}"))
    for starve in ((), (0,), (1,)):
        races(apart(atomic, f"{atomic} bar.warp.sync -1; ld.shared.b32 %r4, [smem+64];"), "0x440", starve=starve)
    again = f"mov.b32 %r9, 0; AGAIN: {atomic} add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 9; @%p3 bra AGAIN;"
    clean(apart(f"{again} {meet}", f"{meet} ld.shared.b32 %r4, [smem+64];"))


def test_a_barrier_ends_when_nobody_uses_it_any_more():
    ends = "setp.eq.u32 %p2, %r1001, 0; @%p2 mbarrier.inval.shared.b64 [smem+512];"
    uses = "setp.eq.u32 %p2, %r1001, 0; @%p2 mbarrier.arrive.shared.b64 %d1, [smem+512];"
    uses += "bar.arrive 1, 64;"
    body = INIT + "setp.ge.u32 %p1, %r1000, 32; @%p1 bra SECOND; {} bra OVER; SECOND: {} OVER:"
    clean(body.format(uses, f"bar.sync 1, 64; {ends}"))
    races(body.format(uses, f"{ends} bar.sync 1, 64;"), "shared memory offset 0x600 of CTA 0", starve=(1,))
    races(body.format(ends, "bar.arrive 1, 64; ld.shared.b32 %r4, [smem+512];"), "shared memory offset 0x600 of CTA 0")


ARRIVES = "bar.warp.sync -1; elect.sync %r5|%p2, -1; BEFORE @%p2 mbarrier.arrive.{} %d1, [smem+512];"
WAITS = "{{{{ .reg .pred P; A: mbarrier.try_wait.parity.{} P, [smem+512], 0; @!P bra A; }}}} AFTER"


@pytest.mark.parametrize("fence", ["fence.acq_rel.cta;", "fence.sc.cta;", "membar.cta;"])
@pytest.mark.parametrize(
    ("arrives", "waits", "before", "after"),
    [
        ("shared.b64", "shared.b64", 0, 0),
        ("release.cta.shared::cta.b64", "acquire.cta.shared::cta.b64", 0, 0),
        ("relaxed.cta.shared::cta.b64", "shared.b64", 1, 0),
        ("shared.b64", "relaxed.cta.shared::cta.b64", 0, 1),
        ("relaxed.cta.shared::cta.b64", "relaxed.cta.shared::cta.b64", 1, 1),
    ],
)
def test_relaxed_arrivals_and_waits_order_with_a_fence_only(arrives, waits, before, after, fence):
    def body(fenced_before: int, fenced_after: int) -> str:
        first = ARRIVES.format(arrives).replace("BEFORE", fence * fenced_before)
        second = WAITS.format(waits).replace("AFTER", fence * fenced_after).replace("{{", "{").replace("}}", "}")
        return INIT + HANDOVER.replace("FIRST_SYNC", first).replace("SECOND_SYNC", second)

    clean(body(before, after))
    for less in {(before, 0), (0, after)} - {(before, after)}:
        races(body(*less), "are not ordered")


def store_kernel(fence: str, barrier: str, wait: str) -> str:
    """Two warps fill 256 bytes, one thread stores them with a bulk copy and uses the slot again."""
    return f"""
    shl.b32 %r1, %r1000, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1;
    st.shared.b32 [%r3], %r1000;
    {fence}
    {barrier}
    setp.ge.u32 %p1, %r1000, 32;
    @%p1 ret;
    elect.sync %r4|%p2, -1;
    @!%p2 bra OVER;
    cp.async.bulk.global.shared::cta.bulk_group [%d100], [smem], 256;
    cp.async.bulk.commit_group;
    {wait}
OVER:
    bar.warp.sync -1;
    st.shared.b32 [%r3], 9;
    """


FENCE, BARRIER, BULK_WAIT = "fence.proxy.async.shared::cta;", "bar.sync 0;", "cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
def test_bulk_stores(mode):
    out = np.zeros(64, np.uint32)
    clean(store_kernel(FENCE, BARRIER, BULK_WAIT), arguments=(out,), async_mode=mode)
    np.testing.assert_array_equal(out, np.arange(64))
    races(
        store_kernel("", BARRIER, BULK_WAIT), "ordered, but without a fence.proxy.async between them", async_mode=mode
    )
    races(store_kernel(FENCE, "", BULK_WAIT), "are not ordered", async_mode=mode)
    races(store_kernel(FENCE, BARRIER, ""), "not ordered|exits while its bulk stores may still read", async_mode=mode)


def test_a_fence_of_global_memory_fences_no_shared_memory():
    out = np.zeros(64, np.uint32)
    for space in ("", ".shared::cta", ".shared::cluster"):
        clean(store_kernel(f"fence.proxy.async{space};", BARRIER, BULK_WAIT), arguments=(out,))
    kernel = store_kernel("fence.proxy.async.global;", BARRIER, BULK_WAIT)
    races(kernel, "without a fence.proxy.async between them", arguments=(out,))


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_a_proxy_fence_counts_on_either_side_of_a_barrier(mode):
    """PTX asks for one along the way and does not say by whom; one before the write is not on the way."""
    out = np.zeros(64, np.uint32)
    for fence, barrier in ((FENCE, BARRIER), ("", BARRIER + FENCE)):
        clean(store_kernel(fence, barrier, BULK_WAIT), arguments=(out,), async_mode=mode)
    early = FENCE + store_kernel("", BARRIER, BULK_WAIT)
    races(early, "without a fence.proxy.async between them", arguments=(out,), async_mode=mode)


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_groups_of_bulk_stores_are_a_threads_own(mode):
    """Another lane than the one that stores commits or waits."""
    for instruction in ("cp.async.bulk.commit_group;", BULK_WAIT):
        moved = f"OVER: setp.eq.u32 %p3, %r1001, 1; @%p3 {instruction}"
        kernel = store_kernel(FENCE, BARRIER, BULK_WAIT).replace(instruction, "").replace("OVER:", moved)
        out = np.zeros(64, np.uint32)
        races(kernel, "not ordered|exits while its bulk stores may still read", arguments=(out,), async_mode=mode)


def test_late_stores_read_late():
    """Without the happens-before check the wrong value itself shows."""
    out = np.zeros(64, np.uint32)
    kernel = store_kernel(FENCE, BARRIER, "") + f"@!%p2 bra END; {BULK_WAIT} END:"
    run(kernel, out, threads=64, shared=8192, async_mode="late")
    assert (out[:32] == 9).all() and (out[32:] == np.arange(32, 64)).all()


def load_kernel(wait: str) -> str:
    return (
        INIT
        + f"""
    setp.ne.u32 %p1, %r1000, 0;
    @%p1 bra WAITING;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+512], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%d100], 256, [smem+512];
WAITING:
    {wait}
    shl.b32 %r1, %r1000, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1;
    ld.shared.b32 %r4, [%r3];
    add.s32 %r4, %r4, 1;
    mad.wide.u32 %d2, %r1000, 4, %d101;
    st.global.b32 [%d2], %r4;
    """
    )


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
def test_bulk_loads(mode):
    wait = "{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }"
    arrays = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    clean(load_kernel(wait), arguments=arrays, async_mode=mode)
    np.testing.assert_array_equal(arrays[1], arrays[0] + 1)
    races(
        load_kernel("") + wait,
        "asynchronous operation that CTA 0 warp 0 issued at PTX line",
        arguments=arrays,
        async_mode=mode,
    )


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_engines_know_of_a_barrier_after_its_fence(mode):
    body = load_kernel("{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }")
    arrays = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    for fence in ("fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;"):
        clean(body.replace("fence.mbarrier_init.release.cluster;", fence), arguments=arrays, async_mode=mode)
    said = "complete_tx on the mbarrier at shared offset 0x600, which warp 0 initialised without a fence.mbarrier_init"
    races(body.replace("fence.mbarrier_init.release.cluster;", ""), said, arguments=arrays, async_mode=mode)


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_nothing_is_written_where_a_load_may_still_write(mode):
    """A prefill once wrote zeros for tiles without keys, whose loads it did not wait for."""
    wait = "{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }"
    body, zeros = load_kernel("WAITS").replace("ld.shared.b32 %r4, [%r3];", "ZEROS"), "st.shared.b32 [%r3], 0;"
    arrays = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    clean(body.replace("WAITS", wait).replace("ZEROS", zeros), arguments=arrays, async_mode=mode)
    late = body.replace("WAITS", "").replace("ZEROS", zeros + wait)
    races(late, "are not ordered", arguments=arrays, async_mode=mode)


def test_late_loads_leave_poison_to_those_who_do_not_wait():
    arrays = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    with pytest.raises(EmulationError, match="reads shared memory that nobody wrote"):
        run(load_kernel(""), *arrays, threads=64, shared=8192, async_mode="late")


def test_barriers_are_used_after_everybody_knows_their_initialisation():
    races(
        INIT.replace("bar.sync 0;", "") + "mbarrier.arrive.shared.b64 %d1, [smem+512];",
        "shared memory offset 0x600",
        threads=64,
        starve=(1,),
    )


def test_global_memory_before_the_grid_wait():
    races("ld.global.b32 %r1, [%d100]; griddepcontrol.wait;", "not ordered after griddepcontrol.wait", pdl=True)
    clean("griddepcontrol.wait; ld.global.b32 %r1, [%d100];", pdl=True)
    clean("ld.global.b32 %r1, [%d100];", pdl=False)


def test_seeds_repeat_a_run():
    body = "atom.global.add.u32 %r1, [%d100], 1; mad.wide.u32 %d1, %r1000, 4, %d100; st.global.b32 [%d1+4], %r1;"

    def order(seed: int) -> list[int]:
        out = np.zeros(1025, np.uint32)
        run(body, out, threads=1024, async_mode="random", quantum=0, seed=seed)
        return out.tolist()

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_threads_over_clusters_change_nothing():
    body = "mov.u32 %r1, %ctaid.x; mad.wide.u32 %d1, %r1, 4, %d100; st.global.b32 [%d1], %r1;"
    out = np.zeros(64, np.uint32)
    run(body, out, grid=64, cluster=2, threads=32)
    again = np.zeros(64, np.uint32)
    report = run(body, again, grid=64, cluster=2, threads=32, workers=4)
    np.testing.assert_array_equal(out, again)
    assert report.warp_instructions == 64 * 7


def test_errors_name_the_roles_that_setmaxnreg_makes():
    body = """
setp.ge.u32 %p1, %r1000, 32;
@%p1 bra SECOND;
setmaxnreg.dec.sync.aligned.u32 24;
ret;
SECOND:
setmaxnreg.dec.sync.aligned.u32 40;
mov.b32 %r2, smem;
ld.shared.b32 %r4, [%r2+1000000];
"""
    with pytest.raises(EmulationError, match="(?s)roles: warps 0 of 24 registers from .*, warps 1 of 40 .*warp 1,"):
        clean(body)
