"""Sums of products as tensor cores make them: words that GPUs gave for random and for edge operands.

Those of Blackwell are from github.com/sf-tensor/tcgen05 (MIT), whose authors captured them on B200s.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from small_kernels import FILL, aligned
from test_core_tensor_memory import A_AT, AFTER, B_AT, BARRIER, WAIT, emulate, registers, smem_descriptor
from test_core_wgmma import layout

BYTES = {"tf32": 4, "bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
CODES = {"tf32": (2, "tf32"), "f16": (0, "f16"), "bf16": (1, "f16"), "e4m3": (0, "f8f6f4"), "e5m2": (1, "f8f6f4")}
"""Format -> its code in an instruction descriptor, and the kind of the instruction."""
NAN, INFINITY = 0x7FFFFFFF, 0x7F800000
N = 8


def finite_float(source: random.Random) -> int:
    bits = source.getrandbits(32)
    return bits & 0x807FFFFF if bits & INFINITY == INFINITY else bits


Case = tuple[list[int], list[int], int]
"""Operands and what is added, as bits; tf32 and bf16 as those of a float, whose low bits are cut off."""

RANDOM: dict[str, tuple[int, Callable[[random.Random], int], tuple[int, int]]] = {
    "tf32": (104, finite_float, (0xFF800000, 0xFC347E7C)),
    "bf16": (104, finite_float, (0x7F800000, 0x7F800000)),
    "f16": (103, lambda source: source.getrandbits(16), (0x7FFFFFFF, 0x49776BBA)),
    "e4m3": (104, lambda source: source.randrange(0x7F), (0xEC63D12A, 0x452AF963)),
    "e5m2": (300, lambda source: source.randrange(0x7C), (0x4D92B09A, 0x4C9C1102)),
}
"""Format -> seed, how an operand is drawn, and the words of two cases."""
EDGES: dict[str, tuple[int, int, int, int, int | None]] = {
    "tf32": (0x3F800000, 0x00002000, 0x00002000, 0x7FC00000, 0x7F800000),
    "bf16": (0x3F800000, 0x00010000, 0x00010000, 0x7FC00000, 0x7F800000),
    "f16": (0x3C00, 0x0001, 0x33800000, 0x7E00, 0x7C00),
    "e4m3": (0x38, 0x01, 0x3B000000, 0x7F, None),
    "e5m2": (0x3C, 0x01, 0x37800000, 0x7F, 0x7C),
}
"""Format -> 1, the least subnormal, the word of their product, NaN, infinity."""


def cases_of(kind: str) -> list[tuple[Case, int]]:
    depth = 32 // BYTES[kind]
    seed, element, words = RANDOM[kind]
    source = random.Random(seed)

    def drawn() -> Case:
        return [element(source) for _ in range(depth)], [element(source) for _ in range(depth)], finite_float(source)

    def one(a: int, b: int, c: int = 0) -> Case:
        rest = [0] * (depth - 1)
        return [a, *rest], [b, *rest], c

    one_bits, subnormal, product, nan, infinity = EDGES[kind]
    found = [(drawn(), word) for word in words]
    found += [(one(0, 0, 0x80000000), 0), (one(subnormal, one_bits), product), (one(nan, one_bits), NAN)]
    if infinity is not None:
        found += [(one(infinity, one_bits), INFINITY), (one(infinity, 0), NAN)]
    return found


def rows_of(kind: str, rows: list[list[int]]) -> np.ndarray:
    numbers = np.zeros((N, 32 // BYTES[kind]), np.uint32)
    numbers[: len(rows)] = rows
    if kind == "bf16":
        numbers >>= 16
    return numbers.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[BYTES[kind]]).view(np.uint8)


def blackwell(kind: str, cases: list[Case]) -> list[int]:
    """Results of up to eight cases: on the diagonal of one product of 128 x 8."""
    size = BYTES[kind]
    image = aligned(np.zeros((1, 0x10000), np.uint8))
    a = np.zeros((128, 32), np.uint8)
    a[:N] = rows_of(kind, [case[0] for case in cases])
    a_image, a_leading, a_stride = layout(a, size, 0, False)
    b_image, b_leading, b_stride = layout(rows_of(kind, [case[1] for case in cases]), size, 0, False)
    image[0, :0x8000], image[0, 0x8000:] = a_image, b_image
    sums = aligned(np.zeros((N, 128), np.uint32))
    for i, case in enumerate(cases):
        sums[i, i] = case[2]
    code, name = CODES[kind]
    body = (
        FILL
        + "mad.wide.u32 %d3, %r1000, 4, %d101;"
        + "".join(f"ld.global.b32 %r{100 + i}, [%d3+{512 * i}];" for i in range(N))
        + f"""
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r502], {registers(N)}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; {AFTER}
    setp.ne.s32 %p6, %r1000, 0;
    @%p6 bra FOLLOW;
    mov.b64 %d10, {smem_descriptor(A_AT, a_leading, a_stride, 0)};
    mov.b64 %d11, {smem_descriptor(B_AT, b_leading, b_stride, 0)};
    mov.b32 %r40, 0; mov.b32 %r41, {1 << 4 | code << 7 | code << 10 | N // 8 << 17 | 8 << 24}; mov.pred %p5, 1;
    mov.b32 %r42, smem; add.s32 %r42, %r42, {BARRIER};
    tcgen05.mma.cta_group::1.kind::{name} [%r500], %d10, %d11, %r41, {{%r40, %r40, %r40, %r40}}, %p5;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r42];
FOLLOW:
    {WAIT} {AFTER}
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(N)}, [%r502]; tcgen05.wait::ld.sync.aligned;
    """
        + "".join(f"st.global.b32 [%d3+{512 * i}], %r{100 + i};" for i in range(N))
    )
    emulate(body, image, sums, columns=32, hardware_sums=True)
    return [int(sums[i, i]) for i in range(len(cases))]


@pytest.mark.parametrize("kind", RANDOM)
def test_blackwell_gives_the_words_of_b200s(kind):
    cases = cases_of(kind)
    found = blackwell(kind, [case for case, _ in cases])
    assert [f"{word:08x}" for word in found] == [f"{word:08x}" for _, word in cases]
