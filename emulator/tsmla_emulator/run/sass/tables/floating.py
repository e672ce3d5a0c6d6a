"""Arithmetic of floating-point numbers, conversions, and special functions."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Choice, Flt, Int, Reg, flag, ureg
from tsmla_emulator.run.sass.forms import Form, Source, arithmetic, form
from tsmla_emulator.run.sass.tables.parts import BIT91, BOOLEAN, FTZ, NO24, NO64, P81, P84, P87, ROUNDING, SATURATE, D

FA, FB, FC = (Source(slot, "-||", "float") for slot in "abc")

LAST = Source("b", "-||", "float", reuse=2)
"""The second of two sources, which stays in the reuse cache in the third place."""

COMPARISON = Choice(
    76,
    4,
    ("F", "LT", "EQ", "LE", "GT", "NE", "GE", "NUM", "NAN", "LTU", "EQU", "LEU", "GTU", "NEU", "GEU", "T"),
)
NAN = flag(81, "NAN")


def half(first: int) -> Choice:
    """Return which halves of a register a packed instruction reads; both in their order when nothing is printed."""
    return Choice(first, 2, {0: "", 2: "H0_H0", 3: "H1_H1"})


def pair(first: int, width: int = 3) -> Choice:
    """Return which of two registers an instruction on pairs reads: both, both the other way round, or one twice."""
    return Choice(first, width, ("F32x2.HI_LO", "F32x2.LO_HI", "F32"))


def paired(slot: str, first: int, width: int = 3, reuse: int = 0) -> Source:
    return Source(slot, "-||", "float", part=pair(first, width), reuse=reuse)


SPECIAL = {0: "COS", 1: "SIN", 2: "EX2", 3: "LG2", 4: "RCP", 5: "RSQ", 8: "SQRT", 9: "TANH"}
TYPES = Choice(85, 1, ("", "BF16_V2"))

BOTH: list[Form] = [
    # one number
    *arithmetic(0x020, "FMUL", "rr nr ur", D, FA, FB, parts=(FTZ, ROUNDING, SATURATE), fixed={(84, 3): 4}),
    *arithmetic(0x021, "FADD", "rr", D, FA, LAST, parts=(FTZ, ROUNDING, SATURATE)),
    *arithmetic(0x021, "FADD", "rn", D, FA, FC, parts=(FTZ, ROUNDING, SATURATE)),
    *arithmetic(0x023, "FFMA", "rr rn nr ur", D, FA, FB, FC, parts=(FTZ, ROUNDING, SATURATE)),
    *arithmetic(0x008, "FSEL", "rr nr ur", D, FA, FB, P87, parts=(FTZ,)),
    *arithmetic(0x009, "FMNMX", "rr nr", D, FA, FB, P87, parts=(FTZ, NAN)),
    *arithmetic(0x00B, "FSETP", "rr nr ur", P81, P84, FA, FB, P87, parts=(COMPARISON, FTZ, BOOLEAN)),
    *arithmetic(0x102, "FCHK", "rr nr", P81, FA, FB, registers=""),
    # packed halves
    *arithmetic(
        0x030, "HADD2.F32", "rr", D, Source("a", "-"), Source("b", "-||", part=half(60), reuse=2),
        parts=(FTZ, SATURATE), fixed={(78, 1): 1}, registers="b",
    ),
    # conversions
    *arithmetic(
        0x03E, "F2FP", "rr", D, Source("a"), Source("b"), NO64,
        parts=(flag(77, "SATFINITE"), flag(75, "RELU"), Choice(76, 1, ("F16", "BF16")), "F32", "PACK_AB"),
    ),
    form(
        0x23E, "F2FP.SATFINITE", D, Reg(24), Reg(32), Reg(64),
        parts=(Choice(76, 1, ("E5M2", "E4M3")), "F32", "PACK_AB_MERGE_C"),
        fixed={(77, 2): 3, (87, 1): 1, (90, 1): 1}, reuse=7,
    ),
    form(
        0x23E, "F2FP.F16", D, NO24, Reg(32, part=Choice(88, 1, ("", "H1"))), NO64,
        parts=(Choice(73, 1, ("E5M2", "E4M3")), "UNPACK_B"), fixed={(74, 1): 1, (89, 1): 1}, reuse=2,
    ),
    *(
        form(
            code, "F2I", D, source,
            parts=(FTZ, Choice(72, 1, ("U32", "")), Choice(78, 2, ("", "FLOOR", "CEIL", "TRUNC")), flag(77, "NTZ")),
            fixed={(76, 1): 1, (85, 1): 1, **bit91},
        )
        for code, source, bit91 in ((0x305, Reg(32, negated=63, absolute=62), {}), (0xD05, ureg(32), BIT91))
    ),
    *(
        form(code, "I2F", D, source, parts=(Choice(84, 2, names), ROUNDING), fixed={(74, 1): sign, (76, 1): 1, **bit91})
        for code, source, bit91 in ((0x306, Reg(32), {}), (0xD06, ureg(32), BIT91))
        for sign, names in ((0, ("U8", "U16", "U32")), (1, ("S8", "S16", "")))
    ),
    *(
        form(
            code, f"I2FP.F32.{kind}", D, source, parts=(ROUNDING,), fixed={(74, 1): sign, (76, 1): 1, (85, 1): 1},
            reuse=reuse,
        )
        for code, source, reuse in ((0x245, Reg(32), 2), (0x845, Int(32), 0))
        for sign, kind in ((0, "U32"), (1, "S32"))
    ),
    # special functions
    form(0x308, "MUFU", D, Reg(32, negated=63, absolute=62), parts=(Choice(74, 4, SPECIAL),)),
    form(0x908, "MUFU", D, Flt(32), parts=(Choice(74, 4, SPECIAL),)),
    *arithmetic(
        0x031, "HFMA2", "rr", D, Source("a", "-||", part=half(74)), Source("b", "-||", part=half(60)),
        Source("c", "-||", part=half(81), negated=84, absolute=83), parts=(TYPES, FTZ, SATURATE),
    ),
    *arithmetic(
        0x040, "HMNMX2", "rr", D, Source("a", "-||", part=half(74)), Source("b", "-||", part=half(60)), P87,
        parts=(TYPES, FTZ, NAN),
    ),
    *arithmetic(
        0x047, "VHMNMX", "rr", D, Source("a", "-||", part=half(74)), Source("b", "-||", part=half(60)),
        Source("c", "-||", part=half(76), negated=84, absolute=83), P87, parts=(TYPES, FTZ, NAN),
    ),
    form(
        0x23C, "HMMA.16816.F32", D, Reg(24), Reg(32), Reg(64), parts=(Choice(82, 2, ("", "BF16")),),
        fixed={(75, 2): 3}, reuse=3,
    ),
    form(
        0x431, "HFMA2", D, Reg(24, negated=72, absolute=73), Reg(64, negated=84, absolute=83), Flt(48, 16),
        Flt(32, 16), parts=(TYPES, FTZ, SATURATE), reuse=3,
    ),
]  # fmt: skip

HOPPER: list[Form] = [
    form(
        0x435, "HFMA2.MMA", D, Reg(24, negated=72, absolute=73), Reg(64, negated=84, absolute=83), Flt(48, 16),
        Flt(32, 16), parts=(TYPES, FTZ, SATURATE), reuse=3,
    ),
]  # fmt: skip

BLACKWELL: list[Form] = [
    *arithmetic(0x076, "FMNMX3", "rr nr", D, FA, FB, FC, P87, parts=(FTZ, NAN)),
    *arithmetic(0x049, "FFMA2", "rr ur", D, paired("a", 81), paired("b", 87, 2), paired("c", 84),
                parts=(FTZ, ROUNDING)),
    *arithmetic(0x049, "FFMA2", "rn", D, paired("a", 81), paired("b", 87, 2), FC, parts=(FTZ, ROUNDING),
                fixed={(84, 3): 2}),
    *arithmetic(0x04A, "FMUL2", "rr ur", D, paired("a", 81), paired("b", 87, 2), parts=(FTZ, ROUNDING)),
    *arithmetic(0x04A, "FMUL2", "nr", D, paired("a", 81), FB, parts=(FTZ, ROUNDING), fixed={(87, 3): 2}),
    *arithmetic(0x04B, "FADD2", "rr", D, paired("a", 81), paired("b", 84, reuse=2), parts=(FTZ, ROUNDING)),
    *arithmetic(0x04B, "FADD2", "rn", D, paired("a", 81), FC, parts=(FTZ, ROUNDING), fixed={(84, 3): 2}),
]  # fmt: skip
