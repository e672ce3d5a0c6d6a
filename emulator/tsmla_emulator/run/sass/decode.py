"""Decodes machine code into the model: 16 bytes an instruction, no disassembler needed.

Every bit is accounted for: it is a field's, or it has the one value that its form allows. Anything else is an error.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tsmla_emulator.run.sass.fields import Choice, Offset, Pred
from tsmla_emulator.run.sass.forms import CONTROL, GUARD, OPCODE, Form
from tsmla_emulator.run.sass.model import (
    ALWAYS_DONE,
    BYTES,
    ZERO,
    Control,
    Instruction,
    Integer,
    MachineCodeError,
    Operand,
    Register,
    Target,
)
from tsmla_emulator.run.sass.tables import NO_OPERANDS, NO_RESULT, forms

UNIFORM_BITS = {"sm_90a": 6, "sm_100a": 8, "sm_103a": 8}
"""Architecture -> bits of a uniform register's number."""
_LOCAL_MEMORY = {0x387: "STL", 0x983: "LDL"}
"""Opcodes of local memory, where registers are spilled to. No kernel of tsmla may have one."""


def decoded(code: bytes, architecture: str) -> list[Instruction]:
    """Return the instructions of a kernel. Raises MachineCodeError."""
    decoder = decoder_for(architecture)
    return [
        decoder.instruction(int.from_bytes(code[at : at + BYTES], "little"), at) for at in range(0, len(code), BYTES)
    ]


@functools.cache
def decoder_for(architecture: str) -> Decoder:
    """Return the decoder of an architecture. Raises MachineCodeError."""
    if architecture not in UNIFORM_BITS:
        raise MachineCodeError(f"machine code of {architecture}; known: {', '.join(UNIFORM_BITS)}")
    return Decoder(architecture)


def control(word: int) -> Control:
    """Return what an instruction tells the scheduler, whichever it is."""
    result, operands = word >> 110 & 7, word >> 113 & 7
    return Control(
        stall=word >> 105 & 15,
        yields=not word >> 109 & 1,
        result=None if result == 7 else result,
        operands=None if operands == 7 else operands,
        awaits=word >> 116 & 63,
        reuse=word >> 122 & 15,
    )


class _Remembered(dict[int, Any]):
    """Values of a function of some bits of a word, each computed once."""

    def __init__(self, function: Callable[[int], Any]):
        super().__init__()
        self._function = function

    def __missing__(self, key: int) -> Any:
        value = self[key] = self._function(key)
        return value


class _Ready:
    """A form, made ready to decode words fast."""

    def __init__(self, form: Form):
        self.form = form
        self.mask, self.value = form.pattern()
        self._name_mask = sum(part.mask for part in form.name if isinstance(part, Choice))
        self._names = _Remembered(self._read_name)
        self._operands = [(field.mask, _Remembered(field.read), isinstance(field, Offset)) for field in form.operands]
        self._guards = _Remembered(Pred(12, 15, silent=True, uniform=form.uniform).read)
        self._controls = _Remembered(self._control)

    def _read_name(self, word: int) -> tuple[str, ...]:
        parts = (part if isinstance(part, str) else part.name(word) for part in self.form.name)
        return tuple(part for part in parts if part)

    def _control(self, word: int) -> Control:
        found = control(word)
        if found.awaits and not self.form.awaits:
            raise MachineCodeError(f"it awaits scoreboards {found.awaits:#b}")
        if found.result is not None and (found.result == 6 or self.form.code in NO_RESULT):
            raise MachineCodeError(f"its result frees scoreboard {found.result}")
        if found.operands is not None and (found.operands == 6 or self.form.code in NO_OPERANDS):
            raise MachineCodeError(f"its operands free scoreboard {found.operands}")
        if not found.yields and not 1 <= found.stall <= 11:
            raise MachineCodeError(f"a stall count of {found.stall} without a yield")
        if found.reuse & ~(0 if found.yields else self.form.reuse):
            raise MachineCodeError(f"operands {found.reuse:#b} are reused")
        return found

    def instruction(self, word: int, address: int) -> Instruction:
        name = self._names[word & self._name_mask]
        operands: list[Operand] = []
        for mask, read, is_offset in self._operands:
            operand = read[word & mask]
            if operand is not None:
                operands.append(Target(address + BYTES + operand.address) if is_offset else operand)
        return Instruction(
            address,
            self._guards[word & GUARD] or ALWAYS_DONE,
            name[0],
            name[1:],
            tuple(operands),
            self._controls[word & CONTROL],
        )


class Decoder:
    """Decodes the instructions of one architecture."""

    def __init__(self, architecture: str):
        self.architecture = architecture
        self._forms: dict[int, list[_Ready]] = collections.defaultdict(list)
        for form in forms(architecture):
            self._forms[form.code].append(_Ready(form.on(UNIFORM_BITS[architecture])))

    def form(self, word: int) -> Form:
        """Return the form of 16 bytes, read as a little-endian number. Raises MachineCodeError."""
        for one in self._forms.get(word & OPCODE, ()):
            if word & one.mask == one.value:
                return one.form
        raise MachineCodeError(f"{word:#034x} ({self.architecture})")

    def instruction(self, word: int, address: int) -> Instruction:
        """Return the instruction that 16 bytes, read as a little-endian number, stand for. Raises MachineCodeError."""
        candidates = self._forms.get(word & OPCODE, ())
        for form in candidates:
            if word & form.mask == form.value:
                try:
                    found = form.instruction(word, address)
                except MachineCodeError as error:
                    raise MachineCodeError(f"{_named(form.form)} at {address:#x}: {error}: {word:#034x}") from None
                return _renamed(found) if found.opcode == "IMAD" else found
        raise MachineCodeError(f"{_why(candidates, word)} at {address:#x} ({self.architecture}): {word:#034x}")


def _named(form: Form) -> str:
    return ".".join(part for part in form.name if isinstance(part, str))


def _why(candidates: list[_Ready] | tuple[()], word: int) -> str:
    if name := _LOCAL_MEMORY.get(word & OPCODE):
        return f"{name}: local memory, to which registers are spilled, is not emulated"
    if not candidates:
        return f"opcode {word & OPCODE:#05x} is not known"
    nearest = min(candidates, key=lambda form: (word & form.mask ^ form.value).bit_count())
    wrong = word & nearest.mask ^ nearest.value
    return f"{_named(nearest.form)}: bits {', '.join(str(bit) for bit in range(128) if wrong >> bit & 1)} are not known"


def _renamed(found: Instruction) -> Instruction:
    """Return a product with the name that nvdisasm gives it where it is a move, a sum or a shift.

    What it computes is the product and the sum that IMAD stands for, whatever its name. (A factor of 2^16 is no shift
    to nvdisasm 13.5.)
    """
    if found.modifiers not in ((), ("U32",)):
        return found
    _, a, b, c = found.operands
    if any(isinstance(operand, Register) and operand.uniform for operand in (b, c)):
        return found
    factor = b.value if isinstance(b, Integer) else None
    moves = isinstance(c, Register) and c.number == ZERO
    alias = ""
    if ZERO in (getattr(a, "number", 0), getattr(b, "number", 0)) or factor == 0:
        alias = "MOV"
    elif factor == 1:
        alias = "MOV" if moves else "IADD"
    elif factor is not None and factor > 0 and factor & factor - 1 == 0 and moves and factor != 1 << 16:
        alias = "SHL"
    return dataclasses.replace(found, modifiers=(alias, *found.modifiers)) if alias else found
