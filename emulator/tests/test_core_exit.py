"""A CTA ends when nothing can reach its memory any more: offenders, and the same kernels put right."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import FILL, aligned, run
from test_core_races import INIT
from test_core_wgmma import SYNC, product
from tsmla_emulator.run.machine import EmulationError

CLUSTER_BARRIER = "barrier.cluster.arrive; barrier.cluster.wait;"
WAIT = "{{ .reg .pred P; {0}: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra {0}; }}"
MODES = pytest.mark.parametrize("mode", ["eager", "random", "late"])


EARLY = "ends, and nothing says|has ended without"


def ends_early(body: str, *arguments: np.ndarray, match: str = EARLY, **options) -> str:
    with pytest.raises(EmulationError, match=match) as caught:
        ends(body, *arguments, **options)
    assert caught.value.kind == "exit"
    return str(caught.value)


def ends(body: str, *arguments: np.ndarray, **options) -> None:
    given = {"threads": 32, "shared": 8192, "happens_before": True, "poison": False, **options}
    run(body, *(arguments or (aligned(np.zeros(256, np.uint32)),)), **given)


def load(wait: str) -> str:
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%d100], 256, [smem+512];"
    return (
        INIT
        + f"""
    setp.ne.u32 %p1, %r1000, 0; @%p1 bra OVER;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+512], 256;
    {copy}
    OVER: {wait}
    """
    )


@MODES
def test_a_load_is_waited_for(mode):
    ends(load(WAIT.format("A")), async_mode=mode)
    ends_early(load(""), async_mode=mode)


def test_a_load_is_waited_for_by_any_warp_of_the_cta():
    wait = "setp.lt.u32 %p2, %r1000, 32; @%p2 bra DONE;" + WAIT.format("A") + "DONE:"
    ends(load(wait), threads=64)


def test_without_the_race_check_late_work_on_a_ended_cta_is_seen():
    ends_early(load(""), match="of CTA 0, which has ended", happens_before=False, async_mode="late")


def peers(access: str, end: str) -> str:
    """Two CTAs; rank 0 does something to rank 1's memory, whose address is in %r5."""
    return (
        INIT
        + f"""
    mov.u32 %r1, %cluster_ctarank; st.shared.b32 [smem], %r1;
    {CLUSTER_BARRIER}
    mov.b32 %r4, smem; mapa.shared::cluster.u32 %r5, %r4, 1;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra OVER;
    {access}
    OVER: {end}
    """
    )


@MODES
@pytest.mark.parametrize(
    "access",
    [
        "ld.shared::cluster.b32 %r6, [%r5];",
        "st.shared::cluster.b32 [%r5+64], %r5;",
        "setp.eq.u32 %p2, %r1000, 0; @%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5+512];",
    ],
    ids=["load", "store", "arrival"],
)
def test_a_peers_access_is_over(access, mode):
    ends(peers(access, CLUSTER_BARRIER), grid=2, cluster=2, async_mode=mode)
    assert "CTA 1" in ends_early(peers(access, ""), grid=2, cluster=2, async_mode=mode)


@MODES
def test_a_peers_bulk_copy_is_over(mode):
    """Into the memory of rank 1, which waits for its bytes or does not."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+64], [%d100], 64, [%r5+512];"
    expect = "setp.ne.u32 %p3, %r1000, 0; @!%p3 mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+512], 64;"
    body = peers(f"setp.eq.u32 %p2, %r1000, 0; @%p2 {copy} ret;", "").replace(
        CLUSTER_BARRIER, expect + CLUSTER_BARRIER, 1
    )
    both = {"grid": 2, "cluster": 2, "async_mode": mode}
    ends(body + WAIT.format("A"), **both)
    ends_early(body, **both)


def test_a_peers_arrival_is_over_when_somebody_waits_for_it():
    arrival = "setp.eq.u32 %p2, %r1000, 0; @%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5+512]; ret;"
    ends(peers(arrival, WAIT.format("A")), grid=2, cluster=2)


@pytest.mark.parametrize("mode", ["random", "late"])
@pytest.mark.parametrize("tail", ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"])
def test_products_that_read_shared_memory_are_over(tail, mode):
    product(16, "bf16", "bf16", tail=tail, after=SYNC, async_mode=mode)
    with pytest.raises(EmulationError, match="wgmma .* has ended without waiting"):
        product(16, "bf16", "bf16", tail=tail, async_mode=mode)


def commits(waits: int) -> str:
    """One tcgen05.mma and two commits of it, the second as redundant as in the prefill that once shipped."""
    wait = "".join(WAIT.format(f"W{i}").replace("smem+512", f"smem+{512 + 65536 + 8 * i}") for i in range(waits))
    init = "".join(f"mbarrier.init.shared.b64 [smem+{512 + 65536 + 8 * i}], 1;" for i in range(2))
    return (
        FILL
        + f"""
    setp.ge.u32 %p3, %r1000, 32;
    @%p3 bra LATER;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+66560], 32;
    elect.sync %r4|%p2, -1;
    @!%p2 bra SET;
    {init}
    fence.mbarrier_init.release.cluster;
    SET: bar.warp.sync -1;
    LATER: bar.sync 0;
    ld.shared.b32 %r20, [smem+66560];
    @%p3 bra DONE;
    @!%p2 bra ISSUED;
    mov.b64 %d10, 0x4000404000010040; mov.b64 %d11, 0x4000404000010040; setp.ne.b32 %p4, 0, 0;
    mov.b32 %r21, 0x8040490;
    tcgen05.mma.cta_group::1.kind::f16 [%r20], %d10, %d11, %r21, %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+66048];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+66056];
    ISSUED: bar.warp.sync -1;
    {wait}
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
    DONE:
    """
    )


@MODES
def test_every_commit_is_waited_for(mode):
    given = {"threads": 128, "shared": 67584, "arch": "sm_100a", "async_mode": mode}
    image = aligned(np.zeros(0x10000, np.uint8))
    ends(commits(2), image, **given)
    ends_early(commits(1), image, **given)
