"""Tells which registers and predicates each instruction of machine code reads and writes, as it is lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .code import NONE, Code, predicate_slot, register_slot
from .lower import lower
from .model import ALWAYS, ZERO, Descriptor, Instruction, Operand, Predicate, Register

_PAIRS = ("IMAD.WIDE", "UIMAD.WIDE", "UIADD3.64")
"""Beginnings of names of instructions whose result takes two registers."""


@dataclasses.dataclass(frozen=True)
class Uses:
    """Slots (code.py) that an instruction reads and writes; its guard is among those that it reads."""

    read: frozenset[int]
    written: frozenset[int]


def uses_of(architecture: str, instructions: Sequence[Instruction]) -> list[Uses]:
    """Return what each instruction of a kernel uses. Raises UnknownInstruction."""
    noted = _Noted(architecture, 0, instructions)
    found = []
    for position, instruction in enumerate(instructions):
        noted.read, noted.written = set(), set()
        lower(noted, position, instruction)
        noted.rest(instruction)
        found.append(Uses(frozenset(noted.read), frozenset(noted.written)))
    return found


class _Noted(Code):
    """Notes for which operands lowering asks."""

    read: set[int]
    written: set[int]

    def result(self, operand: Operand) -> int:
        slot = super().result(operand)
        self._note(self.written, [slot])
        return slot

    def registers(self, operand: Operand, count: int, *, results: bool = False) -> tuple[int, ...]:
        slots = super().registers(operand, count, results=results)
        self._note(self.written if results else self.read, slots)
        return slots

    def source(self, operand: Operand, width: int = 1) -> int:
        slot = super().source(operand, width)
        if slot >= 0:
            self._note(self.read, range(slot, slot + width))
        return slot

    def predicate(self, operand: Operand) -> tuple[int, int]:
        slot, inverted = super().predicate(operand)
        self._note(self.read, [slot])
        return slot, inverted

    def rest(self, instruction: Instruction) -> None:
        """Note what lowering has no need of: guards, second registers of results, descriptors of memory."""
        if instruction.guard.number != ALWAYS:
            self._note(self.read, [predicate_slot(instruction.guard)])
        wide = instruction.name.startswith(_PAIRS) or instruction.name == "CS2R"
        for operand in instruction.operands:
            match operand:
                case Register() if wide and operand.number != ZERO:
                    self._note(self.written, [register_slot(operand) + 1])
                    wide = False
                case Descriptor(kind="desc") if operand.register.number != ZERO:
                    first = register_slot(operand.register)
                    self._note(self.read, [first, first + 1])
                case Predicate():
                    pass

    @staticmethod
    def _note(among: set[int], slots: Iterable[int]) -> None:
        among.update(slot for slot in slots if slot != NONE and slot >= 0)
