"""tcgen05: what a warp may not do, and what happens when it does."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import run
from test_core_tensor_memory import AFTER, emulate, instruction_descriptor, placed, product
from tsmla_emulator.run.machine import EmulationError


def refused(match: str, kind: str, call) -> None:
    with pytest.raises(EmulationError, match=match) as caught:
        call()
    assert caught.value.kind == kind


def simple(body: str, **options):
    return lambda: emulate(body, np.zeros(1, np.uint32), np.zeros(1, np.uint32), **{"columns": 32, **options})


def test_what_a_warp_may_not_do():
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [{}];"
    refused(
        "of lanes 0 to 31 by warp 1, which may touch lanes 32 to 63 only",
        "tmem",
        simple(load.format("%r500"), poison=False),
    )
    refused("tensor memory that nobody wrote: lane 0, column 3", "poison", simple(load.format("%r502+3")))
    refused("column 32, which is not allocated", "tmem", simple(load.format("%r502+32")))
    refused("columns 512 to 512 of 512", "tmem", simple(load.format("%r502+512"), columns=512))


def test_leniently_a_warp_reaches_its_own_lanes_at_any_address():
    """NVIDIA's cuDNN frontend 1.32.0 names lane 0 in every warp of its softmax."""
    body = """tcgen05.st.sync.aligned.32x32b.x1.b32 [{0}], %r1000; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [{1}]; tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r1000, 4, %d100; st.global.b32 [%d3], %r1;"""
    for store, load in (("%r502", "%r500"), ("%r500", "%r502")):
        out = np.zeros(128, np.uint32)
        emulate(body.format(store, load), out, columns=32, lenient_tensor=True)
        np.testing.assert_array_equal(out, np.arange(128))
        with pytest.raises(EmulationError, match="which may touch lanes"):
            emulate(body.format(store, load), out, columns=32)


@pytest.mark.parametrize("lenient", [False, True], ids=["strictly", "leniently"])
def test_tensor_memory_has_128_lanes(lenient):
    """A warp's own lanes of the next 128, and of those that only the uppermost bit of an address names."""
    for move in ("ld.sync.aligned.32x32b.x1.b32 %r1, [%r2];", "st.sync.aligned.32x32b.x1.b32 [%r2], %r1;"):
        for bit, lane in ((23, 128), (31, 32768)):
            body = f"add.u32 %r2, %r500, {1 << bit}; tcgen05.{move}"
            refused(f"at lane {lane} of 128", "tmem", simple(body, poison=False, lenient_tensor=lenient))


@pytest.mark.parametrize("bit", [24, 29])
def test_a_multicast_commit_names_a_cta_of_its_cluster(bit):
    """Also where the CTAs of its mask take the place of the one that it names."""
    body = f"mov.b32 %r42, smem; add.u32 %r42, %r42, {1 << bit};"
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r42], 1;"
    where = rf"tcgen05.commit at shared address 0x\w+: CTA {1 << bit - 24} of a cluster of 1"
    refused(where, "memory", simple(body + commit))


def test_allocation_budget():
    refused("of 48 columns: 32 to 512, a power of two", "budget", simple("", columns=48))
    refused("tensor memory column 0 still allocated", "tmem", simple("", free=False))
    refused(
        "alloc after relinquish",
        "tmem",
        simple("@!%p20 bra X; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32; X:"),
    )
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{}], 512;".format
    with pytest.raises(EmulationError, match="waits for 512 free tensor memory columns"):
        run(again(0) + again(4), np.zeros(1), shared=64, arch="sm_100a")
    with pytest.raises(EmulationError, match="tcgen05 below sm_100"):
        run(again(0), np.zeros(1), shared=64, arch="sm_90a")


def test_a_product_needs_its_commit_waited_for():
    refused(
        "(read by CTA 0 warp . at PTX line|write by the asynchronous operation) .* are not ordered",
        "race",
        lambda: product("bf16", 128, 32, wait="bar.sync 0;" + AFTER, happens_before=True),
    )
    refused(
        "tensor memory that nobody wrote",
        "poison",
        lambda: product("bf16", 128, 32, wait="bar.sync 0;", async_mode="late"),
    )
    refused("nobody ever arrived at it", "deadlock", lambda: product("bf16", 128, 32, commit=False))


