"""The objects that PTX text becomes: Module -> Entry -> Instruction -> operands. Names are unique within an entry."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field


class PtxError(Exception):
    """PTX cannot be read; the text says what stood there, at which line."""

    def __init__(self, message: str, line: int):
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


class NotImplementedInstruction(PtxError):
    """PTX has an instruction, modifier or operand form that the emulator does not know."""

    def __init__(self, what: str, line: int):
        super().__init__(f"not implemented: {what}", line)


@dataclass(frozen=True)
class Register:
    """A named register of an entry. `kind` is its declared type without the dot, e.g. "b32", "pred", "f32"."""

    name: str
    kind: str


@dataclass(frozen=True)
class Immediate:
    """A literal: integers as Python ints, floats as the bits written (0f.. 32, 0d.. 64) with `float_bits` set."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """Address of a parameter, a shared array or a special register (`%tid.x`), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """An address `[base + offset]`; `coordinates` when the form is `[base, {c0, ..}]`."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """A vector `{a, b, ..}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, `%r|%p`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """A result that nobody reads, `_`."""


@dataclass(frozen=True)
class Label:
    """A branch target, already unique within the entry."""

    name: str


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Sink | Label


PARTS = "parts/"
"""The folder of functions that kernels are composed from. All kernels have them, so their callers tell more."""
_KERNEL = ".kernel"


@dataclass(frozen=True)
class Call:
    """A function of the kernels' sources ("sm90/prefill/load.load"), at a line, where it calls something."""

    function: str
    line: int
    callee: str


@dataclass(frozen=True)
class Source:
    """A `.loc` position: file, line. `calls` led there, the innermost first; none where the text does not say."""

    file: str
    line: int
    calls: tuple[Call, ...] = ()

    @property
    def role(self) -> str:
        """The function of the sources that the kernel's own calls here ("load"), which tells what a warp does; where it
        calls a method of one of its parts ("stream.help"), the function that this calls. Empty where nothing says it.
        """
        for depth, call in enumerate(self.calls):
            if call.function.endswith(_KERNEL):
                inner = self.calls[depth - 1] if depth else None
                if inner and not inner.function.startswith(PARTS):
                    if call.callee.endswith(f".{inner.function.rpartition('.')[2]}"):
                        call = inner
                if call.callee.isidentifier():
                    return call.callee
        return ""

    @property
    def asker(self) -> int | None:
        """Which of the calls is that of the innermost function outside of `PARTS`; None where there is none."""
        return next((depth for depth, call in enumerate(self.calls) if not call.function.startswith(PARTS)), None)


@dataclass
class Instruction:
    """One instruction. `opcode` carries every modifier; `guard` is (predicate, negated)."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    text: str
    guard: tuple[Register, bool] | None = None
    source: Source | None = None


@dataclass(frozen=True)
class Param:
    """A kernel parameter: byte offset, size and alignment inside the parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class SharedArray:
    """A `.shared` variable; `size` 0 marks the dynamic one."""

    name: str
    size: int
    align: int


@dataclass
class Entry:
    """One kernel. `labels` maps a label to the index of the instruction it stands before.

    machine_code: its instructions are those of machine code, `line` is their address, and one may stand there several
        times, for each operation that it becomes.
    """

    name: str
    params: tuple[Param, ...]
    param_bytes: int
    reqntid: tuple[int, int, int] | None
    registers: dict[str, Register] = field(default_factory=dict)
    shared: dict[str, SharedArray] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    line: int = 0
    machine_code: bool = False


@dataclass
class Module:
    """The kernels of one PTX text and what it says about itself. `programs` keeps the encoded entries."""

    target: str
    version: str
    entries: dict[str, Entry]
    text: str
    programs: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict) -> Module:
        """Copy without the programs: whoever copies a module is about to change it."""
        return Module(self.target, self.version, copy.deepcopy(self.entries, memo), self.text)
