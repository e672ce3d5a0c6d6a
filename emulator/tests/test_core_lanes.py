"""Lane-wise instructions against values computed by hand, by numpy or by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_kernels import lanewise

U32 = np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 12345], np.uint32)
PAIRS = np.array(np.meshgrid(U32, U32)).reshape(2, -1)
A, B = PAIRS[0].copy(), PAIRS[1].copy()
SA, SB = A.view(np.int32), B.view(np.int32)
WIDE = A.astype(np.uint64) << np.uint64(32) | B
NAN = 0x7FFFFFFF


def bits(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def check(instruction, sources, expected):
    np.testing.assert_array_equal(lanewise(instruction, sources, expected.dtype), expected)


INTEGERS = [
    ("add.s32 D, S0, S1;", A + B),
    ("sub.s32 D, S0, S1;", A - B),
    ("mul.lo.s32 D, S0, S1;", A * B),
    ("mul.hi.u32 D, S0, S1;", (A.astype(np.uint64) * B >> np.uint64(32)).astype(np.uint32)),
    ("mul.wide.u32 D, S0, S1;", A.astype(np.uint64) * B),
    ("mul.wide.s32 D, S0, S1;", SA.astype(np.int64) * SB),
    ("mad.lo.s32 D, S0, S1, S0;", A * B + A),
    ("min.s32 D, S0, S1;", np.minimum(SA, SB)),
    ("max.s32 D, S0, S1;", np.maximum(SA, SB)),
    ("min.u32 D, S0, S1;", np.minimum(A, B)),
    ("min.relu.s32 D, S0, S1;", np.maximum(np.minimum(SA, SB), 0)),
    ("and.b32 D, S0, S1;", A & B),
    ("xor.b32 D, S0, S1;", A ^ B),
    ("not.b32 D, S0;", ~A),
    ("neg.s32 D, S0;", (0 - A).astype(np.uint32)),
    ("shl.b32 D, S0, S1;", np.array([int(a) << int(b) & 0xFFFFFFFF if b < 32 else 0 for a, b in PAIRS.T], np.uint32)),
    ("shr.u32 D, S0, S1;", np.array([int(a) >> int(b) if b < 32 else 0 for a, b in PAIRS.T], np.uint32)),
    ("shr.s32 D, S0, S1;", np.array([int(a) >> min(int(b), 31) for a, b in zip(SA, B, strict=True)], np.int32)),
    ("popc.b32 D, S0;", np.array([int(a).bit_count() for a in A], np.uint32)),
    ("cvt.s64.s32 D, S0;", SA.astype(np.int64)),
    ("cvt.u64.u32 D, S0;", A.astype(np.uint64)),
    ("cvt.s32.s8 D, S0;", A.astype(np.uint8).view(np.int8).astype(np.int32)),
    ("mov.b32 {%h20, %h21}, S0; mov.b32 D, {%h21, %h20};", A << 16 | A >> 16),
    ("{ .reg .pred q; setp.lt.s32 q, S0, S1; selp.b32 D, S0, S1, q; }", np.minimum(SA, SB)),
    (
        "setp.lt.u32 %p1, S0, S1; setp.eq.or.b32 %p2, S0, 1, %p1; selp.b32 D, 7, 9, %p2;",
        np.where((A < B) | (A == 1), 7, 9).astype(np.uint32),
    ),
]


@pytest.mark.parametrize(("instruction", "expected"), INTEGERS, ids=[i[0].split(" ")[0] for i in INTEGERS])
def test_integers(instruction, expected):
    check(instruction, [A, B], expected)


def test_division_truncates_toward_zero():
    a = np.array([7, -7, 7, -7, -(2**31), 5], np.int32)
    b = np.array([2, 2, -2, -2, -1, 3], np.int32)
    check("div.s32 D, S0, S1;", [a, b], np.array([3, -3, -3, 3, -(2**31), 1], np.int32))


def test_64_bits():
    other = WIDE[::-1].copy()
    check("add.s64 D, S0, S1;", [WIDE, other], WIDE + other)
    check("mul.lo.s64 D, S0, S1;", [WIDE, other], WIDE * other)
    check("or.b64 D, S0, S1;", [WIDE, other], WIDE | other)
    check("shl.b64 D, S0, 33;", [WIDE], WIDE << np.uint64(33))
    check("mov.b64 {%r20, %r21}, S0; mov.b64 D, {%r21, %r20};", [WIDE], WIDE << np.uint64(32) | WIDE >> np.uint64(32))
    check("mov.b64 {%r20, %r21}, S0; mov.b32 D, %r21;", [WIDE], A)


def test_bytes_are_permuted_as_the_selector_says():
    a, b = bits(0x33221180, 0x33221180), bits(0x77665544, 0x77665544)
    check("prmt.b32 D, S0, S1, S2;", [a, b, bits(0x7250, 0x0008)], bits(0x77225580, 0x808080FF))


def test_sixteen_bit_results_stay_in_their_half():
    a = np.array([0xFFFF, 0x8000, 3], np.uint16)
    check("add.s16 D, S0, S1;", [a, a], a + a)
    check("shl.b16 D, S0, 4;", [a], a << np.uint16(4))
    check("shr.s16 D, S0, 4;", [a], (a.view(np.int16) >> 4).view(np.uint16))
    check("mul.wide.s16 D, S0, S1;", [a, a], a.view(np.int16).astype(np.int32) ** 2)


def test_maximum_drops_nan_and_orders_zeros():
    a, b = bits(0x7FC00001, 0x3F800000, 0x80000000, 0x00000000), bits(0x40000000, 0x7FC00001, 0x00000000, 0x80000000)
    check("max.f32 D, S0, S1;", [a, b], bits(0x40000000, 0x3F800000, 0, 0))
    check("min.f32 D, S0, S1;", [a, b], bits(0x40000000, 0x3F800000, 0x80000000, 0x80000000))
    check("max.NaN.f32 D, S0, S1;", [a, b], bits(NAN, NAN, 0, 0))
    pairs = [bits(0x3C00BC00, 0x7E00B800, 0xFC000000), bits(0x4000C000, 0x34007E00, 0)]
    check("max.f16x2 D, S0, S1;", pairs, bits(0x4000BC00, 0x3400B800, 0))
    check("abs.f16x2 D, S0;", pairs[:1], bits(0x3C003C00, 0x7E003800, 0x7C000000))
    check("max.f32 D, S0, S1, S2;", [floats(1, 5, 2), floats(3, 4, 2), floats(2, 9, 7)], floats(3, 9, 7))


def test_arithmetic_makes_the_canonical_nan():
    check("add.f32 D, S0, S1;", [bits(0x7F800000), bits(0xFF800000)], bits(NAN))
    check("mul.f32 D, S0, S1;", [floats(3), floats(-0.5)], floats(-1.5))
    check("fma.rn.f32 D, S0, S1, S2;", [floats(1 + 2**-12)] * 2 + [floats(-1)], floats(2**-11 + 2**-24))


def test_packed_pairs_are_two_plain_operations():
    a = floats(1, 2, 3, 4).view(np.uint64)
    check("add.rn.f32x2 D, S0, S1;", [a, a], floats(2, 4, 6, 8).view(np.uint64))
    check("fma.rn.f32x2 D, S0, S1, S0;", [a, a], floats(2, 6, 12, 20).view(np.uint64))


def test_addition_can_round_down():
    a, b = floats(1, 1, 1, -1, 2**24), floats(2**-30, -(2**-30), 2**-1, -(2**-30), 1)
    down = floats(
        1, np.nextafter(np.float32(1), np.float32(0)), 1.5, np.nextafter(np.float32(-1), np.float32(-2)), 2**24
    )
    check(
        "add.rm.f32x2 D, S0, S1;",
        [np.repeat(a, 2).view(np.uint64), np.repeat(b, 2).view(np.uint64)],
        np.repeat(down, 2).view(np.uint64),
    )


def test_powers_of_two():
    x = np.concatenate([np.linspace(-125.9, 127.9, 4000, dtype=np.float32), np.arange(-126, 128, dtype=np.float32)])
    got = lanewise("ex2.approx.ftz.f32 D, S0;", [x], np.float32)
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=2**-21)
    np.testing.assert_array_equal(got[4000:], np.ldexp(np.float32(1), np.arange(-126, 128)))
    special = bits(0xC2FC0001, 0x43000000, 0xFF800000, 0x7F800000, 0x7FC12345, 0x80000000)
    expected = bits(0, 0x7F800000, 0, 0x7F800000, NAN, 0x3F800000)
    check("ex2.approx.ftz.f32 D, S0;", [special], expected)


def test_comparisons_with_nan():
    a, b = bits(0x7FC00000, 0x3F800000), bits(0x3F800000, 0x3F800000)
    for name, expected in (("ne", (0, 0)), ("neu", (1, 0)), ("eq", (0, 1)), ("le", (0, 1)), ("ltu", (1, 0))):
        check(f"setp.{name}.f32 %p1, S0, S1; selp.b32 D, 1, 0, %p1;", [a, b], bits(*expected))


def every_float_pattern() -> np.ndarray:
    """All signs and exponents with mantissas around every rounding tie of the formats below 16 bits, and at random."""
    exponents = np.arange(256, dtype=np.uint32) << 23
    ends = np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF, 0x100000, 0x100001, 0x7FFFFF, 0xFFF, 0x1000, 0x1001,
                     0x8000, 0x7FFF, 0x8001, 0x180000, 0x17FFFF, 0x300000, 0x3000, 0x18000], np.uint32)  # fmt: skip
    mantissas = np.concatenate([ends, np.random.default_rng(0).integers(0, 1 << 23, 40, dtype=np.uint32)])
    positive = (exponents[:, None] | mantissas).ravel()
    return np.concatenate([positive, positive | 0x80000000])


def test_conversions_to_bf16_and_f16():
    pattern = every_float_pattern()
    x = torch.from_numpy(pattern.view(np.int32)).view(torch.float32)
    nan = torch.isnan(x).numpy()
    zero = np.zeros_like(pattern)
    for name, kind in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        expected = x.to(kind).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        expected[nan] = 0x7FFF
        check(f"cvt.rn.{name}x2.f32 D, S0, S1;", [zero, pattern], expected)
        check(f"cvt.rn.{name}x2.f32 D, S0, S1;", [pattern, zero], expected << 16)


@pytest.mark.parametrize(
    ("name", "kind", "largest"), [("e4m3", torch.float8_e4m3fn, 448), ("e5m2", torch.float8_e5m2, 57344)]
)
def test_conversions_to_fp8_saturate(name, kind, largest):
    pattern = every_float_pattern()
    x = torch.from_numpy(pattern.view(np.int32)).view(torch.float32)
    expected = x.clamp(-largest, largest).to(kind).view(torch.uint8).numpy().astype(np.uint16)
    expected[torch.isnan(x).numpy()] = 0x7F
    zero = np.zeros_like(pattern)
    check(f"cvt.rn.satfinite.{name}x2.f32 D, S0, S1;", [zero, pattern], expected)
    check(f"cvt.rn.satfinite.{name}x2.f32 D, S0, S1;", [pattern, zero], expected << np.uint16(8))


def test_fp8_values_measured_on_hardware():
    a, b = floats(1, 1000), floats(300, np.nan)
    check("cvt.rn.satfinite.e4m3x2.f32 D, S0, S1;", [a, b], np.array([0x3879, 0x7E7F], np.uint16))


@pytest.mark.parametrize(("name", "kind"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_from_sixteen_bits(name, kind):
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    values = torch.from_numpy(halves.view(np.int16)).view(kind).float().numpy()
    got = lanewise(f"cvt.f32.{name} D, S0;", [halves], np.float32)
    assert np.array_equal(got, values, equal_nan=True)


def test_integers_from_floats_saturate():
    x = floats(1.5, -1.5, 3e9, -3e9, np.nan, 0.99)
    check("cvt.rzi.s32.f32 D, S0;", [x], np.array([1, -1, 2**31 - 1, -(2**31), 0, 0], np.int32))
    check("cvt.rn.f32.s32 D, S0;", [np.array([-3, 2**24 + 1], np.int32)], floats(-3, 2**24))


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        (
            "ex2.approx.ftz.f32 D, S0;",
            bits(0x39A72DAB, 0x3F019240, 0x3F0670E0, 0x3F0B4F80, 0x3F102E20, 0x3F150CC0, 0x3F19EB60, 0x3F23A8A0),
            bits(0x3F80073E, 0x3FB5CA87, 0x3FB83434, 0x3FBAA613, 0x3FBD2041, 0x3FBFA2DA, 0x3FC22DFA, 0x3FC75E45),
        ),
        (
            "rcp.approx.ftz.f32 D, S0;",
            bits(0x39A72DAB, 0x3F019240, 0x3F0670E0, 0x3F0B4F80, 0x3F102E20, 0x3F150CC0, 0x3F19EB60, 0x3F23A8A0),
            bits(0x45440196, 0x3FFCE541, 0x3FF3BC3E, 0x3FEB372B, 0x3FE3456D, 0x3FDBD892, 0x3FD4E3FE, 0x3FC838B9),
        ),
        (
            "lg2.approx.ftz.f32 D, S0;",
            bits(0x3E800000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FB504F3, 0x40000000, 0x40490FDB),
            bits(0xBFFFFFFF, 0xBF7FFFFE, 0xB24B4000, 0x00000000, 0x3495F600, 0x3EFFFFFF, 0x3F800000, 0x3FD3643A),
        ),
    ],
)
def test_special_functions_have_the_bits_of_a_gpu(instruction, given, expected):
    check(instruction, [given], expected)


def test_reciprocals_are_off_by_less_than_a_unit_of_their_last_place():
    """PTX promises it, and quotients of rows of a cache rest on it."""
    significands = np.arange(2**23, dtype=np.uint32)
    for exponent in (1, 127, 190):
        x = (significands | np.uint32(exponent << 23)).view(np.float32)
        got = lanewise("rcp.approx.ftz.f32 D, S0;", [x], np.float32)
        exact = 1 / x.astype(np.float64)
        assert np.all(np.abs(got - exact) < np.spacing(np.minimum(got, exact.astype(np.float32))))
