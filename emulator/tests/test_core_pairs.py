"""tcgen05.alloc and dealloc of a pair of CTAs: one collective event, at which the two wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import aligned, run
from tsmla_emulator.run.machine import EmulationError

ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [smem+64], COLUMNS;"
FREE = "ld.shared.b32 %r20, [smem+64]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, COLUMNS;"
READ = """mov.b32 %r4, smem; mapa.shared::cluster.u32 %r5, %r4, 1;
setp.ne.u32 %p2, %r1, 0; @%p2 bra OVER; ld.shared::cluster.b32 %r6, [%r5]; OVER: bar.warp.sync -1;"""


def kernel(alloc: str, free: str) -> str:
    """Rank 0 reads what rank 1 wrote before the allocation; rank 1 ends after the deallocation."""
    return f"mov.u32 %r1, %cluster_ctarank; st.shared.b32 [smem], %r1; {alloc} {READ} {free}"


def pair(body: str, columns: int | str = 32, **options) -> None:
    run(
        body.replace("COLUMNS", str(columns)),
        aligned(np.zeros(4, np.uint32)),
        grid=2,
        cluster=2,
        shared=256,
        arch="sm_100a",
        **{"happens_before": True, **options},
    )


def refused(body: str, match: str, **options) -> None:
    with pytest.raises(EmulationError, match=match):
        pair(body, **options)


@pytest.mark.parametrize("quantum", [1, 0, 64])
@pytest.mark.parametrize("starve", [None, (0,)])
def test_both_know_what_both_did_before(quantum, starve):
    pair(kernel(ALLOC, FREE), quantum=quantum, starve=starve)


def alone(instruction: str) -> str:
    return instruction.replace("cta_group::2", "cta_group::1")


def test_ctas_that_allocate_for_themselves_meet_nobody():
    refused(kernel(alone(ALLOC), FREE), "not ordered|nobody wrote|ends, and nothing says")
    refused(kernel(ALLOC, alone(FREE)), "ends, and nothing says|has ended without")


@pytest.mark.parametrize("one, instruction", [(ALLOC, "alloc"), (FREE, "dealloc")])
def test_a_cta_that_comes_alone_waits_for_ever(one, instruction):
    only = f"setp.ne.u32 %p3, %r1, 0; @%p3 bra SKIP; {one} SKIP:"
    body = (kernel(only, "") if one is ALLOC else kernel(ALLOC, only)).replace(READ, "bar.warp.sync -1;")
    refused(body, rf"no warp can go on\n.*the other CTA of the pair at tcgen05.{instruction}.cta_group::2")


def test_both_ask_for_the_same():
    columns = "shl.b32 %r30, 32, %r1;"
    refused(kernel(columns + ALLOC, FREE), "different tcgen05 instructions .* or of 32 and 64", columns="%r30")


def test_a_pair_has_two_ctas():
    with pytest.raises(EmulationError, match="in CTA 0 of 1, which has no other"):
        run(ALLOC.replace("COLUMNS", "32"), aligned(np.zeros(4, np.uint32)), shared=256, arch="sm_100a")
