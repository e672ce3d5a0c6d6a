"""Instructions across lanes, divergence, special registers."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import run
from tsmla_emulator.run.machine import EmulationError

LANE = np.arange(32, dtype=np.uint32)
STORE = "mad.wide.u32 %d50, %r1000, 4, %d100; st.global.b32 [%d50], %r10;"


def result(body: str, threads: int = 32, **options) -> np.ndarray:
    out = np.zeros(threads, np.uint32)
    run(body + STORE, out, threads=threads, **options)
    return out


@pytest.mark.parametrize(
    ("mode", "amount", "clamp", "expected"),
    [
        ("idx", 5, 31, np.full(32, 5)),
        ("bfly", 3, 31, LANE ^ 3),
        ("up", 4, 0, np.where(LANE >= 4, LANE - 4, LANE)),
        ("down", 4, 31, np.where(LANE < 28, LANE + 4, LANE)),
        ("idx", 1, 31 | 0x18 << 8, (LANE & 0x18) | 1),
        ("down", 1, 31 | 0x10 << 8, np.where(LANE % 16 == 15, LANE, LANE + 1)),
    ],
)
def test_shuffles(mode, amount, clamp, expected):
    got = result(f"shfl.sync.{mode}.b32 %r10, %r1001, {amount}, {clamp}, -1;")
    np.testing.assert_array_equal(got, expected)


def test_shuffle_says_which_lanes_had_a_source():
    body = "shfl.sync.down.b32 %r11|%p1, %r1001, 30, 31, -1; selp.b32 %r10, 1, 0, %p1;"
    np.testing.assert_array_equal(result(body), LANE < 2)


def test_votes():
    body = "setp.gt.u32 %p1, %r1001, 29; vote.sync.ballot.b32 %r10, %p1, -1;"
    assert (result(body) == 0xC0000000).all()
    body = "setp.gt.u32 %p1, %r1001, 29; vote.sync.{}.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;"
    assert (result(body.format("any")) == 1).all() and (result(body.format("all")) == 0).all()


@pytest.mark.parametrize(("highest", "mask", "leader"), [(False, "0xffffffff", 0), (True, "0xffffffff", 31)])
def test_elect_names_one_leader(highest, mask, leader):
    body = f"elect.sync %r11|%p1, {mask}; selp.b32 %r10, 1, 0, %p1; mad.lo.s32 %r10, %r11, 100, %r10;"
    np.testing.assert_array_equal(result(body, elect_highest=highest), leader * 100 + (LANE == leader))


def test_elect_among_the_lanes_of_its_mask():
    body = """
    setp.lt.u32 %p3, %r1001, 5;
    mov.b32 %r10, 77;
    @%p3 bra OVER;
    elect.sync %r10|%p1, 0xffffffe0;
OVER:
    """
    np.testing.assert_array_equal(result(body), np.where(LANE < 5, 77, 5))


def test_lanes_diverge_and_meet_again():
    body = """
    mov.b32 %r10, 0;
    mov.b32 %r11, %r1001;
LOOP:
    setp.eq.u32 %p1, %r11, 0;
    @%p1 bra OUT;
    add.s32 %r10, %r10, %r11;
    sub.s32 %r11, %r11, 1;
    bra.uni LOOP;
