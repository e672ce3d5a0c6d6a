"""Arithmetic of integers and logic, of threads and of a warp's uniform path."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Choice, Field, Int, Pred, Reg, TruthTable, flag, upred, ureg
from tsmla_emulator.run.sass.forms import Form, Source, arithmetic, form
from tsmla_emulator.run.sass.tables.parts import (
    BIT91,
    BOOLEAN,
    NO_CARRY_IN,
    P68,
    P77,
    P81,
    P84,
    P87,
    RELU,
    TYPE,
    UD,
    UP77,
    UP81,
    UP84,
    UP87,
    A,
    B,
    C,
    D,
)

SA, SB, SC = (Source(slot, "-", "signed") for slot in "abc")
"""Sources that may be negated; numbers are printed with their sign."""

PLAIN_A, PLAIN_B = Source("a", immediate="signed"), Source("b", immediate="signed")
XA, XB, XC = (Source(slot, "~", "signed") for slot in "abc")
"""Sources of an instruction with a carry: what would be negated is inverted."""

COMPARISON = Choice(76, 3, ("F", "LT", "EQ", "LE", "GT", "NE", "GE", "T"))
UNSIGNED = Choice(73, 1, ("U32", ""))
NO_CARRIES_IN = {(77, 4): 0xF, (87, 4): 0xF}
NO_PREDICATE = {(81, 3): 7}
SHIFT = (
    Choice(76, 1, ("L", "R")), flag(75, "W"), Choice(73, 2, ("S64", "U64", "S32", "U32")), flag(80, "HI"),
)  # fmt: skip
AMOUNT = Int(75, 5)


def adds(code: int, name: str, kinds: str, d: Field, carries_out: tuple[Field, ...],
         carries_in: tuple[Field, ...], uniform: bool) -> list[Form]:  # fmt: skip
    """Return sums of three numbers, without and with carries."""
    return [
        *arithmetic(code, name, kinds, d, *carries_out, SA, SB, SC, fixed=NO_CARRIES_IN, uniform=uniform),
        *arithmetic(code, name, kinds, d, *carries_out, XA, XB, XC, *carries_in, parts=("X",), fixed={(74, 1): 1},
                    uniform=uniform),
    ]  # fmt: skip


def leas(code: int, name: str, kinds: str, d: Field, carry_out: Field, carry_in: Field, uniform: bool) -> list[Form]:
    """Return sums with a shifted number: of the low word, of the high word of two (HI), of one with its sign (SX32)."""
    a, b, xa, xb = Source("a", "-"), Source("b", "-"), Source("a", "~"), Source("b", "~")
    absent = Reg(64, absent=True)
    extended, carry, high = {(73, 1): 1}, {(74, 1): 1}, {(80, 1): 1}
    return [
        *arithmetic(code, name, kinds, d, carry_out, a, b, absent, AMOUNT, fixed=NO_CARRY_IN, uniform=uniform),
        *arithmetic(code, f"{name}.HI", kinds, d, carry_out, a, b, C, AMOUNT, fixed={**high, **NO_CARRY_IN},
                    uniform=uniform),
        *arithmetic(code, f"{name}.HI.SX32", kinds, d, carry_out, a, b, absent, AMOUNT,
                    fixed={**high, **extended, **NO_CARRY_IN}, uniform=uniform),
        *arithmetic(code, f"{name}.HI.X", kinds, d, carry_out, xa, xb, C, AMOUNT, carry_in, fixed={**high, **carry},
                    uniform=uniform),
        *arithmetic(code, f"{name}.HI.X.SX32", kinds, d, carry_out, xa, xb, absent, AMOUNT, carry_in,
                    fixed={**high, **extended, **carry}, uniform=uniform),
    ]  # fmt: skip


def products(code: int, name: str, kinds: str, d: Field, carry: dict[tuple[int, int], int],
             carry_in: Field, uniform: bool, carry_out: tuple[Field, ...] = ()) -> list[Form]:  # fmt: skip
    """Return products with a sum, without and with a carry."""
    return [
        *arithmetic(code, name, kinds, d, *carry_out, PLAIN_A, PLAIN_B, SC, parts=(UNSIGNED,),
                    fixed={**NO_CARRY_IN, **carry}, uniform=uniform),
        *arithmetic(code, name, kinds, d, *carry_out, PLAIN_A, PLAIN_B, XC, carry_in, parts=(UNSIGNED, "X"),
                    fixed={(74, 1): 1, **carry}, uniform=uniform),
    ]  # fmt: skip


COMPARE = (COMPARISON, UNSIGNED, BOOLEAN)

BOTH: list[Form] = [
    *arithmetic(0x00C, "ISETP", "rr nr ur", P81, P84, PLAIN_A, PLAIN_B, P87, parts=COMPARE, fixed={(68, 4): 7}),
    *arithmetic(0x00C, "ISETP", "rr nr ur", P81, P84, PLAIN_A, PLAIN_B, P87, P68, parts=(*COMPARE, "EX"),
                fixed={(72, 1): 1}),
    *leas(0x011, "LEA", "rr nr ur", D, Pred(81, silent=True), P87, False),
    *arithmetic(0x012, "LOP3.LUT", "rr nr ur", Pred(81, silent=True), D, A, B, C, Int(72, 8), P87),
    *arithmetic(0x013, "IABS", "rr", D, B),
    *arithmetic(0x016, "PRMT", "rr nr", D, A, B, C),
    *arithmetic(0x019, "SHF", "rr nr ur", D, A, B, C, parts=SHIFT),
    *products(0x024, "IMAD", "rr rn nr ur ru", D, NO_PREDICATE, P87, False),
    *products(0x025, "IMAD.WIDE", "rr nr ur ru", D, {}, P87, False, (Pred(81, silent=True),)),
    *products(0x027, "IMAD.HI", "rr nr ur", D, {}, P87, False, (Pred(81, silent=True),)),
    *arithmetic(0x036, "VIADD", "nr ur", D, A, Source("b", "-")),
    *arithmetic(0x046, "VIADDMNMX", "rr rn nr ur ru", D, A, Source("b", "-"), C, P87, parts=(TYPE, RELU)),
    *arithmetic(0x00F, "VIMNMX3", "rr nr ur", D, A, B, C, P87, parts=(TYPE, RELU)),
    form(0x309, "POPC", D, Reg(32, inverted=63)),
    form(0x300, "FLO", D, Pred(81, silent=True), Reg(32), parts=(Choice(73, 1, ("U32", "")),)),
    form(0x81C, "PLOP3.LUT", P81, P84, P87, P77, Pred(68, 71, uniform_bit=67), TruthTable(), Int(16, 8)),
    # uniform
    *leas(0x091, "ULEA", "rr nr", UD, upred(81, silent=True), UP87, True),
    *arithmetic(0x08C, "UISETP", "rr nr", UP81, UP84, PLAIN_A, PLAIN_B, UP87, parts=COMPARE, fixed={(68, 4): 7},
                uniform=True),
    *arithmetic(0x08C, "UISETP", "rr nr", UP81, UP84, PLAIN_A, PLAIN_B, UP87, upred(68, 71), parts=(*COMPARE, "EX"),
                fixed={(72, 1): 1}, uniform=True),
    *arithmetic(0x092, "ULOP3.LUT", "rr nr", upred(81, silent=True), UD, A, B, C, Int(72, 8), UP87, uniform=True),
    *arithmetic(0x099, "USHF", "rr nr", UD, A, B, C, parts=SHIFT, uniform=True),
    *products(0x0A4, "UIMAD", "rr rn nr", UD, NO_PREDICATE, UP87, True),
    *products(0x0A5, "UIMAD.WIDE", "rr nr", UD, {}, UP87, True, (upred(81, silent=True),)),
    form(0x2BF, "UPOPC", UD, ureg(32, inverted=63), fixed=BIT91, uniform=True),
    *arithmetic(0x096, "UPRMT", "nr", UD, A, B, C, uniform=True),
    form(0x89C, "UPLOP3.LUT", UP81, UP84, UP87, UP77, upred(68, 71), TruthTable(), Int(16, 8), uniform=True),
    form(0xD09, "POPC", D, ureg(32, inverted=63), fixed=BIT91),
    form(
        0x2BD, "UFLO", UD, upred(81, silent=True), ureg(32, inverted=63), parts=(Choice(73, 1, ("U32", "")),),
        fixed=BIT91, uniform=True,
    ),
]  # fmt: skip

SILENT = (Pred(81, silent=True), Pred(84, silent=True))
USILENT = (upred(81, silent=True), upred(84, silent=True))

HOPPER: list[Form] = [
    *adds(0x010, "IADD3", "rr nr ur", D, SILENT, (P87, P77), False),
    *adds(0x090, "UIADD3", "rr nr", UD, USILENT, (UP87, UP77), True),
    *adds(0x097, "UIADD3.64", "rr nr", UD, USILENT, (UP87, UP77), True),
    *arithmetic(0x048, "VIMNMX", "rr nr ur", D, A, PLAIN_B, P87, parts=(TYPE, RELU), fixed={(81, 6): 0x3F}),
]

BLACKWELL: list[Form] = [
    *adds(0x010, "IADD3", "rr nr ur", D, (P81, P84), (P87, P77), False),
    *adds(0x090, "UIADD3", "rr nr", UD, (UP81, UP84), (UP87, UP77), True),
    *adds(0x097, "UIADD3.64", "rr nr", UD, (UP81, UP84), (UP87, UP77), True),
    *arithmetic(0x048, "VIMNMX", "rr nr ur", D, P81, P84, A, PLAIN_B, P87, parts=(TYPE, RELU)),
]  # fmt: skip
