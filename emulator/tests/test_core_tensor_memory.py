"""tcgen05: allocation, moves, products in every accumulator layout, commits, and what a warp may not do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_kernels import FILL, aligned, run
from test_core_wgmma import KINDS, layout, operand
from tsmla_emulator.run.machine import EmulationError

A_AT, B_AT, BARRIER, ADDRESS = 0, 0x8000, 0x10000, 0x10010
ALLOC = f"""
setp.lt.u32 %p20, %r1000, 32;
@!%p20 bra ALLOCATED;
tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [smem+{ADDRESS}], COLUMNS;
tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;
ALLOCATED:
setp.ne.u32 %p21, %r1000, 0;
@%p21 bra INITIALISED;
mbarrier.init.shared.b64 [smem+{BARRIER}], 1;
INITIALISED:
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r500, [smem+{ADDRESS}];
and.b32 %r501, %r1000, 96; shl.b32 %r501, %r501, 16; add.s32 %r502, %r500, %r501;
"""
FREE = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
@!%p20 bra FREED;
tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r500, COLUMNS;
FREED:
"""
WAIT = f"{{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+{BARRIER}], 0; @!P bra A; }}"
AFTER = "tcgen05.fence::after_thread_sync;"


def registers(count: int, first: int = 100) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def emulate(
    body: str,
    *arguments,
    columns: int = 512,
    group: int = 1,
    threads: int = 128,
    free: bool = True,
    allocate: str = ALLOC,
    **options,
):
    text = allocate + body + (FREE if free else "")
    text = text.replace("GROUP", str(group)).replace("COLUMNS", str(columns))
    run(text, *arguments, threads=threads, shared=0x10100, arch="sm_100a", **options)


def whole_tmem(columns: int) -> str:
    """out[column][thread] from columns 0 .. columns, each warp its own 32 lanes."""
    lines = "mad.wide.u32 %d3, %r1000, 4, %d101;"
    for start in range(0, columns, 8):
        lines += (
            f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [%r502+{start}]; tcgen05.wait::ld.sync.aligned;"
        )
        lines += "".join(f"st.global.b32 [%d3+{512 * (start + i)}], %r{100 + i};" for i in range(8))
    return lines


