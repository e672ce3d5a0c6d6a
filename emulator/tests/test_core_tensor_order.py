"""What orders tcgen05 operations: each rule of the PTX ISA, 9.7.16.6, on the smallest kernel that breaks it.

Warps 0, 4 and 8 own the same lanes of tensor memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_core_tensor_memory import AFTER, ALLOC, FREE, WAIT, emulate, product
from tsmla_emulator.run.machine import EmulationError

BEFORE = "tcgen05.fence::before_thread_sync;"
STORED, LOADED = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r502], %r1000;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r10, [%r502];"
USE = "add.s32 %r11, %r10, 1; mad.wide.u32 %d3, %r1000, 4, %d100; st.global.b32 [%d3], %r11;"
NO_BEFORE = "ordered, but without a tcgen05.fence::before_thread_sync after the former"
NO_AFTER = "ordered, but without a tcgen05.fence::after_thread_sync before the latter"
NO_WAIT = "not ordered: the former ends at a tcgen05.wait::ld"


def roles(*bodies: str) -> str:
    """A warpgroup for each body."""
    text = "shr.u32 %r20, %r1000, 7;"
    for index, body in enumerate(bodies):
        text += f"setp.ne.u32 %p10, %r20, {index}; @%p10 bra PAST{index}; {body} PAST{index}:"
    return text


def clean(body: str, threads: int = 128, **options) -> np.ndarray:
    out = np.zeros(threads, np.uint32)
    emulate(body, out, columns=32, threads=threads, happens_before=True, **options)
    return out


def racy(said: str, body: str, threads: int = 128, **options) -> None:
    for mode in ("eager", "late"):
        with pytest.raises(EmulationError) as caught:
            clean(body, threads, async_mode=mode, **options)
        assert caught.value.kind == "race" and said in str(caught.value)
    if said in (NO_BEFORE, NO_AFTER):
        clean(body, threads, lenient_tensor=True, **options)


def handover(stored: str = STORED + BEFORE, after: str = AFTER) -> str:
    """The first warpgroup stores, the second loads; a named barrier between them."""
    second = f"bar.sync 1, 256; {after} {LOAD} {LOADED} {BEFORE}"
    return roles(f"{STORE} {stored} bar.arrive 1, 256;", second)


def test_a_fence_on_either_side_of_a_barrier():
    """9.7.16.6.4.4, non-pipelined instructions, different thread."""
    clean(handover(), threads=256)
    racy(NO_BEFORE, handover(STORED), threads=256)
    racy(NO_BEFORE, handover(BEFORE + STORED), threads=256)
    racy(NO_AFTER, handover(after=""), threads=256)
    racy("not ordered", handover(BEFORE), threads=256, poison=False)


def test_what_a_barrier_handed_on_needs_no_fence_of_those_between():
    """9.7.16.6.3: the fences compose with execution ordering, which passes through other threads."""

    def relay(first: str, between: str) -> str:
        last = f"bar.sync 2, 256; {AFTER} {LOAD} {LOADED} {BEFORE}"
        return roles(
            f"{STORE} {STORED} {first} bar.arrive 1, 256;", f"bar.sync 1, 256; {between} bar.arrive 2, 256;", last
        )

    clean(relay(BEFORE, ""), threads=384)
    racy(NO_BEFORE, relay("", AFTER + BEFORE), threads=384)


def test_a_commit_fences_what_it_waits_for_and_the_wait_does_not():
    """9.7.16.6.4.2, example 2."""
    product("bf16", 128, 32, happens_before=True)
    with pytest.raises(EmulationError, match=NO_AFTER) as caught:
        product("bf16", 128, 32, wait=WAIT, happens_before=True)
    assert caught.value.kind == "race"
    product("bf16", 128, 32, wait=WAIT, happens_before=True, lenient_tensor=True)


def test_a_thread_needs_no_fence_for_its_own_moves():
    """9.7.16.6.4.2, example 1."""
    clean(STORE + STORED + LOAD + LOADED)
    racy("not ordered", STORE + LOAD + LOADED, poison=False)


def test_the_use_of_loaded_values_orders_the_use_and_nothing_else():
    """9.7.16.6.4.5, register dependencies."""
    body = STORE + STORED + LOAD + "{}" + USE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r502], %r11;" + STORED
    np.testing.assert_array_equal(clean(body.format(LOADED)), np.arange(128) + 1)
    np.testing.assert_array_equal(clean(STORE + STORED + LOAD + USE + LOADED), np.arange(128) + 1)
    racy(NO_WAIT, body.format(""))
    np.testing.assert_array_equal(clean(body.format(""), lenient_tensor=True), np.arange(128) + 1)


def test_lenience_ends_a_load_at_its_use_and_not_before():
    first = f"{STORE} {STORED} {LOAD} {{}} {BEFORE} bar.arrive 1, 256;"
    body = roles(first, f"bar.sync 1, 256; {AFTER} {STORE} {STORED}")
    for done in (LOADED, USE):
        clean(body.format(done), threads=256, lenient_tensor=True)
    racy(NO_WAIT, body.format(""), threads=256, lenient_tensor=True)


def test_leniently_a_relaxed_arrival_hands_tensor_memory_on_and_nothing_else():
    """NVIDIA's cuDNN frontend 1.32.0 does so: tcgen05.wait::st, and an arrival without a release."""
    init = "mbarrier.init.shared.b64 [smem+0x10040], 128; fence.mbarrier_init.release.cluster;"
    init = f"setp.ne.u32 %p21, %r1000, 0; @%p21 bra INIT; {init} INIT: bar.sync 0;"
    wait = "{ .reg .pred P; B: mbarrier.try_wait.parity.shared.b64 P, [smem+0x10040], 0; @!P bra B; }"
    arrive = "mbarrier.arrive.relaxed.cta.shared::cta.b64 %d1, [smem+0x10040];"

    def kernel(first: str, second: str) -> str:
        return init + roles(f"{first} {arrive}", f"{wait} {second}")

    given = {"threads": 256, "lenient_tensor": True, "lockstep": True}
    handed = kernel(STORE + STORED, LOAD + LOADED)
    clean(handed, **given)
    with pytest.raises(EmulationError, match="not ordered"):
        clean(handed, threads=256)
    with pytest.raises(EmulationError, match="not ordered"):
        clean(kernel(STORE, LOAD + LOADED), poison=False, **given)
    shared = "mov.b32 %r31, smem; and.b32 %r30, %r1000, 127; mad.lo.u32 %r30, %r30, 4, %r31; "
    with pytest.raises(EmulationError, match="shared memory .* not ordered"):
        clean(kernel(shared + "st.shared.b32 [%r30], %r1;", shared + "ld.shared.b32 %r2, [%r30];"), **given)


def test_tensor_memory_is_given_back_after_its_last_use():
    body = STORE + STORED + LOAD + LOADED
    clean(body + FREE, free=False)
    racy(NO_BEFORE, body + FREE.replace(BEFORE, ""), free=False)
    racy(NO_WAIT, body.replace(LOADED, "") + FREE, free=False)


def test_tensor_memory_is_used_after_its_allocation():
    """9.7.16.6.1: `tcgen05.alloc` is synchronous and needs no fence, who comes after the barrier does."""
    clean(STORE + STORED)
    racy(NO_AFTER, STORE + STORED, allocate=ALLOC.replace(AFTER, ""))
