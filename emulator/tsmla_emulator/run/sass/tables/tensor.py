"""Products of matrices: Hopper's warpgroups, Blackwell's tensor memory."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Addr, Board, Choice, Desc, Int, Reg, flag, upred, ureg
from tsmla_emulator.run.sass.forms import Form, form
from tsmla_emulator.run.sass.tables.parts import BIT91, NO64, UD, UP81, UP87, D


def columns(depth: int) -> Choice:
    """Return the shape of a warpgroup's product: 64 rows, 8 to 256 columns."""
    return Choice(53, 6, {index: f"64x{8 * index + 8}x{depth}" for index in range(32)})


KEEPS = upred(87, 90, silent=True, backwards=True)
"""Whether the sum goes on from what is there."""

GROUP = Board("gsb", 84, 1, silent=7)
HALF = (columns(16), "F32", Choice(76, 2, ("", "BF16")))
BYTE = (columns(32), "F32", Choice(76, 1, ("E4M3", "E5M2")), Choice(77, 1, ("E4M3", "E5M2")))
TRANSPOSED_A, TRANSPOSED_B = flag(61, "tnspA"), flag(62, "tnspB")
WARPGROUP_FIXED = {(75, 1): 1, **BIT91}

HOPPER: list[Form] = [
    # both matrices in shared memory, and one of them in registers
    form(0x9F0, "HGMMA", D, Desc("gdesc", ureg(24), suffixes=(TRANSPOSED_A, TRANSPOSED_B)), Reg(64), KEEPS, GROUP,
         parts=HALF, fixed=WARPGROUP_FIXED),
    form(0xDF0, "HGMMA", D, Reg(24), Desc("gdesc", ureg(32), suffixes=(TRANSPOSED_B,)), Reg(64), KEEPS, GROUP,
         parts=HALF, fixed=WARPGROUP_FIXED),
    form(0x9F3, "QGMMA", D, Desc("gdesc", ureg(24)), Reg(64), KEEPS, GROUP, parts=BYTE, fixed=WARPGROUP_FIXED),
    form(0xDF3, "QGMMA", D, Reg(24), Desc("gdesc", ureg(32)), Reg(64), KEEPS, GROUP, parts=BYTE,
         fixed=WARPGROUP_FIXED),
    form(0x9C5, "WARPGROUP", parts=(Choice(79, 2, ("ARRIVE", "WAIT")),)),
    form(0x9C5, "WARPGROUP.DEPBAR.LE", Board("gsb", 44, 1), Int(72, 3), fixed={(47, 1): 1, (80, 1): 1},
         awaits=False),
]  # fmt: skip

PAIR = flag(85, "2CTA")
COPIED = (
    {0: "", 2: "4dp256bit", 3: "128dp128bit"},
    {0: "2x64dp128bit_lw02_lw13", 1: "2x64dp128bit_lw01_lw23", 2: "4x32dp128bit"},
)
"""What UTCCP copies once and what it copies several times."""
REPEATS = {1: "x2", 2: "x4", 3: "x8", 4: "x16", 5: "x32", 6: "x64", 7: "x128"}
SHAPE = Choice(83, 3, {0: "", **REPEATS})
TENSOR_OFFSET = ((40, 24), (72, 8))
LANES32 = {(81, 2): 2, **BIT91}
"""Each thread has a lane of its own; other shapes share lanes."""

STATISTICS = (
    Choice(66, 2, ("MAX", "MAXABS", "MIN", "MINABS")), Choice(64, 2, ("", "S32", "F32")), flag(68, "NAN"),
)  # fmt: skip


def products(code: int, left: Desc, kind: int, name: str) -> Form:
    """Return a product into tensor memory. `kind` tells 16 from 8 bits; the product's descriptor stands in the register
    behind the second one of tensor memory. Bits 48 to 55: the first of the registers that disable lanes."""
    return form(
        code, name, left, Desc("gdesc", ureg(32)), Desc("tmem", ureg(64)), Desc("tmem", ureg(40)),
        Desc("idesc", ureg(40, again=True), above=1), ureg(48, silent=True), UP87, parts=(PAIR, flag(83, "WS")),
        fixed={(72, 2): kind, **BIT91}, uniform=True,
    )  # fmt: skip


BLACKWELL: list[Form] = [
    *(
        products(code, Desc(where, ureg(24)), kind, name)
        for code, where in ((0x5EA, "gdesc"), (0x9EA, "tmem"))
        for kind, name in ((0, "UTCHMMA"), (3, "UTCQMMA"))
    ),
    form(0x3E9, "UTCBAR", Addr(uniform=ureg(24)), ureg(32), NO64, fixed=BIT91, parts=(PAIR,), uniform=True),
    form(0x3E9, "UTCBAR", Addr(uniform=ureg(24)), ureg(32), ureg(64, silent=True), fixed={(75, 1): 1, **BIT91},
         parts=(PAIR, "MULTICAST"), uniform=True),
    form(0x5E3, "UTCATOMSWS", UP81, UD, ureg(32), parts=(PAIR, "FIND_AND_SET", flag(75, "ALIGN")), fixed=BIT91,
         uniform=True),
    form(0x9E3, "UTCATOMSWS", UD, ureg(32), parts=(PAIR, Choice(87, 1, ("AND", "OR"))), fixed=BIT91, uniform=True),
    *(
        form(0x9E7, "UTCCP.T.S", Desc("tmem", ureg(24), offset=((40, 24),)), Desc("gdesc", ureg(32)),
             parts=(PAIR, Choice(83, 2, shapes)), fixed={(88, 1): copies, **BIT91}, uniform=True)
        for copies, shapes in enumerate(COPIED)
    ),
    # between tensor memory and registers
    form(0x9EE, "LDTM", D, Desc("tmem", ureg(32), offset=TENSOR_OFFSET), parts=(SHAPE,), fixed=LANES32, uniform=True),
    form(0x9ED, "STTM", Desc("tmem", ureg(64), offset=TENSOR_OFFSET), Reg(32), parts=(SHAPE,), fixed=LANES32,
         uniform=True),
]  # fmt: skip

BLACKWELL_ULTRA: list[Form] = [
    *BLACKWELL,
    form(0x5EE, "LDTM.STAT", Reg(24), D, Desc("tmem", ureg(32), offset=TENSOR_OFFSET),
         parts=(Choice(83, 3, REPEATS), *STATISTICS), fixed=LANES32, uniform=True),
]  # fmt: skip

FORMS = {"sm_90a": HOPPER, "sm_100a": BLACKWELL, "sm_103a": BLACKWELL_ULTRA}
