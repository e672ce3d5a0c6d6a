"""tcgen05.cp, from shared to tensor memory, against the shapes of the PTX ISA: places, pairs of CTAs, and its order.

9.7.16.2.3 and 9.7.16.9.2 name the shapes, 9.7.16.6.2 what follows what.
"""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import FILL, aligned, run
from test_core_tensor_memory import (
    AFTER,
    B_AT,
    BARRIER,
    WAIT,
    emulate,
    instruction_descriptor,
    registers,
    smem_descriptor,
    whole_tmem,
)
from test_core_wgmma import layout, operand
from tsmla_emulator.run.machine import EmulationError
from tsmla_emulator.run.ptx.model import PtxError

SHAPES = {
    "128x256b": (128, 8),
    "128x128b": (128, 4),
    "4x256b": (4, 8),
    "64x128b.warpx2::02_13": (64, 4),
    "64x128b.warpx2::01_23": (64, 4),
    "32x128b.warpx4": (32, 4),
}
"""Shape and copies -> rows and 32-bit columns of the source."""
NOBODY = 0xFFFFFFFF
CLEAR = "".join(f"mov.b32 %r{100 + i}, -1;" for i in range(8)) + (
    f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r502+8], {registers(8)}; tcgen05.wait::st.sync.aligned;"
    "tcgen05.fence::before_thread_sync; bar.sync 0;" + AFTER
)
COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.{}"
DONE = f"mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER};" + COMMIT.format(1, "b64 [%r42];")


