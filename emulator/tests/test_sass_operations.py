"""Operations of machine code against Python's integers and NumPy, on values at the edges of their ranges."""

from __future__ import annotations

import numpy as np
import pytest
from sass_kernels import computed, run_lines
from small_kernels import aligned

M = 0xFFFFFFFF
EDGES = [0, 1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 65, 0x7F, 0x80, 0xFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF,
         0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0x9ABCDEF0, 0x55555555, 0xAAAAAAAA, 5, 7, 100,
         0xDEADBEEF]  # fmt: skip
FLOATS = np.array([0, 1, -1, 1.5, -2.25, 448, 464, 1e-3, 2**-9, -(2**-10), 65504, 65520, 1e38, -1e38, 3e-39, -3e-39,
                   np.inf, -np.inf, np.nan, -np.nan, 0.1, 1 / 3, 123456.78, -0.0, 2**-126, 2**-149, 57344, 61440,
                   255.5, 7, 8.5, -16], np.float32)  # fmt: skip


def s(value: int) -> int:
    value &= M
    return value - (value >> 31 << 32)


def words(shift: int) -> list[int]:
    """The edge values, in an order of their own."""
    return [EDGES[(i * (2 * shift + 1) + 5 * shift) % len(EDGES)] for i in range(len(EDGES))]


def pair(low: int, high: int) -> int:
    return high << 32 | low


def prmt(a: int, selector: int, c: int) -> int:
    made = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = pair(a, c) >> 8 * (nibble & 7) & 0xFF
        made |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * i
    return made


