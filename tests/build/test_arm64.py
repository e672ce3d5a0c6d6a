"""Which instructions the audit lets into libraries for aarch64. Encodings are as GNU as gives them for -march=armv8-a
(the baseline) and for later versions."""

from __future__ import annotations

import struct

import pytest

from build_aot import arm64

BASELINE = {
    "adrp x0, .": 0x90000000, "add x0, x1, #1": 0x91000420, "add w1, w2, w3, lsl #2": 0x0B030841,
    "sub sp, sp, x3, uxtx": 0xCB2363FF, "and w0, w1, #0xff": 0x12001C20, "movz x1, #0x1234, lsl #16": 0xD2A24681,
    "ubfx w0, w1, #3, #4": 0x53031820, "extr x0, x1, x2, #8": 0x93C22020, "b .": 0x14000000, "b.ne .": 0x54000001,
    "cbnz w1, .": 0x35000001, "tbz x2, #40, .": 0xB6400002, "br x16": 0xD61F0200, "blr x8": 0xD63F0100,
    "ret": 0xD65F03C0, "nop": 0xD503201F, "bti c, which was NOP": 0xD503245F, "dmb ish": 0xD5033BBF,
    "brk #1": 0xD4200020, "udf #0": 0x00000000, "mrs x0, tpidr_el0": 0xD53BD040, "ldxr x0, [x1]": 0xC85F7C20,
    "stlxr w2, x0, [x1]": 0xC802FC20, "ldar w0, [x1]": 0x88DFFC20, "ldr x0, .": 0x58000000,
    "stp x29, x30, [sp, #-16]!": 0xA9BF7BFD, "ldp q0, q1, [x0]": 0xAD400400, "ldpsw x0, x1, [x2]": 0x69400440,
    "ldrb w0, [x1, x2]": 0x38626820, "ldur x0, [x1, #-8]": 0xF85F8020, "str d0, [x1], #8": 0xFC008420,
    "udiv x0, x1, x2": 0x9AC20820, "lslv w0, w1, w2": 0x1AC22020, "rev x0, x1": 0xDAC00C20, "clz w0, w1": 0x5AC01020,
    "adc x0, x1, x2": 0x9A020020, "ccmp w0, #3, #0, ne": 0x7A431800, "csel x0, x1, x2, eq": 0x9A820020,
    "madd x0, x1, x2, x3": 0x9B020C20, "umulh x0, x1, x2": 0x9BC27C20, "smull x0, w1, w2": 0x9B227C20,
    "scvtf s0, w1": 0x1E220020, "fcvtzs x0, d1": 0x9E780020, "fmov x0, v1.d[1]": 0x9EAE0020, "fcvt s0, h1": 0x1EE24020,
    "fcmp d0, #0.0": 0x1E602008, "fadd s0, s1, s2": 0x1E222820, "fmov d0, #1.0": 0x1E6E1000,
    "fmadd d0, d1, d2, d3": 0x1F420C20, "fcsel s0, s1, s2, gt": 0x1E22CC20, "ld1 {v0.16b}, [x0]": 0x4C407000,
    "ld1r {v0.4s}, [x0]": 0x4D40C800, "add v0.4s, v1.4s, v2.4s": 0x4EA28420, "fmla v0.2d, v1.2d, v2.2d": 0x4E62CC20,
    "umull v0.8h, v1.8b, v2.8b": 0x2E22C020, "addv s0, v1.4s": 0x4EB1B820, "dup v0.4s, w1": 0x4E040C20,
    "zip1 v0.4s, v1.4s, v2.4s": 0x4E823820, "tbl v0.16b, {v1.16b}, v2.16b": 0x4E020020, "movi v0.2d, #0": 0x6F00E400,
    "shl v0.4s, v1.4s, #3": 0x4F235420, "fmul v0.4s, v1.4s, v2.s[1]": 0x4FA29020, "fabs v0.2d, v1.2d": 0x4EE0F820,
    "addp d0, v1.2d": 0x5EF1B820,
}  # fmt: skip
LATER = {
    "ldadd w0, w1, [x2]": 0xB8200041, "cas w0, w1, [x2]": 0x88A07C41, "casp x0, x1, x2, x3, [x4]": 0x48207C82,
    "swpal x0, x1, [x2]": 0xF8E08041, "ldapr x0, [x1]": 0xF8BFC020, "ldapur x0, [x1]": 0xD9400020,
    "ptrue p0.b": 0x2518E3E0, "add z0.s, z1.s, z2.s": 0x04A20020, "smstart": 0xD503477F,
    "crc32b w0, w1, w2": 0x1AC24020,
    "aese v0.16b, v1.16b": 0x4E284820, "sha1h s0, s1": 0x5E280820, "pmull v0.1q, v1.1d, v2.1d": 0x0EE2E020,
    "sdot v0.4s, v1.16b, v2.16b": 0x4E829420, "fadd h0, h1, h2": 0x1EE22820, "fadd v0.8h, v1.8h, v2.8h": 0x4E421420,
    "fmov v0.8h, #1.0": 0x4F03FE00, "fmla v0.8h, v1.8h, v2.h[0]": 0x4F021020, "fmlal v0.4s, v1.4h, v2.4h": 0x4E22EC20,
    "sqrdmlah v0.4s, v1.4s, v2.4s": 0x6E828420, "fcmla v0.4s, v1.4s, v2.4s, #0": 0x6E82C420,
    "bfcvt h0, s1": 0x1E634020, "bfdot v0.4s, v1.8h, v2.8h": 0x6E42FC20, "fjcvtzs w0, d1": 0x1E7E0020,
    "frint32z s0, s1": 0x1E284020, "retaa": 0xD65F0BFF, "pacia x0, x1": 0xDAC10020, "ldraa x0, [x1]": 0xF8200420,
    "irg x0, x1": 0x9ADF1020, "stgp x0, x1, [x2]": 0x69000440, "setf8 w0": 0x3A00080D, "rmif x0, #0, #1": 0xBA000401,
    "sb": 0xD50330FF, "bc.eq .": 0x54000010, "ctz x0, x1": 0xDAC01820, "cpyfp [x0]!, [x1]!, x2!": 0x19010440,
}  # fmt: skip


@pytest.mark.parametrize("name", BASELINE)
def test_baseline_instructions_are_let_in(name: str) -> None:
    assert list(arm64.beyond_baseline(struct.pack("<I", BASELINE[name]))) == []


@pytest.mark.parametrize("name", LATER)
def test_later_instructions_are_found(name: str) -> None:
    code = struct.pack(f"<{len(BASELINE) + 1}I", *BASELINE.values(), LATER[name])
    where = f"at offset {4 * len(BASELINE):#x}: {LATER[name]:08x}"
    assert list(arm64.beyond_baseline(code)) == [f"an instruction later than Armv8.0-A {where}"]


def test_code_that_ends_inside_an_instruction_is_reported() -> None:
    assert list(arm64.beyond_baseline(b"\x1f\x20\x03\xd5\x1f")) == ["the last instruction is cut off"]
