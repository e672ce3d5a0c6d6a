"""tcgen05: what a warp may not do, and what happens when it does."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import run
from test_core_tensor_memory import AFTER, emulate, product
from tsmla_emulator.machine import EmulationError


def refused(match: str, kind: str, call) -> None:
    with pytest.raises(EmulationError, match=match) as caught:
        call()
    assert caught.value.kind == kind


def simple(body: str, **options):
    return lambda: emulate(body, np.zeros(1, np.uint32), np.zeros(1, np.uint32), **{"columns": 32, **options})


def test_what_a_warp_may_not_do():
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [{}];"
    refused("of lanes 0 to 31 by warp 1, which may touch lanes 32 to 63 only", "tmem",
            simple(load.format("%r500"), poison=False))  # fmt: skip
    refused("tensor memory that nobody wrote: lane 0, column 3", "poison", simple(load.format("%r502+3")))
    refused("column 32, which is not allocated", "tmem", simple(load.format("%r502+32")))
    refused("columns 512 to 512 of 512", "tmem", simple(load.format("%r502+512"), columns=512))


def test_allocation_budget():
    refused("of 48 columns: 32 to 512, a power of two", "budget", simple("", columns=48))
    refused("tensor memory column 0 still allocated", "tmem", simple("", free=False))
    refused("alloc after relinquish", "tmem",
            simple("@!%p20 bra X; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32; X:"))  # fmt: skip
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{}], 512;".format
    with pytest.raises(EmulationError, match="waits for 512 free tensor memory columns"):
        run(again(0) + again(4), np.zeros(1), shared=64, arch="sm_100a")
    with pytest.raises(EmulationError, match="tcgen05 below sm_100"):
        run(again(0), np.zeros(1), shared=64, arch="sm_90a")


def test_a_product_needs_its_commit_waited_for():
    refused("(read by CTA 0 warp . at PTX line|write by the asynchronous operation) .* are not ordered", "race",
            lambda: product("bf16", 128, 32, wait="bar.sync 0;" + AFTER, happens_before=True))  # fmt: skip
    refused("tensor memory that nobody wrote", "poison",
            lambda: product("bf16", 128, 32, wait="bar.sync 0;", async_mode="late"))  # fmt: skip
    refused("nobody ever arrived at it", "deadlock", lambda: product("bf16", 128, 32, commit=False))


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
        refused(f"not implemented: .*{what}.* at line", "not implemented", simple(body))