def lut(table: int):
    def look(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    return look


ONE_WORD = {
    "IADD3 R20, R10, -R11, R12": lambda a, b, c: a - b + c,
    "IADD3 R20, -R10, 0x7f, RZ": lambda a, b, c: 0x7F - a,
    "VIADD R20, R10, 0xffffff40": lambda a, b, c: a - 0xC0,
    "IMAD R20, R10, R11, R12": lambda a, b, c: a * b + c,
    "IMAD R20, R10, 0x14, -R11": lambda a, b, c: a * 0x14 - b,
    "IMAD.MOV R20, RZ, RZ, -R10": lambda a, b, c: -a,
    "IMAD.SHL.U32 R20, R10, 0x10, RZ": lambda a, b, c: a << 4,
    "IMAD.HI.U32 R20, R10, R11, R12": lambda a, b, c: a * b + pair(c, EDGES[3]) >> 32,
    "IMAD.HI R20, R10, R11, RZ": lambda a, b, c: s(a) * s(b) >> 32,
    "LEA R20, R10, R11, 0x5": lambda a, b, c: (a << 5) + b,
    "LEA.HI R20, R10, R11, R12, 0x5": lambda a, b, c: ((pair(a, c) << 5 & (1 << 64) - 1) >> 32) + b,
    "LEA.HI.SX32 R20, R10, -R11, 0x1b": lambda a, b, c: (s(a) << 27 >> 32) - b,
    "LOP3.LUT R20, R10, R11, R12, 0x96, !PT": lut(0x96),
    "LOP3.LUT R20, R10, R11, R12, 0xca, !PT": lut(0xCA),
    "LOP3.LUT R20, R10, R11, RZ, 0xc0, !PT": lambda a, b, c: a & b,
    "LOP3.LUT R20, RZ, R10, RZ, 0x33, !PT": lambda a, b, c: ~a,
    "SHF.L.U32 R20, R10, R11, RZ": lambda a, b, c: a << b if b < 32 else 0,
    "SHF.R.U32.HI R20, RZ, R11, R10": lambda a, b, c: a >> b if b < 32 else 0,
    "SHF.R.S32.HI R20, RZ, R11, R10": lambda a, b, c: s(a) >> min(b, 31),
    "SHF.L.U64.HI R20, R10, R11, R12": lambda a, b, c: pair(a, c) << b >> 32 if b < 64 else 0,
    "SHF.L.W.U32.HI R20, R10, R11, R12": lambda a, b, c: pair(a, c) << (b & 31) >> 32,
    "SHF.L.W.U32 R20, R10, R11, RZ": lambda a, b, c: a << (b & 31),
    "SHF.R.W.U32.HI R20, RZ, R11, R10": lambda a, b, c: a >> (b & 31),
    "SHF.R.U64 R20, R10, R11, R12": lambda a, b, c: pair(a, c) >> b if b < 64 else 0,
    "PRMT R20, R10, 0x9910, R11": lambda a, b, c: prmt(a, 0x9910, b),
    "PRMT R20, R10, R12, R11": lambda a, b, c: prmt(a, c, b),
    "VIMNMX R20, R10, R11, PT": lambda a, b, c: min(s(a), s(b)),
    "VIMNMX R20, R10, R11, !PT": lambda a, b, c: max(s(a), s(b)),
    "VIMNMX.U32 R20, R10, R11, !PT": lambda a, b, c: max(a, b),
    "VIMNMX.RELU R20, R10, R11, PT": lambda a, b, c: max(0, min(s(a), s(b))),
    "VIMNMX3 R20, R10, R11, R12, PT": lambda a, b, c: min(s(a), s(b), s(c)),
    "VIADDMNMX R20, R10, -R11, R12, !PT": lambda a, b, c: max(s(a - b), s(c)),
    "VIADDMNMX.U32 R20, R10, R11, 0x3, PT": lambda a, b, c: min(a + b & M, 3),
    "POPC R20, R10": lambda a, b, c: a.bit_count(),
    "FLO.U32 R20, R10": lambda a, b, c: a.bit_length() - 1,
    "IABS R20, R10": lambda a, b, c: abs(s(a)),
    "MOV R20, R10": lambda a, b, c: a,
}


@pytest.mark.parametrize("line", ONE_WORD)
def test_an_operation_of_words(line: str):
    a, b, c = words(0), words(1), words(2)
    (found,) = computed([line], a, b, c, [EDGES[3]] * 32)
    expected = [ONE_WORD[line](*lane) & M for lane in zip(a, b, c, strict=True)]
    assert found.tolist() == expected


SEVERAL = {
    "a wide product": (
        ["IMAD.WIDE R20, R10, R11, R12"],
        lambda a, b, c, d: s(a) * s(b) + pair(c, d),
    ),
    "a wide product without signs": (
        ["IMAD.WIDE.U32 R20, R10, R11, R12"],
        lambda a, b, c, d: a * b + pair(c, d),
    ),
    "a sum with its carry": (
        ["IADD3 R20, P0, R10, R12, RZ", "IADD3.X R21, R11, R13, RZ, P0, !PT"],
        lambda a, b, c, d: pair(a, b) + pair(c, d),
    ),
    "a difference with its borrow": (
        ["IADD3 R20, P0, R10, -R12, RZ", "IADD3.X R21, R11, ~R13, RZ, P0, !PT"],
        lambda a, b, c, d: pair(a, b) - pair(c, d),
    ),
    "a scaled index": (
        ["LEA R20, P1, R10, R12, 0x3", "LEA.HI.X R21, R10, R13, R11, 0x3, P1"],
        lambda a, b, c, d: (pair(a, b) << 3) + pair(c, d),
    ),
    "an index with a sign": (
        ["LEA R20, P1, R10, R12, 0x2", "LEA.HI.X.SX32 R21, R10, R13, 0x2, P1"],
        lambda a, b, c, d: (s(a) << 2) + pair(c, d),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_operations_of_two_words(name: str):
    lines, function = SEVERAL[name]
    inputs = [words(i) for i in range(4)]
    low, high = computed(lines, *inputs, results=2)
    expected = [function(*lane) & (1 << 64) - 1 for lane in zip(*inputs, strict=True)]
    assert [pair(int(x), int(y)) for x, y in zip(low, high, strict=True)] == expected


RELATIONS = {
    "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b, "NE": lambda a, b: a != b,
}  # fmt: skip


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_of_integers(relation: str):
    a, b, c, d = (words(i) for i in range(4))
    b[:8] = a[:8]
    d[4:12] = c[4:12]
    choose = ["SEL R20, RZ, 0x1, !P0", "SEL R21, RZ, 0x1, !P1", "SEL R22, RZ, 0x1, !P2", "SEL R23, RZ, 0x1, !P4"]
    lines = [
        f"ISETP.{relation}.AND P0, PT, R10, R11, PT",
        f"ISETP.{relation}.U32.AND P1, PT, R10, R11, PT",
        f"ISETP.{relation}.U32.OR P2, P3, R10, R11, !P0",
        f"ISETP.{relation}.U32.AND P4, PT, R12, R13, PT",
        f"ISETP.{relation}.AND.EX P4, PT, R10, R11, PT, P4",
        *choose,
        "SEL R24, RZ, 0x1, !P3",
    ]
    found = computed(lines, a, b, c, d, results=5)
    holds = RELATIONS[relation]
    signed = [holds(s(x), s(y)) for x, y in zip(a, b, strict=True)]
    unsigned = [holds(x, y) for x, y in zip(a, b, strict=True)]
    wide = [holds(s(x) << 32 | z, s(y) << 32 | w) for x, y, z, w in zip(a, b, c, d, strict=True)]
    assert found[0].tolist() == signed and found[1].tolist() == unsigned and found[3].tolist() == wide
    assert found[2].tolist() == [u or not t for u, t in zip(unsigned, signed, strict=True)]
    assert found[4].tolist() == [not u or not t for u, t in zip(unsigned, signed, strict=True)]


def f32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.uint32)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("unordered", [False, True])
def test_comparisons_of_floats(relation: str, unordered: bool):
    a, b = FLOATS, np.roll(FLOATS, 3)
    b[:6] = a[:6]
    line = f"FSETP.{relation}{'U' if unordered else ''}.AND P0, PT, R10, -R11, PT"
    (found,) = computed([line, "SEL R20, RZ, 0x1, !P0"], f32(a), f32(-b))
    nan = np.isnan(a) | np.isnan(b)
    assert found.tolist() == np.where(nan, unordered, RELATIONS[relation](a, b)).astype(int).tolist()


def test_least_and_largest_of_floats():
    a, b = FLOATS, np.roll(FLOATS, 1)
    lines = ["FMNMX R20, R10, R11, PT", "FMNMX R21, R10, |R11|, !PT", "FMNMX.NAN R22, R10, R11, !PT"]
    least, largest, strict = computed(lines, f32(a), f32(b), results=3)
    assert np.array_equal(least.view(np.float32), np.fmin(a, b), equal_nan=True)  # a NaN only where both are
    assert np.array_equal(largest.view(np.float32), np.fmax(a, np.abs(b)), equal_nan=True)
    assert np.isnan(strict.view(np.float32)).tolist() == (np.isnan(a) | np.isnan(b)).tolist()
    assert set(strict[np.isnan(a) | np.isnan(b)].tolist()) == {0x7FFFFFFF}
    zeros = np.array([0.0, -0.0] * 16, np.float32)
    least, largest = computed(
        ["FMNMX R20, R10, R11, PT", "FMNMX R21, R10, R11, !PT"], f32(zeros), f32(-zeros), results=2
    )
    assert set(least.tolist()) == {0x80000000} and set(largest.tolist()) == {0}


def test_sums_and_products_of_floats():
    a, b, c = FLOATS, np.roll(FLOATS, 5), np.roll(FLOATS, 9)
    lines = ["FADD R20, -R10, |R11|", "FMUL R21, R10, R11", "FFMA R22, R10, R11, -R12", "FSEL R23, -R10, R11, PT"]
    found = computed(lines, f32(a), f32(b), f32(c), results=4)
    with np.errstate(all="ignore"):
        expected = [-a + np.abs(b), a * b, (a.astype(np.longdouble) * b - c).astype(np.float32)]
    for got, wanted in zip(found, expected, strict=False):
        nan = np.isnan(wanted)
        assert got[~nan].tolist() == f32(wanted)[~nan].tolist() and set(got[nan].tolist()) <= {0x7FFFFFFF}
    assert found[3].tolist() == f32(-a).tolist()


def test_rounding_up_down_and_to_zero():
    a, b, c = (np.random.default_rng(i).standard_normal(32).astype(np.float32) for i in range(3))
    lines = ["FFMA.RM R20, R10, R11, R12", "FFMA.RP R21, R10, R11, R12", "FFMA.RZ R22, R10, R11, R12"]
    down, up, zero = (found.view(np.float32) for found in computed(lines, f32(a), f32(b), f32(c), results=3))
    exact = a.astype(np.float64) * b + c
    assert (down <= exact).all() and (up >= exact).all() and (np.nextafter(down, np.float32(np.inf)) == up).all()
    assert (np.abs(zero) <= np.abs(exact)).all() and ((zero == down) | (zero == up)).all()


def test_conversions():
    lines = [
        "F2FP.BF16.F32.PACK_AB R20, R10, R11",
        "F2FP.F16.F32.PACK_AB R21, R10, R11",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R22, R10, R11, R12",
        "F2FP.F16.E4M3.UNPACK_B R23, R22.H1",
        "F2I.FTZ.U32.TRUNC.NTZ R24, R10",
        "I2F.U32.RP R25, R12",
        "HADD2.F32 R26, -RZ, R21.H1_H1",
        "I2F.U16.RZ R27, R12",
    ]
    a, b, c = FLOATS, np.roll(FLOATS, 2), words(0)
    found = computed(lines, f32(a), f32(b), c, results=8)
    with np.errstate(all="ignore"):
        half = np.where(np.isnan(a), np.uint16(0x7FFF), a.astype(np.float16).view(np.uint16))
        whole = np.nan_to_num(np.trunc(np.where(np.abs(a) < 2**-126, 0, a)), nan=0, posinf=M, neginf=0)
        integers = [min(max(int(x), 0), M) for x in whole]
    assert (found[1] >> 16).tolist() == half.tolist()
    assert (found[2] >> 16).tolist() == [x & 0xFFFF for x in c]  # the upper half is what is merged
    assert found[4].tolist() == integers
    back = found[6].view(np.float32)
    assert np.array_equal(back, half.view(np.float16).astype(np.float32), equal_nan=True)
    floats = found[5].view(np.float32).astype(np.float64)
    below = np.nextafter(floats.astype(np.float32), np.float32(0)).astype(np.float64)
    assert all(low < x <= high or x == high == 0 for low, x, high in zip(below, c, floats, strict=True))
    assert found[7].view(np.float32).tolist() == [float(x & 0xFFFF) for x in c]


def test_predicates_as_bits():
    lines = [
        "R2P PR, R10, 0x7f",
        "P2R R20, PR, R11, 0x55",
        "PLOP3.LUT P6, PT, P0, P1, P2, 0xe8, 0x0",
        "SEL R21, RZ, 0x1, !P6",
        "R2P PR, R10.B1, 0x2",
        "SEL R22, RZ, 0x1, !P1",
    ]
    bits, other = [i * 0x1234567 & M for i in range(32)], words(1)
    found = computed(lines, bits, other, results=3)
    assert found[0].tolist() == [b & 0x55 | o & M & ~0x55 for b, o in zip(bits, other, strict=True)]
    assert found[1].tolist() == [int((b & 1) + (b >> 1 & 1) + (b >> 2 & 1) >= 2) for b in bits]
    assert found[2].tolist() == [b >> 9 & 1 for b in bits]


def test_pairs_of_floats():
    a, b = FLOATS, np.roll(FLOATS, 4)
    lines = [
        "FMUL2 R20, R10.F32x2.HI_LO, R10.F32",
        "FADD2 R10, R10.F32x2.HI_LO, R11.F32",
        "MOV R22, R10",
        "MOV R23, R11",
    ]
    found = [f.view(np.float32) for f in computed(lines, f32(a), f32(b), results=4, arch="sm_100a")]
    with np.errstate(all="ignore"):
        expected = [a * a, b * a, a + b, b + b]
    for got, wanted in zip(found, expected, strict=True):
        assert np.array_equal(got, wanted.astype(np.float32), equal_nan=True)


def test_lanes_move_32_bytes_in_two_pieces_of_four_registers():
    """The lower half is the one next to the place."""
    memory = aligned(np.zeros((4, 32, 8), np.uint32))
    memory[:2] = np.arange(512).reshape(2, 32, 8)
    lines = [
        "S2R R0, SR_TID.X", "LDC.64 R2, c[0x0][0x380]", "IMAD.WIDE.U32 R2, R0, 0x20, R2",
        "LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]",
        "LDG.E.NA.ENL2.LTC256B.256.CONSTANT R16, R12, desc[UR4][R2.64+0x400]",
        "STG.E.ENL2.256 desc[UR4][R2.64+0x800], R4, R8", "STG.E.NA.ENL2.256 desc[UR4][R2.64+0xc00], R16, R12", "EXIT",
    ]  # fmt: skip
    run_lines(lines, memory, arch="sm_100a")
    np.testing.assert_array_equal(memory[2], memory[0])
    np.testing.assert_array_equal(memory[3], np.concatenate([memory[1, :, 4:], memory[1, :, :4]], axis=1))


@pytest.mark.parametrize(("kind", "dtype"), [("S32", np.int32), ("U32", np.uint32)])
def test_integers_become_floats(kind, dtype):
    (found,) = computed([f"I2FP.F32.{kind} R20, R10"], np.array(EDGES, np.uint32), arch="sm_100a")
    expected = np.array(EDGES, np.uint32).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, expected.view(np.uint32))


def test_numbers_of_uniform_registers_and_constants_are_converted():
    lines = [
        "R2UR UR4, R10", "I2F.U32.RP R20, UR4", "I2FP.F32.U32.RZ R21, 0x1000003", "R2UR UR5, R11",
        "F2I.FTZ.U32.TRUNC.NTZ R22, UR5",
    ]  # fmt: skip
    found = computed(lines, np.full(32, 2**24 + 1, np.uint32), f32(np.full(32, 6.75, np.float32)), results=3)
    assert found[0].view(np.float32).tolist() == [2.0**24 + 2] * 32
    assert found[1].view(np.float32).tolist() == [2.0**24 + 2] * 32
    assert found[2].tolist() == [6] * 32
