"""Loads and stores of threads, constants, atomics, and copies that a warp starts: LDGSTS, UTMA, UBLKCP, mbarriers."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Addr, Choice, Const, Desc, Pred, Reg, flag, ureg
from tsmla_emulator.run.sass.forms import Form, form
from tsmla_emulator.run.sass.tables.parts import BIT91, NO24, NO64, P81, SIZE, UD, D

WIDE = Reg(24, suffix="64")
CONSTANT_SIZE = Choice(73, 3, ("U8", "S8", "U16", "S16", "", "64"))
WORDS = Choice(73, 3, {4: "", 5: "64", 6: "128"})
MATRICES = (Choice(78, 1, ("M88", "MT88")), Choice(72, 2, ("", "2", "4")))
ATOMIC = (Choice(87, 4, ("ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR", "EXCH")),)
EVICTION = Choice(84, 3, ("EF", "", "EL", "LU", "EU", "NA"))
SECOND_LEVEL = Choice(81, 1, ("EFL2", "ENL2"))
PREFETCH = ("", "LTC64B", "LTC128B", "LTC256B")
DIMENSIONS = Choice(79, 3, ("1D", "2D", "3D", "4D", "5D"))
ARRIVAL = (flag(74, "RED"), Choice(84, 3, ("", "A1T0", "A0T1", "A0TR", "A0TX", "ART0")))
POLICY = Desc("desc", ureg(40))


def shared(uniform: int | None) -> Addr:
    """Return an address in shared memory: a register, maybe a uniform one from this bit on, and 24 bits of offset."""
    return Addr(Reg(24), None if uniform is None else ureg(uniform), 40, 24)


LOCAL = Addr(WIDE, None, 40, 24)

BOTH: list[Form] = [
    # global memory
    form(
        0x981, "LDG.E", D, Desc("desc", ureg(32), LOCAL), Pred(64, 67, silent=True, backwards=True),
        parts=(EVICTION, Choice(68, 2, PREFETCH), SIZE, flag(79, "CONSTANT")),
        fixed={(72, 1): 1, (76, 1): 1, (81, 3): 7, (90, 2): 3},
    ),
    form(
        0x986, "STG.E", Desc("desc", ureg(64), LOCAL), Reg(32), parts=(EVICTION, SIZE),
        fixed={(72, 1): 1, (76, 1): 1, (90, 2): 3},
    ),
    # shared memory, with and without a uniform register in the address
    form(0x984, "LDS", D, shared(None), parts=(SIZE,)),
    form(0x984, "LDS", D, shared(32), parts=(SIZE,), fixed=BIT91),
    form(0x388, "STS", shared(None), Reg(32), parts=(SIZE,)),
    form(0x988, "STS", shared(64), Reg(32), parts=(SIZE,), fixed=BIT91),
    # constants
    form(0xB82, "LDC", D, Const(38, 16, Reg(24)), parts=(CONSTANT_SIZE,)),
    # caches and order
    form(0x98F, "CCTL.IVALL", NO24, fixed={(87, 4): 4}),
    form(0x992, "MEMBAR", parts=(Choice(79, 2, ("SC", "ALL", "", "MMIO")), Choice(76, 3, ("CTA", "SM", "GPU", "SYS")))),
    form(0x9AB, "ERRBAR"),
    form(0x5AB, "CGAERRBAR"),
    form(0x9AF, "LDGDEPBAR"),
    # asynchronous copies
    form(0x9B9, "UTMACCTL", Addr(uniform=ureg(24)), parts=(Choice(82, 1, ("IV", "PF")),), fixed=BIT91, uniform=True),
    form(
        0x3BA, "UBLKCP.S.S", Addr(uniform=ureg(32)), Addr(uniform=ureg(24)), ureg(64), fixed={(73, 2): 3, **BIT91},
        uniform=True,
    ),
    form(
        0x3BA, "UBLKCP.S.G", Addr(uniform=ureg(32)), Addr(uniform=ureg(24)), ureg(64), POLICY,
        fixed={(73, 1): 1, (76, 1): 1, **BIT91}, uniform=True,
    ),
    form(0x83B, "LDSM.16", D, shared(None), parts=MATRICES),
    form(0x83B, "LDSM.16", D, shared(32), parts=MATRICES, fixed=BIT91),
    form(0x844, "STSM.16", shared(None), Reg(32), parts=MATRICES),
    form(0x844, "STSM.16", shared(64), Reg(32), parts=MATRICES, fixed=BIT91),
    form(0x38C, "ATOMS", D, shared(None), Reg(32), parts=ATOMIC),
    form(0x98C, "ATOMS", D, shared(64), Reg(32), parts=ATOMIC, fixed=BIT91),
    form(
        0xDBD, "STAS", Addr(Reg(24, suffix="64", present=True), None, 40, 24), Reg(32), NO64, parts=(WORDS,),
        fixed={(90, 1): 1, **BIT91},
    ),
    form(
        0x3B5, "UTMASTG", Addr(uniform=ureg(32)), Addr(uniform=ureg(24)), POLICY, parts=(DIMENSIONS,),
        fixed={(76, 1): 1, **BIT91}, uniform=True,
    ),
    form(0x9B7, "UTMACMDFLUSH", uniform=True),
]  # fmt: skip


def barriers(operation: int, ahead: int) -> list[Form]:
    """Return what is done to mbarriers and to copies that arrive there.

    operation: first of the two bits that tell what SYNCS does, which stand behind its uniform register.
    ahead: the bit that lets a test wait for a while.
    """
    done, entry = shared(64), Addr(uniform=ureg(24), first=40, width=24)
    return [
        form(
            0x5A7, "SYNCS.PHASECHK.TRANS64", P81, done, Reg(32), parts=(flag(ahead, "TRYWAIT"),),
            fixed={(operation, 2): 1, **BIT91},
        ),
        form(0x9A7, "SYNCS.ARRIVE.TRANS64", D, done, Reg(32), parts=ARRIVAL, fixed=BIT91),
        form(0x5B2, "SYNCS.EXCH.64", UD, entry, ureg(32), fixed={(72, 1): 1, **BIT91}, uniform=True),
        form(
            0x9B0, "ARRIVES.LDGSTSBAR.64.ARVCNT", done, fixed={(operation, 1): 1, (73, 1): 1, (75, 1): 1, **BIT91},
        ),
    ]  # fmt: skip


def copies(prefetch: int, size: Choice, one: int) -> list[Form]:
    """Return LDGSTS.

    prefetch: first of the two bits that say how much of the second-level cache's line is fetched.
    size: of what each thread copies.
    one: a bit that is always set.
    """
    return [
        form(
            0xFAE, "LDGSTS.E", Addr(Reg(16), None, 44, 20), Desc("desc", ureg(64), Addr(WIDE, None, 32, 12)),
            Pred(87, 90, silent=True),
            parts=(Choice(81, 1, ("BYPASS", "")), EVICTION, Choice(prefetch, 2, PREFETCH), size),
            fixed={(76, 1): 1, **BIT91, (one, 1): 1},
        ),
    ]  # fmt: skip


HOPPER: list[Form] = [
    *barriers(70, 72),
    *copies(71, WORDS, 70),
    form(0xAB9, "ULDC", UD, Const(38, 16), parts=(CONSTANT_SIZE,), uniform=True),
    form(
        0x5B4, "UTMALDG", Addr(uniform=ureg(32)), Addr(uniform=ureg(24)), POLICY, parts=(DIMENSIONS,),
        fixed={(76, 1): 1, **BIT91}, uniform=True,
    ),
    # matrices
]  # fmt: skip


BLACKWELL: list[Form] = [
    *barriers(76, 72),
    *copies(72, Choice(74, 2, ("", "64", "128")), 83),
    form(0x7AC, "LDCU", UD, Const(37, 17, ureg(24)), parts=(SIZE,), fixed=BIT91, uniform=True),
    form(
        0x5B4, "UTMALDG", Addr(uniform=ureg(32)), Addr(uniform=ureg(24)), POLICY,
        parts=(DIMENSIONS, flag(84, "GATHER4"), flag(85, "2CTA")), fixed={(76, 1): 1, **BIT91}, uniform=True,
    ),
    form(
        0x3CA, "UGETNEXTWORKID", Addr(uniform=ureg(24)), Addr(uniform=ureg(24, again=True), above=1),
        parts=(Choice(72, 1, ("SELFCAST", "BROADCAST")),), fixed=BIT91, uniform=True,
    ),
    # 32 bytes a thread, in two pieces of four registers
    form(
        0x97E, "LDG.E", Reg(64), D, Desc("desc", ureg(32), Addr(WIDE, None, 40, 17, scale=32)),
        parts=(EVICTION, SECOND_LEVEL, Choice(73, 2, PREFETCH), "256", flag(79, "CONSTANT")),
        fixed={(57, 7): 127, (72, 1): 1, (75, 2): 3, **BIT91},
    ),
    form(
        0x97F, "STG.E", Desc("desc", ureg(64), Addr(WIDE, None, 40, 19, scale=32)), Reg(32), D,
        parts=(EVICTION, SECOND_LEVEL, "256"), fixed={(59, 5): 31, (75, 2): 3, (88, 4): 15},
    ),
]  # fmt: skip
