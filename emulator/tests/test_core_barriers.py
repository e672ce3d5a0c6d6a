"""Barriers in memory, named and cluster barriers: what they mean, their misuse, deadlocks, budgets."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import run
from tsmla_emulator.run.machine import EmulationError

INIT = """
setp.eq.u32 %p30, %r1000, 0;
@!%p30 bra READY;
mbarrier.init.shared.b64 [smem], COUNT;
READY:
bar.sync 0;
"""
WAIT = """
{{ .reg .pred P;
AGAIN: mbarrier.try_wait.parity.shared.b64 P, [smem], {}, 1000; @P bra.uni DONE; bra.uni AGAIN;
DONE: }}
"""
STORE = "mad.wide.u32 %d50, %r1000, 4, %d100; st.global.b32 [%d50], %r10;"
MODES = pytest.mark.parametrize("mode", ["eager", "random", "late"])


def fails(body: str, kind: str, match: str, threads: int = 64, **options) -> str:
    with pytest.raises(EmulationError, match=match) as caught:
        run(body, np.zeros(1024, np.uint32), threads=threads, shared=1024, **options)
    assert caught.value.kind == kind
    return str(caught.value)


def parities(body: str) -> list[int]:
    """Tries parity 0 and 1 after the body: [0 passes, 1 passes]."""
    out = np.zeros(2, np.uint32)
    run(
        "mbarrier.init.shared.b64 [smem], 2;"
        + body
        + """
    mbarrier.test_wait.parity.shared.b64 %p1, [smem], 0; selp.b32 %r1, 1, 0, %p1;
    mbarrier.test_wait.parity.shared.b64 %p2, [smem], 1; selp.b32 %r2, 1, 0, %p2;
    st.global.v2.b32 [%d100], {%r1, %r2};""",
        out,
        threads=1,
        shared=64,
    )
    return out.tolist()


ARRIVE = "mbarrier.arrive.shared.b64 %d1, [smem];"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", [0, 1]),
        (ARRIVE, [0, 1]),
        (ARRIVE * 2, [1, 0]),
        (ARRIVE * 4, [0, 1]),
        ("mbarrier.arrive.shared.b64 _, [smem], 2;", [1, 0]),
        (ARRIVE + "mbarrier.arrive.expect_tx.shared.b64 %d1, [smem], 64;", [0, 1]),
        (
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 16;"
            + ARRIVE * 2
            + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 16;",
            [1, 0],
        ),
    ],
)
def test_phases(body, expected):
    assert parities(body) == expected


EITHER = """
mbarrier.test_wait.parity.shared.b64 %p1, [smem], 0; @%p1 bra DONE;
mbarrier.test_wait.parity.shared.b64 %p2, [smem+8], 0; @%p2 bra DONE; bra.uni EITHER;
"""


def either_of_two(arrival: str) -> str:
    """Warp 0 asks two barriers in turn until one is passed; warp 1 arrives, or does not."""
    init = "setp.eq.u32 %p30, %r1000, 0; @!%p30 bra READY;"
    init += "mbarrier.init.shared.b64 [smem], 1; mbarrier.init.shared.b64 [smem+8], 1; READY: bar.sync 0;"
    return f"{init} setp.ge.u32 %p31, %r1000, 32; @%p31 bra OTHER; EITHER: {EITHER} OTHER: {arrival} DONE:"


@pytest.mark.parametrize("quantum", [1, 2, 5, 64])
def test_a_warp_that_asks_in_turn_waits_whatever_its_slice_ends_at(quantum):
    arrives = "setp.eq.u32 %p30, %r1000, 32; @%p30 mbarrier.arrive.shared.b64 _, [smem+8];"
    run(
        either_of_two(arrives), np.zeros(1, np.uint32), threads=64, shared=64, quantum=quantum, starve=(1,), limit=2_000
    )
    fails(either_of_two(""), "deadlock", "it polls barriers that never complete", quantum=quantum, limit=200_000)


def test_transaction_counts_have_20_bits():
    init = "mbarrier.init.shared.b64 [smem], 1;"
    expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], {};".format
    run(init + expect(2**20 - 1), np.zeros(1, np.uint32), threads=1, shared=64)
    text = "a transaction count of 1048576 bytes; 2.20 - 1 is the most"
    fails(init + expect(2**20), "barrier", text, threads=1)
    fails(init + expect(2**19) * 2, "barrier", text, threads=1)
    fails(init + "mbarrier.arrive.expect_tx.shared.b64 %d1, [smem], 1048576;", "barrier", text, threads=1)
    complete = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 1048576;"
    fails(init + complete, "barrier", "a transaction count of -1048576 bytes", threads=1)


@MODES
def test_a_ring_of_one_slot_passes_every_value(mode):
    """Warp 0 writes, warp 1 reads and adds; full barrier at smem, empty barrier at smem + 8."""
    out = np.zeros(1, np.uint32)
    body = """
    setp.eq.u32 %p30, %r1000, 0;
    @!%p30 bra READY;
    mbarrier.init.shared.b64 [smem], 1;
    mbarrier.init.shared.b64 [smem+8], 1;
