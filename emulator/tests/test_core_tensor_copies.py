"""Tile copies through tensor maps: boxes, swizzles, edges, multicast, and the pair form."""

from __future__ import annotations

import numpy as np
import pytest
from small_kernels import aligned, run
from tsmla_emulator.run.host.tensor_map import TensorMap
from tsmla_emulator.run.machine import EmulationError
from tsmla_emulator.run.ptx.model import PtxError

BARRIER = 0x8000
INIT = f"""
setp.ne.u32 %p30, %r1000, 0;
@%p30 bra READY;
mbarrier.init.shared.b64 [smem+{BARRIER}], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
"""
WAIT = f"{{ .reg .pred P; A: mbarrier.try_wait.parity.shared.b64 P, [smem+{BARRIER}], 0; @!P bra A; }}"
LOAD = "cp.async.bulk.tensor.{n}d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"


def dump(bytes_: int, argument: int) -> str:
    """All threads of a warp copy shared memory to an argument, 16 bytes each."""
    lines = "mov.b32 %r2, smem; shl.b32 %r1, %r1001, 4; add.s32 %r3, %r2, %r1;"
    lines += f"cvt.u64.u32 %d1, %r1; add.s64 %d2, %d{100 + argument}, %d1;"
    for start in range(0, bytes_, 512):
        lines += f"ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+{start}];"
        lines += f"st.global.v4.b32 [%d2+{start}], {{%r4, %r5, %r6, %r7}};"
    return lines


def tensor_map(tensor: np.ndarray, box: tuple[int, ...], swizzle: int = 0, **changes) -> TensorMap:
    """`tensor` is C-contiguous; box and the map's dimensions start with the innermost."""
    names = {1: "u8", 2: "u16", 4: "f32"}
    values = dict(
        address=tensor.ctypes.data,
        dtype=names[tensor.itemsize],
        shape=tensor.shape[::-1],
        strides=tensor.strides[-2::-1],
        box=box,
        element_strides=(1,) * tensor.ndim,
        swizzle=swizzle,
    )
    return TensorMap(**(values | changes))


