"""The forms of instructions that shipped kernels hold, by family; each list says on which architectures it is found."""

from __future__ import annotations

from tsmla_emulator.run.sass.forms import Form
from tsmla_emulator.run.sass.tables import floating, flow, integer, memory, moves, tensor

NO_RESULT = {
    0x31D, 0x348, 0x388, 0x3E9, 0x51D, 0x547, 0x5EA, 0x844, 0x91A, 0x941, 0x944, 0x945, 0x946, 0x947, 0x948, 0x949,
    0x94D, 0x950, 0x95C, 0x95D, 0x986, 0x988, 0x98F, 0x992, 0x9B0, 0x9C5, 0x9EA, 0x9ED, 0x9F0, 0x9F3, 0xB1D, 0xDF0,
    0xDF3,
}  # fmt: skip
"""Codes of instructions that free no scoreboard when their result is written."""

NO_OPERANDS = {
    0x348, 0x3C6, 0x547, 0x5EE, 0x7AC, 0x91A, 0x941, 0x944, 0x945, 0x946, 0x947, 0x948, 0x949, 0x94D, 0x950, 0x95C,
    0x95D, 0x98F, 0x9C5, 0x9EE, 0x9F0, 0x9F3, 0xDF0, 0xDF3,
}  # fmt: skip
"""Codes of instructions that free no scoreboard when their operands are read."""


def forms(architecture: str) -> list[Form]:
    """Return all forms of an architecture."""
    found = []
    for family in (floating, integer, moves, memory, flow):
        found += family.BOTH + (family.HOPPER if architecture == "sm_90a" else family.BLACKWELL)
    return found + tensor.FORMS[architecture]
