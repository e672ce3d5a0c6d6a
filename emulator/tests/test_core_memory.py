"""Address windows: bounds, alignment, never-written memory, and errors that say where."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_kernels import aligned, run, text_of
from tsmla_emulator.run.machine import EmulationError, Launch, Options, parse, run_launches
from tsmla_emulator.run.ptx.model import PtxError


def fails(body: str, kind: str, match: str, *arguments, **options) -> EmulationError:
    arrays = arguments or (np.zeros(32, np.uint32),)
    with pytest.raises(EmulationError, match=match) as caught:
        run(body, *arrays, **options)
    assert caught.value.kind == kind
    return caught.value


def test_vectors_of_every_width_travel_unchanged():
    source = aligned(np.random.default_rng(1).integers(0, 2**63, 32 * 4, dtype=np.uint64))
    out = aligned(np.zeros_like(source))
    for form, registers in (
        ("v4.b64", "{%d1, %d2, %d3, %d4}"),
        ("v8.b32", "{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}"),
    ):
        out[:] = 0
        run(
            f"""mul.wide.u32 %d10, %r1001, 32; add.s64 %d11, %d10, %d100; add.s64 %d12, %d10, %d101;
        ld.global.L1::no_allocate.{form} {registers}, [%d11];
        st.global.{form} [%d12], {registers};""",
            source,
            out,
        )
        np.testing.assert_array_equal(out, source)


def test_narrow_loads_extend_by_their_sign():
    source = np.array([0x80, 0x7F, 0xFF, 1] * 8, np.uint8)
    out = np.zeros((2, 32), np.int32)
    run(
        """cvt.u64.u32 %d1, %r1001; add.s64 %d2, %d100, %d1; mad.wide.u32 %d3, %r1001, 4, %d101;
    ld.global.s8 %r1, [%d2]; ld.global.u8 %r2, [%d2]; st.global.b32 [%d3], %r1; st.global.b32 [%d3+128], %r2;""",
        source,
        out,
    )
    np.testing.assert_array_equal(out, [source.view(np.int8), source])


def test_shared_addresses_carry_the_rank_and_start_after_the_reserved_part():
    out = np.zeros((2, 4), np.uint32)
    run(
        """mov.u32 %r1, %ctaid.x; mad.wide.u32 %d1, %r1, 16, %d100;
    mov.b32 %r2, smem; st.global.b32 [%d1], %r2;
    mapa.shared::cluster.u32 %r3, %r2, 1; st.global.b32 [%d1+4], %r3;
    cvta.shared.u64 %d2, smem; cvt.u32.u64 %r4, %d2; st.global.b32 [%d1+8], %r4;
    and.b32 %r5, %r2, -16777217; st.global.b32 [%d1+12], %r5;""",
        out,
        grid=2,
        cluster=2,
        shared=64,
    )
    np.testing.assert_array_equal(out, [[0x400, 0x1000400, 0x400, 0x400], [0x1000400, 0x1000400, 0x1000400, 0x400]])


def test_static_arrays_lie_before_the_dynamic_one():
    out = np.zeros(2, np.uint32)
    run(
        "mov.b32 %r1, small; mov.b32 %r2, smem; st.global.v2.b32 [%d100], {%r1, %r2};",
        out,
        shared=16,
        static=".shared .align 8 .b8 small[24];",
    )
    np.testing.assert_array_equal(out, [0x400, 0x800])


def test_a_peers_shared_memory_is_reached_through_the_cluster_window():
    out = np.zeros(2, np.uint32)
    barrier = "barrier.cluster.arrive; barrier.cluster.wait;"
    run(
        f"""mov.u32 %r1, %cluster_ctarank; add.s32 %r2, %r1, 40; st.shared.b32 [smem], %r2;
    {barrier}
    xor.b32 %r3, %r1, 1; mov.b32 %r4, smem; mapa.shared::cluster.u32 %r5, %r4, %r3;
    ld.shared::cluster.b32 %r6, [%r5]; mad.wide.u32 %d1, %r1, 4, %d100; st.global.b32 [%d1], %r6;
    {barrier}""",
        out,
        grid=2,
        cluster=2,
        shared=16,
    )
    np.testing.assert_array_equal(out, [41, 40])


def test_the_address_of_a_cta_that_there_is_not_is_an_error_where_it_is_used():
    """Lanes of a warp that names a CTA by lane may have one."""
    out = np.zeros(1, np.uint32)
    body = "mov.b32 %r4, smem; mapa.shared::cluster.u32 %r5, %r4, %r1001; setp.lt.u32 %p1, %r1001, {};"
    body += "@%p1 st.shared::cluster.b32 [%r5], %r1; barrier.cluster.arrive; barrier.cluster.wait;"
    run(body.format(2), out, shared=16, grid=2, cluster=2)
    with pytest.raises(EmulationError, match="CTA 2 of a cluster of 2"):
        run(body.format(3), out, shared=16, grid=2, cluster=2)


def test_each_lane_asks_for_the_cta_of_its_own_address():
    out = np.zeros((2, 32), np.uint32)
    run(
        """mov.b32 %r4, smem; and.b32 %r3, %r1001, 1; mapa.shared::cluster.u32 %r5, %r4, %r3;
    getctarank.shared::cluster.u32 %r6, %r5; mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 5; add.u32 %r1, %r1, %r1001;
    mad.wide.u32 %d1, %r1, 4, %d100; st.global.b32 [%d1], %r6;""",
        out,
        grid=2,
        cluster=2,
        shared=16,
    )
    np.testing.assert_array_equal(out, [[0, 1] * 16] * 2)


def test_errors_name_kernel_cta_warp_line_and_text():
    error = fails(
        "setp.lt.u32 %p1, %r1000, 40; @%p1 bra OVER; st.shared.b32 [smem+64], %r1000;\nOVER:",
        "memory",
        r"store of 4 bytes at shared offset 0x440",
        threads=64,
        shared=64,
    )
    assert "kernel k" in str(error) and "CTA (0, 0, 0) warp 1, PTX line" in str(error)
    assert "st.shared.b32 [smem+64], %r1000" in str(error)
    assert error.line == str(text_of("@\n", 1, "sm_90a", 64)).split("@")[0].count("\n") + 1


def test_errors_name_the_source_line_where_there_is_one():
    text = text_of(".loc 1 42 7\nst.shared.b32 [smem+64], %r1000;", 1, "sm_90a", 32).replace(
        ".address_size 64", '.address_size 64\n.file 1 "kernel.py"'
    )
    out = np.zeros(1, np.uint32)
    with pytest.raises(EmulationError) as caught:
        run_launches(parse(text), [Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 64, bytes(128))], [], Options())
    assert caught.value.source == "kernel.py:42" and "(kernel.py:42)" in str(caught.value)
    assert out[0] == 0


def test_global_bounds():
    fails("st.global.b32 [%d100+128], %r1;", "memory", "runs past the end of region 'argument 0'")
    fails("ld.global.b32 %r1, [%d100+-4];", "memory", "outside every region")
    fails("ld.global.v2.b32 {%r1, %r2}, [%d100+4];", "memory", "is not a multiple of 8")
    fails("st.global.b32 [%d100], %r1;", "memory", "read-only region 'argument 0', byte 0", readonly=(0,))


def test_never_written_shared_memory_is_not_read():
    body = "st.shared.b32 [smem], %r1; ld.shared.b32 %r2, [smem]; ld.shared.b32 %r3, [smem+4];"
    error = fails(body, "poison", r"reads shared memory that nobody wrote: offset 0x404", shared=16)
    assert "ld.shared.b32 %r3, [smem+4]" in str(error)
    run(body, np.zeros(1, np.uint32), shared=16, poison=False)


def test_registers_start_poisoned():
    out = np.zeros(1, np.uint32)
    run("st.global.b32 [%d100], %r500;", out)
    assert out[0] == 0xFFFFFFFF


def test_own_window_does_not_reach_a_peer():
    fails(
        "mov.b32 %r1, smem; xor.b32 %r2, %r1, 0x1000000; st.shared.b32 [%r2], %r1;",
        "memory",
        "belongs to CTA . of the cluster, not to the executing CTA",
        grid=2,
        cluster=2,
        shared=16,
    )


def test_parameters_are_bounded():
    fails("ld.param.b32 %r1, [k_param_0+128];", "memory", "parameter access of 4 bytes at byte 128")


def test_shared_memory_has_a_budget():
    fails("", "budget", "232449 bytes of shared memory, a CTA has 232448", shared=232449)


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
def test_cp_async_arrives_when_asked(mode):
    source = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    run(
        """mov.b32 %r1, smem; shl.b32 %r2, %r1001, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %d1, %r2;
    add.s64 %d2, %d100, %d1; add.s64 %d3, %d101, %d1;
    setp.eq.u32 %p1, %r1001, 31; selp.b32 %r4, 8, 16, %p1;
    cp.async.cg.shared.global [%r3], [%d2], 16, %r4;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3]; st.global.v4.b32 [%d3], {%r5, %r6, %r7, %r8};""",
        source,
        out,
        shared=512,
        async_mode=mode,
    )
    expected = source.copy()
    expected[-2:] = 0  # the last lane copied 8 bytes and zeros
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("copy", "match"),
    [
        ("cp.async.cg.shared.global [smem], [%d100+{}], 16;", "cp.async of 16 bytes from global address .* of 16"),
        ("cp.async.ca.shared.global [smem], [%d100+{}], 8, 4;", "cp.async of 8 bytes from global address .* of 8"),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%d100+{}], 64, [smem+512];",
            "bulk copy from global address .*, not a multiple of 16",
        ),
        (
            "cp.async.bulk.global.shared::cta.bulk_group [%d100+{}], [smem], 16;",
            "bulk store to global address .*, not a multiple of 16",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "late"])
def test_copies_begin_at_multiples_of_their_size(copy, match, mode):
    source = aligned(np.zeros(64, np.uint32))
    body = """mbarrier.init.shared.b64 [smem+512], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+512], 64; st.shared.v4.b32 [smem], {%r1, %r1, %r1, %r1};
    fence.proxy.async.shared::cta;"""
    ends = "cp.async.wait_all; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    if "complete_tx" in copy:
        ends = "{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+512], 0; @!P bra A; }"
    given = {"shared": 1024, "threads": 1, "async_mode": mode}
    run(body + copy.format(32) + ends, source, **given)
    fails(body + copy.format(36) + ends, "memory", match, source, **given)


def test_a_copy_with_a_cache_hint_has_a_source_size_too():
    source, out = aligned(np.arange(1, 5, dtype=np.uint32)), np.zeros((2, 4), np.uint32)
    copy = "cp.async.cg.shared.global.L2::cache_hint [smem+{}], [%d100], 16,{} %d1;"
    run(
        f"""createpolicy.fractional.L2::evict_first.b64 %d1; mov.b32 %r4, 8;
    {copy.format(0, " %r4,")} {copy.format(16, "")} cp.async.wait_all;
    ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [smem]; st.global.v4.b32 [%d101], {{%r5, %r6, %r7, %r8}};
    ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [smem+16]; st.global.v4.b32 [%d101+16], {{%r5, %r6, %r7, %r8}};""",
        source,
        out,
        shared=512,
        threads=1,
    )
    np.testing.assert_array_equal(out, [[1, 2, 0, 0], [1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("copy", "what"),
    [
        ("ca.shared.global [smem], [%d100], 5", "cp.async.ca.shared.global [smem], [%d100], 5"),
        ("cg.shared.global [smem], [%d100], 4", "cp.async.cg.shared.global [smem], [%d100], 4"),
        ("ca.shared.global [smem], [%d100], 16, 8, %d1", "cp.async.ca.shared.global [smem], [%d100], 16, 8, %d1"),
        ("ca.shared.global [smem], [%d100], 16, %p1", "a predicate that ignores the source in 'cp.async.ca"),
        ("cg.shared.global.L2::cache_hint [smem], [%d100], 16, %p1, %d1", "a predicate that ignores the source in"),
    ],
)
def test_copies_with_other_operands_are_refused(copy, what):
    with pytest.raises(PtxError, match=re.escape(f"not implemented: {what}")):
        run(f"cp.async.{copy};", np.zeros(64, np.uint32), shared=512)


def test_a_copy_of_no_bytes_may_have_any_global_address():
    body = "cp.async.cg.shared.global [smem], [%d100+4], 16, 0; cp.async.wait_all;"
    run(body, aligned(np.zeros(64, np.uint32)), shared=512, threads=1)


@pytest.mark.parametrize(
    ("wait", "there"),
    [
        ("cp.async.commit_group; cp.async.wait_group 0;", True),
        ("cp.async.wait_all;", True),
        ("cp.async.wait_group 0;", False),
        ("cp.async.commit_group; cp.async.wait_group 1;", False),
        ("cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;", True),
    ],
)
def test_a_wait_is_for_groups_that_were_committed(wait, there):
    """But `wait_all` is for all."""
    source = np.arange(4, dtype=np.uint32)
    copy = "mov.b32 %r1, smem; cp.async.cg.shared.global [%r1], [%d100], 16;"
    body = f"{copy} {wait} ld.shared.b32 %r2, [smem+4]; cp.async.wait_all;"
    given = {"shared": 512, "threads": 1, "async_mode": "late"}
    if there:
        run(body, source, happens_before=True, **given)
    else:
        fails(body, "poison", "reads shared memory that nobody wrote", source, **given)


@pytest.mark.parametrize("mode", ["late", "random"])
def test_a_cta_must_not_end_before_work_on_its_memory(mode):
    source = np.arange(128, dtype=np.uint32)
    start = "mov.b32 %r1, smem; cp.async.cg.shared.global [%r1], [%d100], 16, 16;"
    wait = "cp.async.commit_group; cp.async.wait_group 0;"
    run(start + wait, source, shared=512, threads=1, async_mode=mode)
    caught = []
    for seed in range(5):  # at random, the copy may be over in time
        try:
            run(start, source, shared=512, threads=1, async_mode=mode, seed=seed)
        except EmulationError as error:
            caught.append(error.kind)
    assert caught and set(caught) == {"exit"}
    assert mode == "random" or len(caught) == 5


def test_atomics():
    out = np.zeros(4, np.uint32)
    run(
        """atom.global.add.u32 %r1, [%d100], 1; red.global.max.u32 [%d100+4], %r1000;
    atom.global.cas.b32 %r2, [%d100+8], 0, %r1000;
    red.global.or.b32 [%d100+12], %r1000;""",
        out,
        threads=64,
    )
    np.testing.assert_array_equal(out, [64, 63, 1, 63])


def test_results_show_registers_that_nobody_wrote():
    """A register that is not written on some way to its use, where what is in it decides; and the same, written."""
    store = "mad.wide.u32 %d1, %r1001, 4, %d100; st.global.b32 [%d1], %r3;"
    half = "setp.lt.u32 %p1, %r1001, 16; @%p1 mov.u32 %r2, 1; and.b32 %r3, %r2, 1; "

    def stored(body: str, seed: int) -> list[int]:
        out = np.zeros(32, np.uint32)
        run(body + store, out, seed=seed)
        return out.tolist()

    assert stored(half, 0) == [1] * 32
    unwritten = [stored(half, seed) for seed in range(1, 5)]
    assert all(found[:16] == [1] * 16 and 0 < sum(found[16:]) < 16 for found in unwritten)
    assert len({tuple(found) for found in unwritten}) == 4
    assert all(stored("mov.u32 %r2, 0; " + half, seed) == [1] * 16 + [0] * 16 for seed in range(5))