READY:
    bar.sync 0;
    setp.ne.u32 %p1, %r1001, 0;
    @%p1 ret;
    mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r20, smem; add.s32 %r21, %r20, 8;
    setp.ge.u32 %p2, %r1000, 32;
    @%p2 bra READER;
WRITE:
    not.b32 %r3, %r1; and.b32 %r3, %r3, 1;
W1: mbarrier.try_wait.parity.shared.b64 %p3, [%r21], %r3; @!%p3 bra W1;
    st.shared.b32 [smem+16], %r1;
    mbarrier.arrive.shared.b64 %d1, [%r20];
    add.s32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 50; @%p4 bra WRITE;
    ret;
READER:
    and.b32 %r3, %r1, 1;
W2: mbarrier.try_wait.parity.shared.b64 %p3, [%r20], %r3; @!%p3 bra W2;
    ld.shared.b32 %r4, [smem+16];
    mbarrier.arrive.shared.b64 %d1, [%r21];
    mad.lo.s32 %r2, %r2, 3, %r4;
    add.s32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 50; @%p4 bra READER;
    st.global.b32 [%d100], %r2;
    """
    expected = 0
    for value in range(50):
        expected = (expected * 3 + value) % 2**32
    for seed in range(4):
        run(body, out, threads=64, shared=64, async_mode=mode, seed=seed, quantum=0, happens_before=True)
        assert out[0] == expected
    for starve in ((0,), (1,)):
        run(body, out, threads=64, shared=64, async_mode=mode, starve=starve)
        assert out[0] == expected


def test_named_barriers_order_and_arrivals_do_not_wait():
    out = np.zeros(64, np.uint32)
    body = (
        """
    setp.ge.u32 %p1, %r1000, 32;
    mov.b32 %r10, 1;
    @%p1 bra SECOND;
    shl.b32 %r2, %r1001, 2; mov.b32 %r3, smem; add.s32 %r4, %r3, %r2;
    st.shared.b32 [%r4], %r1000;
    bar.arrive 3, 64;
    bra.uni OUT;
SECOND:
    bar.sync 3, 64;
    shl.b32 %r2, %r1001, 2; mov.b32 %r3, smem; add.s32 %r4, %r3, %r2;
    ld.shared.b32 %r10, [%r4];
