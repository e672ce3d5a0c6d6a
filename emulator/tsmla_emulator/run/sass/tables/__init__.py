"""The forms of instructions that shipped kernels hold, by family; each list says on which architectures it is found."""

from __future__ import annotations

from tsmla_emulator.run.sass.forms import Form
from tsmla_emulator.run.sass.tables import floating, flow, integer, memory, moves, tensor


def forms(architecture: str) -> list[Form]:
    """Return all forms of an architecture."""
    found = []
    for family in (floating, integer, moves, memory, flow):
        found += family.BOTH + (family.HOPPER if architecture == "sm_90a" else family.BLACKWELL)
    return found + tensor.FORMS[architecture]
