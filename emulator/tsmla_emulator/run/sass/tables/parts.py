"""Operands and parts of names that several families share."""

from __future__ import annotations

from tsmla_emulator.run.sass.fields import Choice, Pred, Reg, flag, upred, ureg
from tsmla_emulator.run.sass.forms import Source

D, UD = Reg(16), ureg(16)
"""The result, a register or a uniform register."""

P81, P84, UP81, UP84 = Pred(81), Pred(84), upred(81), upred(84)
"""Results that are predicates."""

P87, UP87, P77, UP77, P68 = Pred(87, 90), upred(87, 90), Pred(77, 80), upred(77, 80), Pred(68, 71)
"""Sources that are predicates."""

A, B, C = Source("a"), Source("b"), Source("c")
"""Sources without signs; their numbers are printed without a sign."""

NO24, NO64 = Reg(24, absent=True), Reg(64, absent=True)
"""Places of source registers that this form has not: RZ stands there."""

BIT91 = {(91, 1): 1}
"""A bit that is set in most instructions which read uniform registers."""

NO_CARRY_IN = {(87, 4): 0xF}
"""A third source predicate, !PT, that is there but not printed."""

ALWAYS87 = {(87, 4): 7}
"""A predicate in bits 87 to 90, PT, that is not printed."""

FTZ = flag(80, "FTZ")
ROUNDING = Choice(78, 2, ("", "RM", "RP", "RZ"))
SATURATE = flag(77, "SAT")
BOOLEAN = Choice(74, 2, ("AND", "OR", "XOR"))
RELU = flag(76, "RELU")
TYPE = Choice(72, 2, ("U32", "", "U16x2", "S16x2"))
"""What kind of integers a minimum or maximum compares."""

SIZE = Choice(73, 3, ("U8", "S8", "U16", "S16", "", "64", "128"))
"""How wide a load or store is."""