OUT:
    """
        + STORE
    )
    for starve in ((0,), (1,), None):
        run(body, out, threads=64, shared=128, starve=starve, happens_before=True)
        np.testing.assert_array_equal(out, [1] * 32 + list(range(32)))


def test_remote_arrivals_through_mapa():
    out = np.zeros(2, np.uint32)
    run(
        INIT.replace("COUNT", "2")
        + """
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.b32 %r1, smem; setp.ne.u32 %p1, %r1000, 0; @%p1 ret;
    mapa.shared::cluster.u32 %r2, %r1, 0; mapa.shared::cluster.u32 %r3, %r1, 1;
    mbarrier.arrive.shared::cluster.b64 _, [%r2]; mbarrier.arrive.shared::cluster.b64 _, [%r3];
    """
        + WAIT.format(0)
        + "mov.u32 %r4, %ctaid.x; mad.wide.u32 %d1, %r4, 4, %d100; st.global.b32 [%d1], 1;",
        out,
        grid=2,
        cluster=2,
        shared=64,
        happens_before=True,
    )
    assert out.tolist() == [1, 1]


def test_misuse_of_mbarriers():
    fails(
        "mbarrier.arrive.shared.b64 %d1, [smem];", "barrier", "offset 0x400 of CTA 0, where no mbarrier was initialised"
    )
    fails("mbarrier.init.shared.b64 [smem], 1;", "barrier", "initialised again while it is live")
    fails("mbarrier.init.shared.b64 [smem], 1;", "barrier", "initialised again", threads=64, lenient_tensor=True)
    fails(
        "add.u32 %r1, %r1000, 1; mbarrier.init.shared.b64 [smem], %r1;",
        "barrier",
        "initialised again",
        threads=2,
        lenient_tensor=True,
    )
    run("mbarrier.init.shared.b64 [smem], 1;", np.zeros(1, np.uint32), threads=32, shared=1024, lenient_tensor=True)
    fails("mbarrier.init.shared.b64 [smem+4], 1;", "memory", "not a multiple of 8", threads=1)
    fails("mbarrier.init.shared.b64 [smem], 0;", "barrier", "with count 0", threads=1)
    fails(INIT.replace("COUNT", "1") + "st.shared.b32 [smem+4], 1;", "barrier", "over the live mbarrier at 0x400")
    fails(
        INIT.replace("COUNT", "1") + "mbarrier.arrive.shared.b64 %d1, [smem], 2;",
        "barrier",
        "more arrivals in phase 0 than its count of 1",
    )


def test_misuse_of_named_barriers():
    fails("bar.sync 16;", "budget", "named barrier 16: a CTA has 16")
    fails("bar.sync 1, 33;", "barrier", "with 33 threads, not a multiple of 32")
    fails("bar.sync 1, 128;", "barrier", "waits for 128 threads, the CTA has 64")
    body = "setp.lt.u32 %p1, %r1000, 32; @%p1 bra FIRST; bar.sync 1, 64; ret; FIRST: bar.sync 1, 96;"
    fails(body, "barrier", "used with .. threads while arrivals for .. wait at it", threads=96)


def test_a_deadlock_is_reported_with_who_waits_and_who_is_missing():
    body = (
        INIT.replace("COUNT", "2")
        + "setp.ne.u32 %p1, %r1001, 0; @%p1 ret; "
        + ARRIVE
        + WAIT.format(0)
        + "setp.ge.u32 %p2, %r1000, 32; @%p2 bra LAST; "
        + ARRIVE
        + "LAST:"
        + WAIT.format(1)
    )
    text = fails(body, "deadlock", "no warp can go on")
    assert "CTA 0 warp 0 at PTX line" in text and "CTA 0 warp 1 at PTX line" in text
    assert "mbarrier 0x400 of CTA 0 to leave phase 1 (1 of 2 arrivals and 0 bytes missing)" in text
    assert "arrived in phase 0, not in this one: CTA 0 warp 1 at PTX line" in text
    text = fails(
        "setp.ge.u32 %p1, %r1000, 32; @%p1 bra A; bar.sync 1, 64; ret; A: bar.sync 2, 64;", "deadlock", "no warp"
    )
    assert "named barrier 1 (32 of 64 threads arrived; running warps that are not at it: 1)" in text
    text = fails(INIT.replace("COUNT", "1") + WAIT.format(0), "deadlock", "nobody ever arrived at it")


def test_polling_two_barriers_in_turn_is_a_deadlock_too():
    body = (
        INIT.replace("COUNT", "1")
        + """
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0; @%p1 bra OVER;
    mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0; @!%p2 bra AGAIN;
OVER:"""
    )
    fails(body, "deadlock", "it polls barriers that never complete")


def test_an_endless_loop_meets_the_limit():
    fails("AGAIN: bra AGAIN;", "limit", "has run [0-9]* warp instructions without an end", limit=10000)


def test_register_budget():
    fails("setmaxnreg.inc.sync.aligned.u32 250;", "budget", "24 to 256, a multiple of 8")
    fails("setmaxnreg.dec.sync.aligned.u32 256;", "budget", "but the warp has 168 registers a thread", threads=384)
    text = fails("setmaxnreg.inc.sync.aligned.u32 240;", "deadlock", "no warp can go on", threads=384)
    assert f"registers: setmaxnreg.inc 240 would make {(8 * 168 + 4 * 168 + 72) * 32} of {384 * 168}" in text
    body = "setp.lt.u32 %p1, %r1000, 128; @%p1 bra A; setmaxnreg.inc.sync.aligned.u32 240; ret;"
    body += "A: setmaxnreg.dec.sync.aligned.u32 {};"
    run(body.format(24), np.zeros(1, np.uint32), threads=384)
    text = fails(body.format(32), "deadlock", "no warp can go on", threads=384)
    assert "would make 65536 of 64512" in text, "an SM has as many, but the launch took fewer"