OUT:
    bar.warp.sync -1;
    shfl.sync.bfly.b32 %r10, %r10, 31, 31, -1;
    """
    np.testing.assert_array_equal(result(body), (LANE * (LANE + 1) // 2)[::-1])


def test_lanes_that_left_are_not_waited_for():
    out = np.zeros(32, np.uint32)
    run("setp.lt.u32 %p1, %r1001, 16; @%p1 ret; bar.sync 0; mov.b32 %r10, 1;" + STORE, out)
    np.testing.assert_array_equal(out, LANE >= 16)


def test_a_predicated_write_keeps_the_other_lanes():
    body = "mov.b32 %r10, 5; setp.lt.u32 %p1, %r1001, 3; @%p1 mov.b32 %r10, 6; @!%p1 add.s32 %r10, %r10, 10;"
    np.testing.assert_array_equal(result(body), np.where(LANE < 3, 6, 15))


def test_special_registers():
    out = np.zeros((4, 64, 8), np.uint32)
    names = ["tid.x", "ntid.x", "ctaid.x", "nctaid.x", "laneid", "warpid", "cluster_ctarank", "clusterid.x"]
    body = "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 64, %r1000; mad.wide.u32 %d1, %r2, 32, %d100;"
    for i, name in enumerate(names):
        body += f"mov.u32 %r3, %{name}; st.global.b32 [%d1+{4 * i}], %r3;"
    run(body, out, threads=64, grid=4, cluster=2)
    cta, thread = np.meshgrid(np.arange(4), np.arange(64), indexing="ij")
    constant = np.ones_like(cta)
    expected = [thread, constant * 64, cta, constant * 4, thread % 32, thread // 32, cta % 2, cta // 2]
    np.testing.assert_array_equal(out, np.stack(expected, axis=-1))


def test_matrix_moves_invert_each_other():
    """stmatrix puts element (r, 2c + h) of matrix q where row address 8q + r says; ldmatrix reads it back."""
    out = np.zeros((4, 8, 8), np.uint16)
    moved = np.zeros((4, 32), np.uint32)
    body = """
    mov.b32 %r1, smem;
    shl.b32 %r2, %r1001, 4;
    add.s32 %r3, %r1, %r2;
    mov.b32 %r4, %r1001; add.s32 %r5, %r4, 256; add.s32 %r6, %r4, 512; add.s32 %r7, %r4, 768;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r4, %r5, %r6, %r7};
    bar.warp.sync -1;
    ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r3];
    mul.wide.u32 %d1, %r1001, 16;
    add.s64 %d2, %d100, %d1;
    st.global.v4.b32 [%d2], {%r11, %r12, %r13, %r14};
    ldmatrix.sync.aligned.m8n8.x4.TRANS.shared.b16 {%r21, %r22, %r23, %r24}, [%r3];
    mad.wide.u32 %d3, %r1001, 4, %d101;
    st.global.b32 [%d3], %r21; st.global.b32 [%d3+128], %r22;
    st.global.b32 [%d3+256], %r23; st.global.b32 [%d3+384], %r24;
    """
    run(body.replace(".TRANS", ""), out, moved, shared=512)
    values = LANE + 256 * np.arange(4, dtype=np.uint32)[:, None]
    np.testing.assert_array_equal(moved, values)
    np.testing.assert_array_equal(out, values.astype(np.uint32).view(np.uint16).reshape(4, 8, 8))
    run(body.replace("TRANS", "trans"), out, moved, shared=512)
    np.testing.assert_array_equal(moved.view(np.uint16).reshape(4, 8, 8), out.transpose(0, 2, 1))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_product_of_a_warp(kind):
    """mma.m16n8k16: fragments as PTX ISA draws them, of small integers, which both kinds hold."""
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(-9, 9, (16, 16)), rng.integers(-9, 9, (16, 8)), rng.integers(-99, 99, (16, 8))
    line, pair = LANE // 4, 2 * (LANE % 4)

    def halves(low, high):
        if kind == "f16":
            bits = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
        else:
            bits = [x.astype(np.float32).view(np.uint32) >> 16 for x in (low, high)]
        return bits[0] | bits[1] << 16

    places = [(line + 8 * (i & 1), pair + 8 * (i >> 1)) for i in range(4)]
    words = [halves(a[row, k], a[row, k + 1]) for row, k in places]
    words += [halves(b[pair + 8 * i, line], b[pair + 8 * i + 1, line]) for i in range(2)]
    sums = [(line + 8 * (i >> 1), pair + (i & 1)) for i in range(4)]
    words += [c[row, column].astype(np.float32).view(np.uint32) for row, column in sums]
    given, out = np.stack(words).astype(np.uint32), np.zeros((4, 32), np.float32)
    body = "mad.wide.u32 %d1, %r1001, 4, %d101; mad.wide.u32 %d2, %r1001, 4, %d100;"
    body += "".join(f"ld.global.b32 %r{10 + i}, [%d1+{128 * i}];" for i in range(10))
    body += (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r30, %r31, %r32, %r33}}, "
        "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};"
    )
    body += "".join(f"st.global.b32 [%d2+{128 * i}], %r{30 + i};" for i in range(4))
    run(body, out, given)
    product = a @ b + c
    np.testing.assert_array_equal(out, np.stack([product[row, column] for row, column in sums]))


def test_a_shuffle_by_lanes_outside_its_mask_is_refused():
    with pytest.raises(EmulationError, match="executed by lanes 0xffffffff that its mask 0x1 does not name"):
        result("shfl.sync.idx.b32 %r10, %r1001, 0, 31, 1;")


SOME = "mov.b32 %r10, 0; setp.lt.u32 %p1, %r1001, 8; setp.eq.u32 %p2, %r1001, 0;"


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.idx.b32 %r10, %r1001, 0, 31, MASK;",
        "vote.sync.ballot.b32 %r10, %p2, MASK;",
        "redux.sync.add.u32 %r10, %r1001, MASK;",
        "bar.warp.sync MASK;",
        "elect.sync %r10|%p3, MASK;",
    ],
)
def test_a_predicate_that_keeps_lanes_from_what_their_mask_names_is_refused(instruction):
    """Lanes that the mask does not name, that branched elsewhere, or that have ended, are not kept from it."""
    with pytest.raises(EmulationError, match="keeps lanes 0xffffff00 away, which its mask 0xffffffff names"):
        result(SOME + "@%p1 " + instruction.replace("MASK", "-1"))
    result(SOME + "@%p1 " + instruction.replace("MASK", "0xff"))
    result(SOME + instruction.replace("MASK", "-1"))
    result(SOME + f"@!%p1 bra OVER; {instruction.replace('MASK', '0xff')} OVER:")
    result(SOME + "@!%p1 ret;" + instruction.replace("MASK", "-1"))


@pytest.mark.parametrize("instruction", ["bar.warp.sync 1;", "elect.sync %r10|%p3, 1;"])
def test_lanes_that_a_mask_does_not_name_may_not_execute_it(instruction):
    with pytest.raises(EmulationError, match="executed by lanes 0xffffffff that its mask 0x1 does not name"):
        result(SOME + instruction)


def test_a_shuffle_from_a_lane_outside_its_mask_gives_what_nobody_wrote():
    """Lanes that have ended are outside, too."""
    part = SOME + "@!%p1 bra OVER; shfl.sync.bfly.b32 %r10, %r1001, AMOUNT, 31, 0xff; OVER:"
    ended = SOME + "@!%p1 ret; shfl.sync.bfly.b32 %r10, %r1001, AMOUNT, 31, -1;"
    for body in (part, ended):
        np.testing.assert_array_equal(result(body.replace("AMOUNT", "4"))[:8], LANE[:8] ^ 4)
        np.testing.assert_array_equal(result(body.replace("AMOUNT", "8"))[:8], np.uint32(0xFFFFFFFF))
        others = [result(body.replace("AMOUNT", "8"), seed=seed)[:8] for seed in (1, 2)]
        assert len({*others[0].tolist(), *others[1].tolist()}) == 16


def test_an_aligned_barrier_under_a_predicate_is_refused():
    with pytest.raises(
        EmulationError, match="barrier is executed under a predicate that only lanes 0xff of 0xffffffff"
    ):
        result("setp.lt.u32 %p1, %r1001, 8; @%p1 bar.sync 0; mov.b32 %r10, 0;")