SHAPES = [("32x32b", 4, 4), ("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 2, 8)]


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize(("shape", "repeat", "count"), SHAPES)
def test_stores_put_registers_where_the_shape_says(shape, repeat, count, mode):
    out = aligned(np.zeros((16, 128), np.uint32))
    numbers = "".join(f"mad.lo.s32 %r{600 + i}, %r1000, 100, {i};" for i in range(count))
    clear = "".join(f"mov.b32 %r{100 + i}, -1;" for i in range(16))
    body = (
        clear
        + numbers
        + f"""
    tcgen05.st.sync.aligned.32x32b.x16.b32 [%r502], {registers(16)};
    tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%r502], {registers(count, 600)};
    tcgen05.wait::st.sync.aligned;
    """
        + whole_tmem(16)
    )
    emulate(body, np.zeros(1, np.uint32), out, columns=32, async_mode=mode, happens_before=True)
    expected = np.full((16, 128), 0xFFFFFFFF, np.uint32)
    for thread in range(128):
        first, lane = thread // 32 * 32, thread % 32
        for r in range(count):
            row, column = {
                "32x32b": (lane, r),
                "16x64b": (lane // 4 + 8 * (lane % 2), lane // 2 % 2 + 2 * r),
                "16x128b": (lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)),
                "16x256b": (lane // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r // 4)),
            }[shape]
            expected[column, first + row] = thread * 100 + r
    np.testing.assert_array_equal(out, expected)
    same = body.replace(
        whole_tmem(16),
        f"""
    tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers(count, 700)}, [%r502]; tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r1000, 4, %d101;"""
        + "".join(f"st.global.b32 [%d3+{512 * i}], %r{700 + i};" for i in range(count)),
    )
    emulate(same, np.zeros(1, np.uint32), out, columns=32, async_mode=mode, happens_before=True)
    np.testing.assert_array_equal(out[:count], np.arange(128) * 100 + np.arange(count)[:, None])


def test_loads_can_reduce():
    out = aligned(np.zeros((1, 128), np.float32))
    values = "".join(
        f"cvt.rn.f32.u32 %r{100 + i}, %r1000; add.f32 %r{100 + i}, %r{100 + i}, 0f{v:08X};"
        for i, v in enumerate([0x3F800000, 0x40400000, 0xC0000000, 0x7FC00000])
    )
    body = (
        values
        + f"""
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r502], {registers(4)}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x4.max.f32 {registers(4, 200)}, %r300, [%r502]; tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r1000, 4, %d101; st.global.b32 [%d3], %r300;
    """
    )
    emulate(body, np.zeros(1, np.uint32), out, columns=32)
    np.testing.assert_array_equal(out[0], np.arange(128, dtype=np.float32) + 3)


def instruction_descriptor(kind: str, m: int, n: int, *, b_rows: bool = False, negate: bool = False) -> int:
    code = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1}[kind]
    return 1 << 4 | code << 7 | code << 10 | negate << 13 | b_rows << 16 | n // 8 << 17 | m // 16 << 24


def smem_descriptor(at: int, leading: int, stride: int, swizzle: int) -> int:
    return (
        (0x400 + at) >> 4
        | leading >> 4 << 16
        | stride >> 4 << 32
        | 1 << 46
        | {0: 0, 128: 2, 64: 4, 32: 6}[swizzle] << 61
    )


def product(
    kind: str,
    m: int,
    n: int,
    *,
    group=1,
    ws=False,
    swizzle=128,
    b_rows=False,
    negate=False,
    twice=False,
    wait=WAIT + AFTER,
    commit=True,
    committer=0,
    **options,
):
    """(accumulator [ctas, columns, lanes], expected [m, n]) of one product, or two accumulated. committer: the lane
    that commits them."""
    size, depth = torch.finfo(KINDS[kind][0]).bits // 8, KINDS[kind][1]
    a, a_values = operand(m, depth, kind, 1)
    b, b_values = operand(n, depth, kind, 2)
    images = aligned(np.zeros((group, 0x10000), np.uint8))
    for cta in range(group):
        a_image, a_leading, a_stride = layout(a[cta * m // group : (cta + 1) * m // group], size, swizzle, False)
        b_image, b_leading, b_stride = layout(b[cta * n // group : (cta + 1) * n // group], size, swizzle, b_rows)
        images[cta, :0x8000], images[cta, 0x8000:] = a_image, b_image
    out = aligned(np.full((group, 256, 128), np.nan, np.float32))
    columns = (
        n
        if not (ws or group == 2)
        else {32: n // 4, 64: n // 2, 128: n // 2, 256: n}[m]
        if m != 128 or group == 2
        else n
    )
    name = "f16" if size == 2 else "f8f6f4"
    idesc = instruction_descriptor(kind, m, n, b_rows=b_rows, negate=negate)
    masks = "" if ws else ", {" + ", ".join(["%r40"] * 4 * group) + "}"
    mma = f"tcgen05.mma{'.ws' if ws else ''}.cta_group::{group}.kind::{name} [%r500], %d10, %d11, %r41{masks}, %p5;"
    where = "multicast::cluster.b64 [%r42], 3;" if group == 2 else "b64 [%r42];"
    body = (
        "mov.u32 %r31, %cluster_ctarank;"
        "mad.wide.u32 %d100, %r31, 65536, %d100; mad.wide.u32 %d101, %r31, 131072, %d101;"
        + FILL
        + ("barrier.cluster.arrive; barrier.cluster.wait;" + AFTER if group == 2 else "")
        + f"""
    add.s32 %r30, %r1000, %r31; setp.ne.s32 %p6, %r30, 0; setp.eq.s32 %p7, %r31, 1; or.pred %p6, %p6, %p7;
    @%p6 bra FOLLOW;
    mov.b64 %d10, {smem_descriptor(A_AT, a_leading, a_stride, swizzle)};
    mov.b64 %d11, {smem_descriptor(B_AT, b_leading, b_stride, swizzle)};
    mov.b32 %r40, 0; mov.b32 %r41, {idesc}; mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER}; mov.pred %p5, 0;
    {mma}
    mov.pred %p5, 1;
    {mma if twice else ""}
FOLLOW:
    bar.warp.sync -1;
    setp.ne.u32 %p8, %r1000, {committer}; or.pred %p8, %p8, %p7; mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER};
    {f"@!%p8 tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.{where}" if commit else ""}
    bar.warp.sync -1;
    """
        + wait
        + whole_tmem(columns)
    )
    if group == 2:
        body += "barrier.cluster.arrive; barrier.cluster.wait;"
    emulate(body, images, out, group=group, grid=group, cluster=group, **options)
    expected = a_values @ b_values.T * (2 if twice else 1) * (-1 if negate else 1)
    return out[:, :columns].transpose(0, 2, 1), expected


def placed(expected: np.ndarray, letter: str, lanes: int = 128) -> np.ndarray:
    """[ctas, lanes, columns] with NaN where the layout writes nothing."""
    m, n = expected.shape
    if letter in "DA":
        return expected.reshape(-1, 128, n)
    if letter == "E":
        return np.concatenate([expected[:, : n // 2], expected[:, n // 2 :]])[None]
    if letter == "G":
        return np.concatenate(np.split(expected, 4, axis=1))[None]
    if letter == "B":
        return np.stack(
            [np.concatenate([half[:, : n // 2], half[:, n // 2 :]]) for half in (expected[:64], expected[64:])]
        )
    result = np.full((1, 128, n), np.nan, np.float32)
    for r in range(m):
        result[0, r // 16 * 32 + r % 16] = expected[r]
    return result


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize(
    ("kind", "m", "n", "group", "ws", "letter"),
    [
        ("bf16", 128, 64, 1, False, "D"),
        ("e4m3", 128, 256, 1, False, "D"),
        ("e5m2", 128, 64, 1, True, "D"),
        ("f16", 64, 128, 1, True, "E"),
        ("bf16", 32, 128, 1, True, "G"),
        ("bf16", 256, 64, 2, False, "A"),
        ("e4m3", 128, 128, 2, False, "B"),
    ],
)
def test_accumulator_layouts(kind, m, n, group, ws, letter, mode):
    got, expected = product(kind, m, n, group=group, ws=ws, async_mode=mode, happens_before=True)
    np.testing.assert_array_equal(got, placed(expected, letter))


def test_layout_f_leaves_half_of_the_lanes_unwritten():
    with pytest.raises(EmulationError, match="tensor memory that nobody wrote: lane 16, column 0"):
        product("bf16", 64, 32)
    got, expected = product("bf16", 64, 32, poison=False)
    np.testing.assert_array_equal(got, placed(expected, "F"))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("b_rows", [False, True])
def test_descriptor_layouts(swizzle, b_rows):
    got, expected = product("bf16", 128, 128, swizzle=swizzle, b_rows=b_rows)
    np.testing.assert_array_equal(got[0], expected)


def test_products_accumulate_and_negate():
    got, expected = product("bf16", 128, 32, twice=True, negate=True, async_mode="late")
    np.testing.assert_array_equal(got[0], expected)


def of_tensor_memory(
    a: np.ndarray, b: np.ndarray, m: int, group: int = 1, ws: bool = False, columns: int = 32, **options
) -> np.ndarray:
    """[ctas, lanes, columns] of the product of bf16 A [ctas, lanes, 32 bytes], as it lies in tensor memory, and B."""
    images = aligned(np.zeros((group, 0x10000), np.uint8))
    for cta, share in enumerate(np.split(b, group)):
        images[cta, B_AT:], leading, stride = layout(share, 2, 128, False)
    out = aligned(np.zeros((group, columns, 128), np.float32))
    loads = "".join(f"ld.global.b32 %r{50 + i}, [%d4+{4 * i}];" for i in range(8))
    idesc = instruction_descriptor("bf16", m, len(b))
    where = "multicast::cluster.b64 [%r42], 3;" if group == 2 else "b64 [%r42];"
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""
    body = f"""
    mov.u32 %r31, %cluster_ctarank; mad.wide.u32 %d100, %r31, 65536, %d100;
    mad.wide.u32 %d101, %r31, {512 * columns}, %d101; mad.wide.u32 %d102, %r31, 4096, %d102;
    {FILL} mad.wide.u32 %d4, %r1000, 32, %d102; {loads}
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r502+64], {registers(8, 50)}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; {meet} tcgen05.fence::after_thread_sync;
    add.s32 %r30, %r1000, %r31; setp.ne.s32 %p6, %r30, 0; setp.eq.s32 %p7, %r31, 1; or.pred %p6, %p6, %p7;
    @%p6 bra FOLLOW;
    mov.b64 %d11, {smem_descriptor(B_AT, leading, stride, 128)};
    mov.b32 %r40, 0; mov.b32 %r41, {idesc}; mov.pred %p5, 0; add.s32 %r43, %r500, 64;
    tcgen05.mma{".ws" if ws else ""}.cta_group::{group}.kind::f16 [%r500], [%r43], %d11, %r41, %p5;
    mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER};
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.{where}
    FOLLOW: bar.warp.sync -1;
    {WAIT} {AFTER} {whole_tmem(columns)} {meet}
    """
    given = {"group": group, "grid": group, "cluster": group, "happens_before": True}
    emulate(body, images, out, aligned(a), **{**given, "async_mode": "late", **options})
    return out.transpose(0, 2, 1)


def test_the_first_operand_in_tensor_memory():
    a, a_values = operand(128, 16, "bf16", 3)
    b, b_values = operand(32, 16, "bf16", 4)
    np.testing.assert_array_equal(of_tensor_memory(a[None], b, 128)[0], a_values @ b_values.T)


@pytest.mark.parametrize(("m", "group", "ws"), [(64, 1, True), (128, 2, False)])
def test_each_half_of_the_columns_multiplies_the_lanes_it_lies_in(m, group, ws):
    """PTX has 64 rows of A in both halves of the lanes; NVIDIA's sparse attention has two matrices there."""
    a, a_values = operand(128 * group, 16, "bf16", 3)
    b, b_values = operand(64, 16, "bf16", 4)
    lanes, two_values = a.reshape(group, 128, 32), a_values.reshape(group, 2, 64, 16)

    def expected(left: np.ndarray) -> np.ndarray:
        return np.concatenate([left[:, 0] @ b_values[:32].T, left[:, 1] @ b_values[32:].T], axis=1)

    got = of_tensor_memory(lanes, b, m, group, ws, lenient_tensor=True)
    np.testing.assert_array_equal(got, expected(two_values))
    with pytest.raises(EmulationError, match=f"M {m}: A differs between lane 0 and lane 64"):
        of_tensor_memory(lanes, b, m, group, ws)
    same = np.concatenate([lanes[:, :64], lanes[:, :64]], axis=1)
    got = of_tensor_memory(same, b, m, group, ws)
    np.testing.assert_array_equal(got, expected(two_values[:, [0, 0]]))
