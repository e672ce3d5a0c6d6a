"""A cluster that takes over the work of others: clusterlaunchcontrol.try_cancel and query_cancel."""

from __future__ import annotations

import numpy as np
import pytest
from sass_kernels import run_lines
from small_kernels import aligned, run
from tsmla_emulator.run.machine import EmulationError
from tsmla_emulator.run.ptx.model import PtxError

CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [smem+64], [smem+128];"
ALL = ".multicast::cluster::all"
WAIT = "{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+128], %r9; @!P bra A; }"
FENCE = "fence.proxy.async.shared::cta;"


WORDS = """
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [smem+64];
    and.b32 %r12, %r12, 1; setp.ne.u32 %p2, %r12, 0;
"""
QUERY = "clusterlaunchcontrol.query_cancel."
QUERIES = f"""
    {{ .reg .b128 handle; ld.shared.v2.b64 {{%d10, %d11}}, [smem+64]; mov.b128 handle, {{%d10, %d11}};
    {QUERY}is_canceled.pred.b128 %p2, handle; {QUERY}get_first_ctaid::x.b32.b128 %r10, handle;
    {QUERY}get_first_ctaid::y.b32.b128 %r11, handle; {QUERY}get_first_ctaid::z.b32.b128 %r13, handle; }}
    add.u32 %r11, %r11, %r13;
"""


def worker(cancel: str = CANCEL.format(""), wait: str = WAIT, fence: str = FENCE, read: str = WORDS) -> str:
    """Adds 1 to out[ctaid.y][ctaid.x] for itself, and then for each cluster that it takes over; its rank is added."""
    return f"""
    setp.ne.u32 %p1, %r1000, 0;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r7, %nctaid.x; mov.u32 %r8, %cluster_ctarank;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [smem+128], 1; fence.mbarrier_init.release.cluster;
    READY: bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
    mov.b32 %r9, 0;
    WORK:
    @%p1 bra DONE;
    mad.lo.u32 %r3, %r2, %r7, %r1; mad.wide.u32 %d1, %r3, 4, %d100;
    ld.global.b32 %r4, [%d1]; add.u32 %r4, %r4, 1; st.global.b32 [%d1], %r4;
    mbarrier.arrive.expect_tx.shared.b64 %d2, [smem+128], 16;
    DONE: barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 bra ASKED;
    {cancel}
    ASKED: {wait}
    {read}
    {fence}
    bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
    add.u32 %r1, %r10, %r8; mov.b32 %r2, %r11; xor.b32 %r9, %r9, 1;
    @%p2 bra WORK;
    """


ONE = "setp.ne.u32 %p3, %r8, 0; @%p3 bra ASKED; " + CANCEL.format(ALL)


@pytest.mark.parametrize("read", [WORDS, QUERIES], ids=["words", "queries"])
@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize(("cluster", "cancel"), [(1, CANCEL.format("")), (1, CANCEL.format(ALL)), (2, ONE)])
def test_each_cluster_is_done_once_by_whomever(cluster, cancel, mode, read):
    for seed in range(4):
        out = aligned(np.zeros(12, np.uint32))
        report = run(
            worker(cancel, read=read),
            out,
            grid=12,
            cluster=cluster,
            threads=64,
            shared=256,
            arch="sm_100a",
            async_mode=mode,
            seed=seed,
            happens_before=True,
        )
        assert (out == 1).all() and report.warp_instructions


def test_all_may_go_to_the_first():
    """Work that completes at issue finds every other cluster waiting: the first does it all, the others never start."""

    def instructions(grid: int) -> int:
        out = aligned(np.zeros(grid, np.uint32))
        return run(worker(), out, grid=grid, threads=32, shared=256, arch="sm_100a").warp_instructions

    one, two, three = (instructions(grid) for grid in (1, 2, 3))
    assert three - two == two - one < one


def test_the_response_is_waited_for_and_fenced():
    given = {"grid": 4, "threads": 64, "shared": 256, "arch": "sm_100a", "happens_before": True}
    for broken, match in (
        (worker(wait=""), "not ordered|nobody wrote"),
        (worker(cancel=""), "deadlock"),
    ):
        with pytest.raises(EmulationError, match=match):
            run(broken, aligned(np.zeros(4, np.uint32)), **given)


def test_a_query_of_all_coordinates_at_once_is_refused():
    with pytest.raises(PtxError, match="not implemented: clusterlaunchcontrol.query_cancel.get_first_ctaid.v4"):
        run(QUERY + "get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, %r4}, %d1;", aligned(np.zeros(4, np.uint32)))


@pytest.mark.parametrize("bit", [24, 29])
@pytest.mark.parametrize("to_all", [False, True], ids=["own", "all"])
@pytest.mark.parametrize("place", [64, 128], ids=["response", "barrier"])
def test_addresses_are_of_a_cta_that_there_is(place, to_all, bit):
    """Also where the place of every CTA is taken instead."""
    cancel = CANCEL.format(ALL if to_all else "").replace(f"[smem+{place}]", "[%r20]")
    far = f"mov.b32 %r20, smem; add.u32 %r20, %r20, {place + (1 << bit)};"
    who = rf"CTA {1 << bit - 24} of (the cluster, not to the executing|a cluster of 1)"
    with pytest.raises(EmulationError, match=who):
        run(worker(far + cancel), aligned(np.zeros(2, np.uint32)), grid=2, threads=32, shared=256, arch="sm_100a")


@pytest.mark.parametrize("kind", ["BROADCAST", "SELFCAST"])
def test_so_they_are_in_machine_code(kind):
    lines = ["UMOV UR8, 0x480", "UMOV UR9, 0x1000500", f"UGETNEXTWORKID.{kind} [UR8], [UR9]", "EXIT"]
    with pytest.raises(EmulationError, match=r"CTA 1 of (the cluster, not to the executing|a cluster of 1)"):
        run_lines(lines, np.zeros(32, np.uint32), arch="sm_100a", shared_bytes=0x400)