def arrived(source: np.ndarray, shape: str) -> np.ndarray:
    """[lanes, 8 columns] of tensor memory after a copy of `source` [rows, columns]."""
    result = np.full((128, 8), NOBODY, np.uint32)
    columns = source.shape[1]
    name, _, warps = shape.partition(".")
    if name == "4x256b":
        result[::32, :columns] = source
    elif warps == "warpx2::01_23":  # warps 0 and 1 have the first 32 rows, 2 and 3 the others
        for warp in range(4):
            result[32 * warp : 32 * warp + 32, :columns] = source[32 * (warp // 2) : 32 * (warp // 2) + 32]
    else:  # 02_13: warps 0 and 2 have the first 32 rows, 1 and 3 the others
        result[:, :columns] = np.tile(source, (128 // len(source), 1))
    return result


def filled(shape: str, swizzle: int = 128, group: int = 1, to: str = "[%r500+8]", **options):
    """(tensor memory [ctas, lanes, columns] from column 8 on, sources) after the first thread's copy."""
    rows, columns = SHAPES[shape]
    sources = np.random.default_rng(5).integers(0, 2**32, (group, rows, columns), dtype=np.uint32)
    image = aligned(np.zeros((group, 0x10000), np.uint8))
    for cta, source in enumerate(sources):
        image[cta, :0x8000], leading, stride = layout(source.view(np.uint8), 2, swizzle, False)
    out = aligned(np.zeros((group, 16, 128), np.uint32))
    where = "multicast::cluster.b64 [%r42], 3;" if group == 2 else "b64 [%r42];"
    body = f"""
    mov.u32 %r31, %cluster_ctarank;
    mad.wide.u32 %d100, %r31, 65536, %d100; mad.wide.u32 %d101, %r31, 8192, %d101;
    {FILL} {CLEAR} {"barrier.cluster.arrive; barrier.cluster.wait;" + AFTER if group == 2 else ""}
    add.s32 %r30, %r1000, %r31; setp.ne.s32 %p6, %r30, 0; setp.eq.s32 %p7, %r31, 1; or.pred %p6, %p6, %p7;
    @%p6 bra FOLLOW;
    mov.b64 %d10, {smem_descriptor(0, leading, stride, swizzle)};
    tcgen05.cp.cta_group::{group}.{shape} {to}, %d10;
    mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER};
    {COMMIT.format(group, where)}
    FOLLOW: bar.warp.sync -1;
    {WAIT} {AFTER}
    add.s32 %r502, %r502, 8; {whole_tmem(8)}
    {"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
    """
    emulate(body, image, out, columns=32, group=group, grid=group, cluster=group, **options)
    return out[:, :8].transpose(0, 2, 1), sources


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_fills_the_lanes_that_it_names(shape, swizzle, mode):
    got, (source,) = filled(shape, swizzle, async_mode=mode, happens_before=True)
    np.testing.assert_array_equal(got[0], arrived(source, shape))


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_each_cta_of_a_pair_copies_its_own(mode):
    got, sources = filled("128x256b", group=2, async_mode=mode, happens_before=True)
    for one, source in zip(got, sources, strict=True):
        np.testing.assert_array_equal(one, arrived(source, "128x256b"))


def test_what_a_copy_may_not_be():
    with pytest.raises(EmulationError, match="tcgen05.cp to column 9, not a multiple of 4"):
        filled("128x128b", to="[%r500+9]")
    with pytest.raises(EmulationError, match="tcgen05.cp touches tensor memory column 32, which is not allocated"):
        filled("128x256b", to="[%r500+28]")
    with pytest.raises(EmulationError, match="tcgen05.cp of 128 rows to tensor memory lane 1"):
        filled("128x256b", to="[%r500+65536]")
    for refused in ("128x256b.b8x16.b6x16_p32", "64x128b", "32x128b.warpx2::02_13"):
        with pytest.raises(PtxError, match=f"not implemented: tcgen05.cp.cta_group::1.{refused}"):
            run(f"tcgen05.cp.cta_group::1.{refused} [%r1], %d1;", np.zeros(1, np.uint32), arch="sm_100a")


def multiplied(
    first: str, rest: str = "", until: str = WAIT + AFTER, columns: int = 32, **options
) -> tuple[np.ndarray, ...]:
    """(what 32 columns hold, values of A, values of B) after one thread's work: `first`, a commit, and `rest`.

    first, rest: `cp`, which copies A to column 64, and `mma`, whose sums are the columns from 0 on.
    """
    a, a_values = operand(128, 16, "bf16", 3)
    b, b_values = operand(32, 16, "bf16", 4)
    image = aligned(np.zeros(0x10000, np.uint8))
    image[:B_AT], leading, stride = layout(a, 2, 128, False)
    image[B_AT:], b_leading, b_stride = layout(b, 2, 128, False)
    out = aligned(np.zeros((32, 128), np.float32))
    step = {
        "cp": "tcgen05.cp.cta_group::1.128x256b [%r43], %d10;",
        "mma": "tcgen05.mma.cta_group::1.kind::f16 [%r500], [%r43], %d11, %r41, %p5;",
    }
    body = f"""
    {FILL}
    @%p21 bra FOLLOW;
    mov.b64 %d10, {smem_descriptor(0, leading, stride, 128)};
    mov.b64 %d11, {smem_descriptor(B_AT, b_leading, b_stride, 128)};
    mov.b32 %r41, {instruction_descriptor("bf16", 128, 32)}; mov.pred %p5, 0; add.s32 %r43, %r500, 64;
    {"".join(step[name] for name in first.split())} {DONE} {"".join(step[name] for name in rest.split())}
    FOLLOW: bar.warp.sync -1;
    {until} {whole_tmem(columns)}
    """
    emulate(body, image, out, happens_before=True, **options)
    return out.T, a_values, b_values


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_a_product_follows_the_copies_before_it(mode):
    got, a, b = multiplied("cp mma", async_mode=mode)
    np.testing.assert_array_equal(got, a @ b.T)


def test_a_copy_follows_no_product():
    """Tensor cores take one after the other all the same, which `lenient_tensor` knows."""
    for mode in ("eager", "late"):
        with pytest.raises(EmulationError, match="tensor memory .* not ordered"):
            multiplied("cp mma cp", async_mode=mode)
        got, a, b = multiplied("cp mma cp mma", async_mode=mode, lenient_tensor=True)
        np.testing.assert_array_equal(got, a @ b.T)


def copied(first: str, rest: str = "", until: str = WAIT + AFTER, **options) -> None:
    """Do one thread's work, and read what was copied."""
    multiplied(first, rest, until + "add.s32 %r502, %r502, 64;", columns=8, **options)


def test_a_commit_covers_the_copies_before_it():
    copied("cp")
    with pytest.raises(EmulationError, match="tensor memory .* not ordered"):
        copied("", "cp", poison=False)


def test_what_is_copied_stays_until_it_is():
    written = "@%p21 bra STAYS; st.shared.b32 [smem], %r1000; STAYS: bar.warp.sync -1;"
    copied("cp", until=WAIT + AFTER + written)
    with pytest.raises(EmulationError, match="shared memory .* not ordered"):
        copied("cp", until=written + WAIT + AFTER)
