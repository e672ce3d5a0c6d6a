"""Moves and choices between registers, votes, shuffles, and reductions of a warp."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import AllPredicates, Choice, Int, Pred, Reg, SpecialReg, ureg
from tsmla_emulator.run.sass.forms import Form, arithmetic, form
from tsmla_emulator.run.sass.tables.parts import BIT91, P81, P87, UD, UP81, UP87, A, B, D

SPECIAL = SpecialReg(
    Choice(
        72,
        8,
        {
            0x00: "SR_LANEID", 0x21: "SR_TID.X", 0x22: "SR_TID.Y", 0x23: "SR_TID.Z", 0x25: "SR_CTAID.X",
            0x26: "SR_CTAID.Y", 0x27: "SR_CTAID.Z", 0x2F: "SR_SWINHI", 0x88: "SR_CgaCtaId", 0xFF: "SRZ",
        },
    )
)  # fmt: skip
LANES = Int(72, 4, silent=0xF)
VOTE = Choice(72, 2, ("ALL", "ANY", "EQ"))
SHUFFLE = (Choice(58, 2, ("IDX", "UP", "DOWN", "BFLY")),)

BOTH: list[Form] = [
    *arithmetic(0x002, "MOV", "rr nr ur", D, B, LANES),
    *arithmetic(0x082, "UMOV", "ur", UD, B, uniform=True),
    form(0x882, "UMOV", UD, Int(32), uniform=True),
    *arithmetic(0x007, "SEL", "rr nr ur", D, A, B, P87),
    *arithmetic(0x087, "USEL", "rr nr", UD, A, B, UP87, uniform=True),
    form(0x805, "CS2R", D, SPECIAL, parts=(Choice(80, 1, ("32", "")),)),
    form(0x919, "S2R", D, SPECIAL),
    form(0x9C3, "S2UR", UD, SPECIAL, uniform=True),
    form(0x803, "P2R", D, AllPredicates(), Reg(24), Int(32), parts=(Choice(76, 2, ("", "B1", "B2", "B3")),), reuse=1),
    # votes and reductions
    form(0x806, "VOTE", Reg(16, silent=True), P81, P87, parts=(VOTE,)),
    form(0x886, "VOTEU", ureg(16, silent=True), UP81, P87, parts=(VOTE,)),
    form(0x82F, "ELECT", P81, UD, P87),
    form(
        0x3C4, "REDUX", UD, Reg(24),
        parts=(Choice(78, 3, ("", "OR", "XOR", "SUM", "MIN", "MAX")), Choice(73, 1, ("", "S32"))),
    ),
    # shuffles: the lane or distance and the mask are registers or numbers
    form(0x389, "SHFL", P81, D, Reg(24), Reg(32), Reg(64), parts=SHUFFLE),
    form(0x589, "SHFL", P81, D, Reg(24), Reg(32), Int(40, 13), parts=SHUFFLE),
    form(0x989, "SHFL", P81, D, Reg(24), Int(53, 5), Reg(64), parts=SHUFFLE),
    form(0xF89, "SHFL", P81, D, Reg(24), Int(53, 5), Int(40, 13), parts=SHUFFLE),
    form(0x883, "UP2UR", UD, AllPredicates(uniform=True), ureg(24), Int(32), fixed=BIT91, uniform=True),
    form(
        0x804, "R2P", AllPredicates(), Reg(24, part=Choice(76, 2, ("", "B1", "B2", "B3"))), Int(32, 8, silent=0xFF),
        reuse=1,
    ),
]  # fmt: skip

R2UR_PREDICATE = Pred(81, silent=True)

HOPPER: list[Form] = [
    form(0x2CA, "R2UR", R2UR_PREDICATE, UD, Reg(24), reuse=1),
]

BLACKWELL: list[Form] = [
    *arithmetic(0x002, "MOV.SPILL", "ur", D, B, fixed={(72, 4): 0xF, (88, 1): 1}),
    form(0x2CA, "R2UR", R2UR_PREDICATE, UD, Reg(24), parts=(Choice(86, 2, ("", "FILL", "BROADCAST")),), reuse=1),
    form(
        0x2CC, "CREDUX", UD, Reg(24), parts=(Choice(79, 1, ("MAX", "MIN")), Choice(73, 2, ("", "S32"))), reuse=1
    ),
]  # fmt: skip
