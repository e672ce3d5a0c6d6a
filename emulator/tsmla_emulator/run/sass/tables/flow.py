"""Control flow, convergence, barriers of a CTA and of a cluster, and what a warp tells the scheduler."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Barrier, Board, Choice, Int, Offset, Pred, Reg, flag, upred, ureg
from tsmla_emulator.run.sass.forms import Form, form
from tsmla_emulator.run.sass.tables.parts import ALWAYS87, BIT91

FAR = Offset(((16, 8), (34, 48)))
"""Where most jumps go."""

UNLESS = Pred(87, 90, silent=True)
"""A second condition of a branch."""

WAITS = (flag(80, "DEFER_BLOCKING"),)
ARRIVES = {(77, 1): 1}

BOTH: list[Form] = [
    form(0x947, "BRA", UNLESS, FAR),
    form(0x947, "BRA.DIV", ureg(24), FAR, fixed={**ALWAYS87, (33, 1): 1, **BIT91}),
    form(0x944, "CALL.REL.NOINC", FAR, fixed={**ALWAYS87, (86, 1): 1}),
    form(0x950, "RET.REL.NODEC", Reg(24), FAR, fixed={**ALWAYS87, (86, 1): 1}),
    form(0x94D, "EXIT", fixed=ALWAYS87),
    form(0x918, "NOP"),
    form(0x95D, "NANOSLEEP", Int(32), parts=(flag(84, "SYNCS"),), fixed=ALWAYS87),
    # barriers: the number and the count of threads are registers or numbers
    form(0x51D, "BAR.SYNC", Reg(32), Int(42, 12, silent=0), parts=WAITS),
    form(0x51D, "BAR.ARV", Reg(32), Int(42, 12), fixed=ARRIVES),
    form(0xB1D, "BAR.SYNC", Int(54, 4), Int(42, 12, silent=0), parts=WAITS),
    form(0xB1D, "BAR.ARV", Int(54, 4), Int(42, 12), fixed=ARRIVES),
    form(0x9C7, "UCGABAR_ARV", fixed=BIT91, uniform=True),
    form(0xDC7, "UCGABAR_WAIT", fixed=BIT91, uniform=True),
    form(0x91A, "DEPBAR.LE", Board("SB", 44, 6), Int(38, 6), fixed={(47, 1): 1}),
    # a launch that depends on another
    form(0x82D, "PREEXIT"),
    form(0x82E, "ACQBULK"),
    # registers
    form(0x9C8, "USETMAXREG.DEALLOC.CTAPOOL", Int(32, 10), fixed={(72, 1): 1, (74, 1): 1, (81, 3): 7, **BIT91},
         uniform=True),
    form(0x9C8, "USETMAXREG.TRY_ALLOC.CTAPOOL", upred(81), Int(32, 10), fixed={(73, 2): 3, **BIT91}, uniform=True),
    form(0x949, "BRX", Reg(24), FAR, fixed=ALWAYS87),
    form(0x547, "BRA.U", upred(24, 27), FAR, fixed={**ALWAYS87, (32, 1): 1, **BIT91}),
    form(0x348, "WARPSYNC.COLLECTIVE", Reg(24), FAR, fixed={**ALWAYS87, (86, 1): 1}),
    form(0x948, "WARPSYNC.COLLECTIVE.ALL", FAR, fixed={**ALWAYS87, (86, 1): 1}),
    form(0x948, "WARPSYNC.ALL", fixed=ALWAYS87),
    form(0x91B, "ENDCOLLECTIVE", fixed=ALWAYS87),
    form(0x946, "YIELD", fixed=ALWAYS87),
    form(0x31D, "BAR.SYNC", Reg(32), Reg(32, again=True), parts=WAITS),
    form(0x95C, "BPT.TRAP", Int(34, 3, silent=0), fixed={(84, 2): 3}),
]  # fmt: skip

NEAR = Offset(((34, 30),))

HOPPER: list[Form] = [
    form(0x945, "BSSY", Barrier(), NEAR, fixed=ALWAYS87),
    form(0x941, "BSYNC", Barrier(), fixed=ALWAYS87),
    form(0x3C6, "FENCE.VIEW.ASYNC", parts=(Choice(72, 2, ("S", "G")),)),
]

MEETING = Choice(73, 1, ("", "RECONVERGENT"))

BLACKWELL: list[Form] = [
    form(0x945, "BSSY", Barrier(), NEAR, parts=(MEETING,), fixed=ALWAYS87),
    form(0x941, "BSYNC", Barrier(), parts=(MEETING,), fixed=ALWAYS87),
    form(0x947, "BRA.U.ANY", FAR, fixed={**ALWAYS87, (32, 1): 1, (84, 1): 1}),
    form(0x947, "BRA.CONV", ureg(24), FAR, fixed={**ALWAYS87, (32, 2): 3, **BIT91}),
    form(0x3C6, "FENCE.VIEW.ASYNC", parts=(Choice(72, 2, ("S", "G", "T")),)),
    form(0x84C, "UVIRTCOUNT.DEALLOC.SMPOOL", Int(32), uniform=True),
]