@pytest.mark.parametrize(("ctas", "alone"), [(1, 0), (3, 2)])
def test_a_cta_whose_pair_has_no_other(ctas, alone):
    where = f"of a pair of CTAs in CTA {alone} of {ctas}, which has no other"
    mma = f"""mov.u32 %r31, %cluster_ctarank; setp.ne.u32 %p6, %r31, {alone}; or.pred %p6, %p6, %p21; @%p6 bra OVER;
    mov.b32 %r41, {instruction_descriptor("bf16", 256, 32)}; mov.pred %p5, 0; mov.b64 %d1, {1 << 46 | 0x40};
    tcgen05.mma.cta_group::2.kind::f16 [%r500], %d1, %d1, %r41, %p5; OVER: bar.sync 0;"""
    copy = "tcgen05.cp.cta_group::2.128x256b [%r500], %d1;"
    for body, what in ((mma, "tcgen05.mma"), (mma.partition("tcgen05")[0] + f"{copy} OVER: bar.sync 0;", "tcgen05.cp")):
        refused(f"{what} {where}", "tmem", simple(body, grid=ctas, cluster=ctas, poison=False))
    with pytest.raises(EmulationError, match=where):
        emulate("", np.zeros(1, np.uint32), group=2, columns=32, grid=ctas, cluster=ctas)


def test_a_stores_wait_orders_it():
    body = """
    mov.b32 %r1, 5; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r502], %r1; WAIT
    tcgen05.ld.sync.aligned.32x32b.x1.b32 %r2, [%r502]; tcgen05.wait::ld.sync.aligned;
    """
    simple(body.replace("WAIT", "tcgen05.wait::st.sync.aligned;"), happens_before=True)()
    refused("are not ordered", "race", simple(body.replace("WAIT", ""), happens_before=True))
    refused("nobody wrote", "poison", simple(body.replace("WAIT", ""), async_mode="late"))


def test_unknown_descriptor_bits_are_refused():
    for idesc, what in ((1 << 2 | 1 << 4, "sparse"), (2 << 4, "D format 2"), (1 << 4 | 3 << 7, "element format 3")):
        body = f"@%p21 ret; mov.b32 %r41, {idesc | 4 << 17 | 8 << 24}; mov.pred %p5, 0; mov.b64 %d1, 0;"
        body += "tcgen05.mma.cta_group::1.kind::f16 [%r500], %d1, %d1, %r41, %p5;"
        refused(f"^not implemented: tcgen05.mma instruction .*{what}", "not implemented", simple(body))


@pytest.mark.parametrize(
    ("kind", "m", "n", "group", "ws", "n_major"),
    [("bf16", 128, 0, 1, False, False), ("bf16", 128, 264, 1, False, False), ("bf16", 64, 48, 1, True, False),
     ("e4m3", 128, 16, 1, True, False), ("bf16", 128, 24, 2, False, False), ("bf16", 256, 8, 2, False, False),
     ("e4m3", 64, 56, 1, False, True), ("e4m3", 128, 16, 2, False, True), ("bf16", 32, 64, 1, False, False),
     ("bf16", 256, 64, 1, False, False), ("bf16", 64, 64, 2, False, False)],
)  # fmt: skip
def test_shapes_that_do_not_exist(kind, m, n, group, ws, n_major):
    """PTX ISA 9.7.16.2.1, table 39."""
    idesc = instruction_descriptor(kind, m, n, b_rows=n_major)
    ws_, name = ".ws" if ws else "", "f16" if kind == "bf16" else "f8f6f4"
    body = f"@%p21 ret; mov.b32 %r41, {idesc}; mov.pred %p5, 0; mov.b64 %d1, 0;"
    body += f"tcgen05.mma{ws_}.cta_group::{group}.kind::{name} [%r500], %d1, %d1, %r41, %p5;"
    refused(rf"tcgen05.mma(.ws)? with M {m}", "descriptor", simple(body))


@pytest.mark.parametrize("m, n, n_major", [(128, 8, False), (64, 56, True), (128, 24, False)])
def test_small_shapes_that_exist(m, n, n_major):
    got, expected = product("bf16", m, n, b_rows=n_major, poison=False)
    np.testing.assert_array_equal(got, placed(expected, "D" if m == 128 else "F"))


def test_a_commit_tracks_its_own_threads_products():
    """The products are another lane's, so that whoever waits knows nothing of them."""
    with pytest.raises(EmulationError, match="are not ordered") as caught:
        product("bf16", 128, 32, happens_before=True, committer=1)
    assert caught.value.kind == "race"
