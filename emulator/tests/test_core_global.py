"""Global memory: who writes it, who reads it, and what orders them within a CTA and between CTAs."""

from __future__ import annotations

import numpy as np
import pytest
from test_core_races import INIT, clean, races
from tsmla_emulator.run.host.memory import POISON

MINE = "mad.wide.u32 %d1, %r1000, 4, %d100;"
OTHERS = "xor.b32 %r6, %r1000, {}; mad.wide.u32 %d2, %r6, 4, %d100;"
WRITE, READ = "st.global.b32 [%d1], %r1000;", "ld.global.b32 %r4, [%d2];"


@pytest.mark.parametrize("other, threads, sync", [(32, 64, "bar.sync 0;"), (4, 32, "bar.warp.sync -1;")])
@pytest.mark.parametrize("first, second", [(WRITE, READ), (READ, WRITE), (WRITE, WRITE.replace("%d1", "%d2"))])
def test_warps_and_lanes_of_a_cta(other, threads, sync, first, second):
    body = MINE + OTHERS.format(other) + first
    clean(body + sync + second, threads=threads)
    assert "global memory, byte" in races(body + second, "of region 'argument 0'.*not ordered", threads=threads)


def test_writing_what_is_there_changes_nothing():
    clean("st.global.b32 [%d100], 5;", threads=64)
    races("st.global.b32 [%d100], %r1000;", "not ordered", threads=64)
    races("st.global.b32 [%d100], 5; ld.global.b32 %r4, [%d100];", "not ordered", threads=64)


def test_tensors_that_nobody_may_write_are_not_followed():
    clean(MINE + OTHERS.format(4) + READ + READ.replace("%d2", "%d1"), threads=64, readonly=(0,))


CTA = "mov.u32 %r10, %ctaid.x;"


def test_ctas_write_bytes_of_their_own():
    own = CTA + "mad.wide.u32 %d1, %r10, 4, %d100; setp.ne.u32 %p1, %r1000, 0; @!%p1 st.global.b32 [%d1], 1;"
    clean(own, threads=32, grid=8)
    shared = own.replace("%d1, %r10", "%d1, 3")
    clean(shared, threads=32, grid=8)  # all write the same
    said = "write by cluster 0 at PTX line .* write by cluster 1"
    races(shared.replace("[%d1], 1", "[%d1], %r10"), said, threads=32, grid=8)


@pytest.mark.parametrize("workers", [1, 4])
def test_no_cta_reads_what_another_writes(workers):
    body = CTA + "setp.ne.u32 %p1, %r10, {}; @!%p1 st.global.b32 [%d100], 1; @%p1 ld.global.b32 %r4, [%d100];"
    said = "byte 0 of region 'argument 0'.* of the same launch"
    for first in (0, 3):
        races(body.format(first), said, threads=32, grid=4, workers=workers)


LOAD = """fence.proxy.async.SPACE; setp.ne.u32 %p1, %r1000, 0; @%p1 bra OVER;
mbarrier.arrive.expect_tx.shared.b64 %d5, [smem+512], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%d100], 64, [smem+512];
OVER: { .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }"""


def test_a_bulk_load_of_what_was_stored_needs_a_fence_of_global_memory():
    body = INIT + MINE + WRITE + "SYNC" + LOAD
    for space in ("global", None):
        fenced = body.replace(".SPACE", f".{space}" if space else "").replace("SYNC", "bar.sync 0;")
        clean(fenced.replace("fence.proxy.async", "bar.sync 0; fence.proxy.async", 1))
    races(body.replace("SPACE", "shared::cta").replace("SYNC", "bar.sync 0;"), "without a fence.proxy.async between")


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_a_bulk_store_is_there_after_a_wait_for_its_writes(mode):
    body = """setp.ne.u32 %p1, %r1000, 0; @%p1 ret; st.shared.b64 [smem], %d100; st.shared.b64 [smem+8], %d100;
    fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%d100], [smem], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_groupREAD 0; ld.global.b32 %r4, [%d100];
    cp.async.bulk.wait_group 0;"""
    clean(body.replace("READ", ""), threads=32, async_mode=mode)
    races(body.replace("READ", ".read"), "not ordered", threads=32, async_mode=mode)


def test_words_of_tensors_that_nobody_wrote_are_not_numbers():
    """The host allocates such words: a sum over too many of a workspace's words shows it."""
    first = "setp.ne.u32 %p1, %r1000, 0; @!%p1 st.global.f32 [%d100], 0f3F800000; bar.warp.sync -1;"
    body = first + "ld.global.f32 %r4, [%d100]; ld.global.f32 %r5, [%d100+{}]; add.f32 %r4, %r4, %r5;"
    body += "st.global.f32 [%d101], %r4;"
    for offset, finite in ((0, True), (4, False)):
        workspace, out = np.full(16, POISON, np.uint8).view(np.float32), np.zeros(1, np.float32)
        clean(body.format(offset), arguments=(workspace, out), threads=1)
        assert np.isfinite(out[0]) == finite


SPIN = """mov.u32 %r10, %ctaid.x; setp.ne.u32 %p1, %r1000, 0; @%p1 bra OVER; setp.ne.u32 %p2, %r10, 0; @%p2 bra SETS;
AGAIN: ld.acquire.gpu.global.b32 %r11, [%d100]; setp.eq.u32 %p3, %r11, 0; @%p3 bra AGAIN;
ld.global.b32 %r12, [%d100+64]; st.global.b32 [%d100+128], %r12; bra OVER;
SETS: st.global.b32 [%d100+64], 7; fence.acq_rel.gpu; st.release.gpu.global.b32 [%d100], 1; OVER:"""


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_ctas_may_wait_for_each_other(mode, cluster):
    out = np.zeros(64, np.uint32)
    clean(SPIN, arguments=(out,), grid=2, cluster=cluster, async_mode=mode, happens=False)
    assert out[32] == 7


def test_a_warp_that_spins_does_not_hold_up_the_copy_that_it_waits_for():
    """There are two warps: one waits for a copy and then sets the flag that the other spins on."""
    body = (
        INIT
        + """setp.ge.u32 %p1, %r1000, 32; @%p1 bra SPINS; elect.sync %r5|%p2, -1; @!%p2 bra OVER;
    mbarrier.arrive.expect_tx.shared.b64 %d5, [smem+512], 64;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%d101], 64, [smem+512];
    { .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }
    st.release.gpu.global.b32 [%d100], 1; OVER: ret;
    SPINS: ld.acquire.gpu.global.b32 %r11, [%d100]; setp.eq.u32 %p3, %r11, 0; @%p3 bra SPINS;"""
    )
    arrays = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    clean(body, arguments=arrays, async_mode="late", happens=False)
    assert arrays[0][0] == 1