def load(
    map_: TensorMap, tensor: np.ndarray, at: tuple[int, ...], instruction: str = LOAD, boxes: int = 1, **options
) -> np.ndarray:
    """The box at coordinates `at`, as it lies in shared memory (bytes); or several that one instruction copies."""
    counts = [-(-box // step) for box, step in zip(map_.box, map_.element_strides, strict=True)]
    size = boxes * int(np.prod(counts)) * tensor.itemsize
    padded = -(-size // 512) * 512
    out = aligned(np.zeros(padded, np.uint8))
    coordinates = ", ".join(f"%r{20 + i}" for i in range(len(at)))
    body = (
        INIT
        + "".join(f"mov.b32 %r{20 + i}, {c};" for i, c in enumerate(at))
        + f"""
    @%p30 bra WAITING;
    add.s64 %d10, k_param_0, 0;
    mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10; mov.b64 %d12, 0;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+{BARRIER}], {size};
    {instruction.format(n=len(at))} [smem], [%d11, {{{coordinates}}}], [smem+{BARRIER}], %d12;
WAITING:
    """.replace("add.s64 %d10, k_param_0, 0;", "")
        + WAIT
        + dump(padded, 1)
    )
    run(body, map_.encode(), out, tensor, shared=BARRIER + 64, **{"poison": padded == size, **options})
    return out[:size]


def plain(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The box by numpy: coordinates outside give zeros."""
    result = np.zeros(box[::-1], tensor.dtype)
    for index in np.ndindex(*box[::-1]):
        where = tuple(i + c for i, c in zip(index, at[::-1], strict=True))
        if all(0 <= w < n for w, n in zip(where, tensor.shape, strict=True)):
            result[index] = tensor[where]
    return result


def swizzled(values: np.ndarray, width: int) -> np.ndarray:
    """Bytes of a linear box at an address that is a multiple of 1024, moved as the swizzle says."""
    linear = values.reshape(-1).view(np.uint8)
    address = np.arange(linear.size)
    masks = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}
    moved = np.zeros_like(linear)
    moved[address ^ (address >> 3 & masks[width])] = linear
    return moved


MATRIX = aligned(np.arange(48 * 80, dtype=np.uint16).reshape(48, 80))


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize(("swizzle", "inner"), [(0, 64), (32, 16), (64, 32), (128, 64)])
def test_boxes_are_laid_out_and_swizzled(swizzle, inner, mode):
    box, at = (inner, 16), (8, 5)
    got = load(tensor_map(MATRIX, box, swizzle), MATRIX, at, async_mode=mode, happens_before=True)
    np.testing.assert_array_equal(got, swizzled(plain(MATRIX, box, at), swizzle))


@pytest.mark.parametrize("at", [(-8, 0), (56, 40), (0, -3), (100, 0), (0, 60), (72, 45)])
def test_outside_elements_are_zero_and_counted(at):
    got = load(tensor_map(MATRIX, (32, 16), 64), MATRIX, at)
    np.testing.assert_array_equal(got, swizzled(plain(MATRIX, (32, 16), at), 64))


def test_outside_elements_can_be_nan():
    tensor = aligned(np.ones((4, 8), np.float32))
    got = load(tensor_map(tensor, (8, 8), nan_fill=True), tensor, (4, 0)).view(np.float32).reshape(8, 8)
    assert (got[:4, :4] == 1).all() and np.isnan(got[:, 4:]).all() and np.isnan(got[4:]).all()


def test_four_dimensions_and_element_strides():
    tensor = aligned(np.random.default_rng(0).integers(0, 2**32, (3, 4, 5, 8), dtype=np.uint32).view(np.float32))
    box, at = (8, 2, 2, 2), (0, 3, 1, 1)
    got = load(tensor_map(tensor, box), tensor, at)
    np.testing.assert_array_equal(got, plain(tensor, box, at).reshape(-1).view(np.uint8))
    strided = tensor_map(tensor, (8, 4, 1, 1), element_strides=(1, 2, 1, 1))
    got = load(strided, tensor, (0, 0, 1, 1))
    np.testing.assert_array_equal(got, tensor[1, 1, :3:2].reshape(-1).view(np.uint8))


GATHER = LOAD.replace("{n}d", "2d").replace(".tile.", ".tile::gather4.")


def gathered(rows: tuple[int, ...], column: int, inner: int, swizzle: int = 0, box: int = 1, **options) -> np.ndarray:
    """Four rows of MATRIX from a column on, as they lie in shared memory (bytes)."""
    map_ = tensor_map(MATRIX, (inner, box), swizzle)
    return load(map_, MATRIX, (column, *rows), GATHER, boxes=4, **{"arch": "sm_100a", **options})


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize(("swizzle", "inner"), [(0, 64), (32, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("rows", [(5, 2, 47, 0), (7, 7, 7, 7), (3, -1, 48, 2**31 - 1)])
def test_four_rows_anywhere_are_one_box(rows, swizzle, inner, mode):
    """PTX ISA 5.5.3.4: one coordinate of columns, four of rows; rows and columns outside are zeros, and counted."""
    for column in (8, 72):
        got = gathered(rows, column, inner, swizzle, async_mode=mode, happens_before=True)
        expected = np.concatenate([plain(MATRIX, (inner, 1), (column, row)) for row in rows])
        np.testing.assert_array_equal(got, swizzled(expected, swizzle))


def test_what_gathering_must_be():
    rows = (5, 2, 47, 0)
    with pytest.raises(EmulationError, match="tile::gather4 with a box of 4 rows, not one"):
        gathered(rows, 0, 64, box=4)
    with pytest.raises(EmulationError, match="tile::gather4 below sm_100"):
        gathered(rows, 0, 64, arch="sm_90a")
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    for refused, at in ((f"{store} [%d1, {{%r1, %r1, %r1, %r1, %r1}}], [smem];", "scatter4"),
                        (f"{GATHER} [smem], [%d1, {{%r1, %r1}}], [smem+{BARRIER}], %d2;", "gather4")):  # fmt: skip
        with pytest.raises(PtxError, match=f"not implemented: cp.async.bulk.tensor.*tile::{at}"):
            run(refused, np.zeros(1, np.uint32), shared=64, arch="sm_100a")


def test_a_dimension_of_two_to_the_31_with_a_base_moved_back_clips_a_span():
    """Row r of a span is index ROWS - length + r, start + length in the dimension that has the rows' stride too."""
    pack = aligned(np.arange(100 * 16, dtype=np.uint16).reshape(100, 16))
    rows, start, length = 1 << 30, 30, 21
    clip = TensorMap(
        address=(pack.ctypes.data - rows * 32) % 2**64,
        dtype="u16",
        shape=(16, rows, (1 << 31) - 1),
        strides=(32, 32),
        box=(16, 16, 1),
        element_strides=(1, 1, 1),
        swizzle=0,
    )
    got = load(clip, pack, (0, rows - length + 16, start + length)).view(np.uint16).reshape(16, 16)
    np.testing.assert_array_equal(got[:5], pack[start + 16 : start + length])
    assert not got[5:].any()


@pytest.mark.parametrize("mode", ["eager", "random", "late"])
def test_stores_clip_and_undo_the_swizzle(mode):
    target = aligned(np.zeros((20, 40), np.uint16))
    source = aligned(np.arange(16 * 32, dtype=np.uint16))
    store = tensor_map(target, (32, 16), 64)
    body = """
    mov.b32 %r2, smem; shl.b32 %r1, %r1001, 5; add.s32 %r3, %r2, %r1; cvt.u64.u32 %d1, %r1; add.s64 %d2, %d101, %d1;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2]; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2+16]; st.shared.v4.b32 [%r3+16], {%r4, %r5, %r6, %r7};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r1000, 0; @%p1 ret;
    mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10; mov.b64 %d12, 0; mov.b32 %r20, 16; mov.b32 %r21, 10;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%d11, {%r20, %r21}], [smem], %d12;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    """
    lines = swizzled(source, 64).view(np.uint16)
    run(body, store.encode(), aligned(lines), target, shared=1024, async_mode=mode, happens_before=True)
    expected = np.zeros_like(target)
    expected[10:, 16:] = source.reshape(16, 32)[:10, :24]
    np.testing.assert_array_equal(target, expected)


def test_multicast_reaches_every_cta_of_the_mask_at_the_same_place():
    out = aligned(np.zeros((4, 512), np.uint8))
    body = (
        INIT
        + f"""
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r30, %cluster_ctarank; mad.wide.u32 %d101, %r30, 512, %d101;
    setp.eq.u32 %p2, %r30, 2;
    @%p2 bra OVER;
    @%p30 bra WAITING;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+{BARRIER}], 512;
    setp.ne.u32 %p1, %r30, 0;
    @%p1 bra WAITING;
    mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10; mov.b32 %r20, 0; mov.b16 %h1, 11;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [smem], [%d11, {{%r20, %r20}}], [smem+{BARRIER}], %h1;
WAITING:
    {WAIT}
    {dump(512, 1)}
OVER:
    """
    )
    run(body, tensor_map(MATRIX, (16, 16)).encode(), out, MATRIX, grid=4, cluster=4, shared=BARRIER + 64)
    expected = plain(MATRIX, (16, 16), (0, 0)).reshape(-1).view(np.uint8)
    for rank in (0, 1, 3):
        np.testing.assert_array_equal(out[rank], expected)
    assert not out[2].any()


@pytest.mark.parametrize("rank", [0, 1])
def test_multicast_of_a_pair_signals_the_cta_that_the_barrier_is_in(rank):
    """PTX 9.7.9.25.5.2: with .cta_group::2, of each target's pair the CTA whose rank is as even as the barrier's."""
    out = aligned(np.zeros((4, 512), np.uint8))
    body = (
        INIT
        + f"""
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r30, %cluster_ctarank; mad.wide.u32 %d101, %r30, 512, %d101;
    and.b32 %r31, %r30, 1; setp.ne.u32 %p2, %r31, {rank};
    @%p30 bra WAITING;
    @!%p2 mbarrier.arrive.expect_tx.shared.b64 %d1, [smem+{BARRIER}], 1024;
    setp.ne.u32 %p1, %r30, 2;
    @%p1 bra WAITING;
    mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10; mov.b32 %r20, 0; mov.b16 %h1, 15;
    mov.b32 %r40, smem; add.u32 %r40, %r40, {BARRIER}; mapa.shared::cluster.u32 %r41, %r40, {2 + rank};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2
        [smem], [%d11, {{%r20, %r20}}], [%r41], %h1;
WAITING:
    @%p2 bra TOLD;
    {WAIT}
TOLD:
    barrier.cluster.arrive; barrier.cluster.wait;
    {dump(512, 1)}
    """
    )
    run(
        body,
        tensor_map(MATRIX, (16, 16)).encode(),
        out,
        MATRIX,
        grid=4,
        cluster=4,
        shared=BARRIER + 64,
        arch="sm_100a",
        async_mode="late",
        happens_before=True,
    )
    expected = plain(MATRIX, (16, 16), (0, 0)).reshape(-1).view(np.uint8)
    assert (out == expected).all()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("bit", [24, 29])
def test_multicast_names_a_barrier_in_a_cta_of_its_cluster(bit, group):
    """Also where the CTAs of its mask take the place of the one that it names."""
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    body = f"""
    @%p30 ret; mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10; mov.b32 %r20, 0; mov.b16 %h1, 1;
    mov.b32 %r40, smem; add.u32 %r40, %r40, {BARRIER + (1 << bit)};
    {copy}{".cta_group::2" * (group == 2)} [smem], [%d11, {{%r20, %r20}}], [%r40], %h1;
    """
    where = rf"tensor copy's mbarrier at shared address 0x\w+: CTA {1 << bit - 24} of a cluster of 1"
    with pytest.raises(EmulationError, match=where):
        run(INIT + body, tensor_map(MATRIX, (16, 16)).encode(), MATRIX, shared=BARRIER + 64, arch="sm_100a")


def test_what_a_map_and_an_address_must_be():
    def refused(match: str, map_: bytes, **options) -> None:
        with pytest.raises(EmulationError, match=match):
            run(
                INIT + "@%p30 ret; mov.b64 %d10, k_param_0; cvta.param.u64 %d11, %d10;"
                "mov.b64 %d12, 0; mov.b32 %r20, 0;"
                + LOAD.format(n=options.pop("rank", 2))
                + f" [smem+{options.pop('to', 0)}], [%d11, {{%r20, %r20}}], [smem+{BARRIER}], %d12;",
                map_,
                MATRIX,
                shared=BARRIER + 64,
            )

    good = tensor_map(MATRIX, (32, 16), 64)
    refused("shared address 0x410, not a multiple of 128", good.encode(), to=16)
    refused(
        "a 2d copy through a tensor map of rank 1",
        TensorMap(MATRIX.ctypes.data, "u16", (80,), (), (16,), (1,), 0).encode(),
    )
    refused("innermost box of 128 bytes, more than its swizzle of 64", tensor_map(MATRIX, (64, 16), 64).encode())
    refused("innermost box of 20 bytes, not a multiple of 16", tensor_map(MATRIX, (10, 16)).encode())
    refused(
        "global address 0x.*, outside every region",
        tensor_map(MATRIX, (32, 16), 64, shape=(80, 60), address=MATRIX.ctypes.data + 48 * 160 - 160).encode(),
    )
