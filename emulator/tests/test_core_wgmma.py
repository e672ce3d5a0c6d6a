"""wgmma against numpy: operand kinds, operand places, signs, and what its synchronisation means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_kernels import FILL, aligned, run
from tsmla_emulator.run.machine import EmulationError
from tsmla_emulator.run.ptx.model import NotImplementedInstruction

A_AT, B_AT = 0, 0x8000
KINDS = {
    "bf16": (torch.bfloat16, 16),
    "f16": (torch.float16, 16),
    "e4m3": (torch.float8_e4m3fn, 32),
    "e5m2": (torch.float8_e5m2, 32),
}


def operand(rows: int, depth: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [rows, depth * size], the values as float32) of small numbers that products sum exactly."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(-4, 5, (rows, depth)).astype(np.float32)) / 2
    typed = values.to(KINDS[kind][0])
    return typed.view(torch.uint8).numpy().reshape(rows, -1), typed.float().numpy()


def layout(data: np.ndarray, size: int, swizzle: int, rows_first: bool) -> tuple[np.ndarray, int, int]:
    """(image of shared memory, leading bytes, stride bytes) in a canonical layout; data is [rows, depth] elements."""
    rows, depth = data.shape[0], data.shape[1] // size
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle]
    width = swizzle or 16
    if rows_first:
        leading, stride = (depth * width, 8 * width) if swizzle else (rows * 16 // (16 // size) * 8, 128)
    else:
        leading, stride = (1, 8 * width) if swizzle else (rows * 16, 128)
    image = np.zeros(0x8000, np.uint8)
    for r in range(rows):
        for k in range(depth):
            rb, kb = r * size, k * size
            if rows_first and swizzle:
                place = rb // width * leading + rb % width + k % 8 * width + k // 8 * stride
            elif rows_first:
                place = rb // 16 * stride + rb % 16 + k % 8 * 16 + k // 8 * leading
            elif swizzle:
                place = r // 8 * stride + r % 8 * width + kb
            else:
                place = r // 8 * stride + r % 8 * 16 + kb // 16 * leading + kb % 16
            place ^= place >> 3 & mask
            image[place : place + size] = data[r, k * size : (k + 1) * size]
    return image, leading, stride


def descriptor(at: int, leading: int, stride: int, swizzle: int) -> int:
    code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return (0x400 + at) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | code << 62


SYNC = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def results(n: int) -> str:
    return "{" + ", ".join(f"%r{100 + i}" for i in range(n // 2)) + "}"


def save(n: int) -> str:
    """Every accumulator register to out[register][thread]."""
    lines = "mad.wide.u32 %d3, %r1000, 4, %d101;"
    return lines + "".join(f"st.global.b32 [%d3+{512 * i}], %r{100 + i};" for i in range(n // 2))


def gathered(out: np.ndarray, n: int) -> np.ndarray:
    """[64, n] from the registers, by the accumulator layout of the PTX documentation."""
    c = np.zeros((64, n), np.float32)
    for register in range(n // 2):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
            c[row, register // 4 * 8 + 2 * (lane % 4) + register % 2] = out[register, thread]
    return c


def product(
    n,
    kind_a,
    kind_b,
    *,
    a_swizzle=128,
    b_swizzle=128,
    a_rows=False,
    b_rows=False,
    before="",
    tail="",
    after="",
    **options,
):
    size, depth = torch.finfo(KINDS[kind_a][0]).bits // 8, KINDS[kind_a][1]
    a, a_values = operand(64, depth, kind_a, 1)
    b, b_values = operand(n, depth, kind_b, 2)
    image = aligned(np.zeros(0x10000, np.uint8))
    a_image, a_leading, a_stride = layout(a, size, a_swizzle, a_rows)
    b_image, b_leading, b_stride = layout(b, size, b_swizzle, b_rows)
    image[A_AT : A_AT + a_image.size], image[B_AT : B_AT + b_image.size] = a_image, b_image
    out = aligned(np.zeros((n // 2, 128), np.float32))
    places = f", {int(a_rows)}, {int(b_rows)}" if size == 2 else ""
    body = (
        FILL
        + f"""
    mov.b64 %d10, {descriptor(A_AT, a_leading, a_stride, a_swizzle)};
    mov.b64 %d11, {descriptor(B_AT, b_leading, b_stride, b_swizzle)};
    {before}
    wgmma.fence.sync.aligned;
    setp.ne.b32 %p2, 0, 0;
    wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind_a}.{kind_b} {results(n)}, %d10, %d11, %p2, 1, 1{places};
    {tail or SYNC}
    """
        + save(n)
        + after
    )
    run(body, image, out, threads=128, shared=0x10000, **options)
    return gathered(out, n), a_values @ b_values.T, a_values, b_values


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize(("kind_a", "kind_b"), [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_both_operands_in_shared_memory(kind_a, kind_b, mode):
    got, expected, _, _ = product(64, kind_a, kind_b, a_swizzle=32, b_swizzle=32, async_mode=mode, happens_before=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rows_first", [False, True])
def test_layouts_of_the_second_operand(swizzle, rows_first):
    got, expected, _, _ = product(128, "bf16", "bf16", b_swizzle=swizzle, b_rows=rows_first)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows_first", [False, True])
def test_layouts_of_the_first_operand(rows_first):
    got, expected, _, _ = product(8, "f16", "f16", a_swizzle=128, a_rows=rows_first)
    np.testing.assert_array_equal(got, expected)


def by_registers(kind: str, tail: str = SYNC, **options) -> tuple[np.ndarray, np.ndarray]:
    """A product whose first operand lies in %r50 to %r53, and what it should be."""
    size, depth = torch.finfo(KINDS[kind][0]).bits // 8, KINDS[kind][1]
    a, a_values = operand(64, depth, kind, 5)
    b, b_values = operand(16, depth, kind, 6)
    registers = aligned(np.zeros((4, 128), np.uint32))
    per = 4 // size
    for q in range(4):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            row, column = 16 * warp + lane // 4 + 8 * (q % 2), per * (lane % 4) + 4 * per * (q // 2)
            registers[q, thread] = a[row, column * size : (column + per) * size].copy().view(np.uint32)[0]
    image = aligned(np.zeros(0x10000, np.uint8))
    b_image, leading, stride = layout(b, size, 32, False)
    image[B_AT : B_AT + b_image.size] = b_image
    out = aligned(np.zeros((8, 128), np.float32))
    loads = "mad.wide.u32 %d4, %r1000, 4, %d102;" + "".join(
        f"ld.global.b32 %r{50 + q}, [%d4+{512 * q}];" for q in range(4)
    )
    transposed = ", 0" if size == 2 else ""
    body = (
        FILL
        + loads
        + f"""
    mov.b64 %d11, {descriptor(B_AT, leading, stride, 32)};
    wgmma.fence.sync.aligned;
    setp.ne.b32 %p2, 0, 0;
    wgmma.mma_async.sync.aligned.m64n16k{depth}.f32.{kind}.{kind}
        {results(16)}, {{%r50, %r51, %r52, %r53}}, %d11, %p2, 1, 1{transposed};
    {tail}
    """
        + save(16)
    )
    run(body, image, out, registers, threads=128, shared=0x10000, **options)
    return gathered(out, 16), a_values @ b_values.T


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_the_first_operand_in_registers(kind):
    got, expected = by_registers(kind, async_mode="late", happens_before=True)
    np.testing.assert_array_equal(got, expected)


COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
WRITES = ["mov.b32 %r50, 0;", "ld.shared.v2.b32 {%r60, %r51}, [smem];", "mov.b32 %r103, 0;"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "tail", ["{write}" + COMMIT + WAIT, COMMIT + "{write}" + WAIT, COMMIT + WAIT.replace("0", "1") + "{write}" + WAIT]
)
def test_registers_of_a_product_are_not_written_before_its_wait(tail, write):
    with pytest.raises(EmulationError, match="written before a wgmma.wait_group has waited for it") as caught:
        by_registers("bf16", tail.replace("{write}", write), happens_before=True)
    assert caught.value.kind == "race"


@pytest.mark.parametrize("write", WRITES[:2])
@pytest.mark.parametrize("tail", [COMMIT + WAIT, COMMIT + COMMIT + WAIT.replace("0", "1")])
def test_registers_of_a_product_may_be_written_behind_its_wait(tail, write):
    got, expected = by_registers("bf16", tail + write, async_mode="late", happens_before=True)
    np.testing.assert_array_equal(got, expected)


def test_a_product_reads_its_registers_when_it_runs():
    got, expected = by_registers("bf16", WRITES[0] + SYNC, async_mode="late")
    assert not np.array_equal(got, expected)


def test_registers_of_a_product_keep_their_places_until_it_is_over():
    others = "".join(f"mov.b32 %r{200 + i}, 7; st.shared.b32 [smem], %r{200 + i};" for i in range(20))
    loop = f"LOOP: {COMMIT} @%p3 bra DONE; {others} mov.pred %p3, 1; bra LOOP; DONE: {WAIT}"
    got, expected = by_registers("bf16", "mov.pred %p3, 0;" + loop, async_mode="late", poison=False)
    np.testing.assert_array_equal(got, expected)


def again(scale: int, signs: str = "1, 1") -> str:
    return f"""setp.ne.b32 %p3, {scale}, 0;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {results(16)}, %d10, %d11, %p3, {signs}, 0, 0; {SYNC}"""


@pytest.mark.parametrize(
    ("tail", "factor"), [(again(1), 2), (again(0), 1), (again(1, "-1, 1"), 0), (again(1, "-1, -1"), 2)]
)
def test_accumulation_and_signs(tail, factor):
    got, expected, _, _ = product(16, "bf16", "bf16", tail=tail, async_mode="late")
    np.testing.assert_array_equal(got, factor * expected)


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
@pytest.mark.parametrize("tail", ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"])
def test_results_without_commit_or_wait_are_poison(tail, mode):
    got, _, _, _ = product(16, "bf16", "bf16", tail=tail, after=SYNC, async_mode=mode)
    assert np.isnan(got).all()


def test_results_land_group_by_group():
    tail = "wgmma.commit_group.sync.aligned; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;"
    got, expected, _, _ = product(16, "bf16", "bf16", tail=tail, async_mode="late")
    np.testing.assert_array_equal(got, expected)


def refused(match: str, kind: str, **options) -> None:
    with pytest.raises(EmulationError, match=match) as caught:
        product(16, "bf16", "bf16", **options)
    assert caught.value.kind == kind


def test_touched_registers_need_a_fence():
    touched = SYNC + "mov.b32 %r100, 0;"
    refused("accessed since the last wgmma.fence", "race", tail=touched + again(1), happens_before=True)
    product(16, "bf16", "bf16", tail=touched + "wgmma.fence.sync.aligned;" + again(1), happens_before=True)


def test_a_warp_that_stays_away_is_a_deadlock():
    missing = "setp.ge.u32 %p9, %r1000, 96; @%p9 ret;"
    refused("wgmma instructions that not all warps of the warpgroup have issued", "deadlock", before=missing)


def test_unknown_descriptors_are_refused():
    refused("with base offset 1", "not implemented", before="or.b64 %d11, %d11, 562949953421312;")
    refused("shared offset 0x", "memory", before="or.b64 %d11, %d11, 0x3fff;")


@pytest.mark.parametrize(
    "shape",
    ["m64n12k16.f32.bf16.bf16", "m64n264k16.f32.bf16.bf16", "m64n16k32.f32.bf16.bf16", "m64n16k16.f32.e4m3.e4m3"],
)
def test_shapes_that_do_not_exist(shape):
    vector = ", ".join(f"%r{100 + i}" for i in range(int(shape[4 : shape.index("k")]) // 2))
    body = f"wgmma.mma_async.sync.aligned.{shape} {{{vector}}}, %d10, %d11, %p2, 1, 1;"
    with pytest.raises(NotImplementedInstruction, match=shape):
        run(body, np.zeros(1, np.uint32), threads=128)
