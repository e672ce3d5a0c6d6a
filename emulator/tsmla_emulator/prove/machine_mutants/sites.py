"""Yields mutants of machine code: copies of a kernel in which one instruction differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ...run.sass.code import Code, UnknownInstruction, register_slot, text_of
from ...run.sass.lower import lower
from ...run.sass.model import (
    ALWAYS,
    ALWAYS_DONE,
    ZERO,
    Address,
    Constant,
    Descriptor,
    Instruction,
    Integer,
    Operand,
    Predicate,
    Register,
)
from ...run.sass.uses import Uses
from ..dataflow.flow import PREDICATES, successors

WAIT, STALL, BARRIER, PREDICATE, REGISTER, DESCRIPTOR = KINDS = (
    "wait", "stall", "barrier", "predicate", "register", "descriptor",
)  # fmt: skip
"""What a mutant changes:

- wait: a scoreboard is no longer awaited.
- stall: the next instruction may follow after one clock.
- barrier: a wait for a barrier, for groups of copies or of products, or for the kernel before is taken away.
- predicate: a guard, or a predicate among the operands, is negated.
- register: a register among the operands is another one, the next of its width.
- descriptor: one bit that means something differs, of a matrix's or product's description: in the instruction that it
  is for, or in a number that it is made of.
"""
GUARD = "guard"
"""What a mutant of an instruction's guard changes; it may make a lane execute what none does."""
SCHEDULED = (WAIT, STALL)
"""Kinds that a run cannot show: there, results are there when their instruction has run."""
_WAITS = {"BAR", "UCGABAR_WAIT", "DEPBAR", "ACQBULK", "WARPSYNC"}
_WORDS = {"gdesc": (0, 1, 0, 1), "idesc": (None,), "tmem": (None,)}
"""Kind of a descriptor -> the words that its registers hold."""
_MAKING = {"UMOV", "ULOP3", "UIADD3", "UPRMT", "MOV", "LOP3", "IADD3", "VIADD", "R2UR", "IMAD"}
"""Opcodes of which a descriptor is made."""
_DEPTH = 3
"""How many of them lie at most between a number and the descriptor that it is part of."""
_BITS = {0: range(14), 1: (*range(14), 30, 31), None: range(32)}
"""Bits of a matrix's description that are tried, by its word: its place in shared memory, in 16 bytes; the distance of
its rows, and how it is swizzled. Others are reserved, or count without a swizzle only. Of other descriptions (None),
all bits are."""
_LAST_UNIFORM = 62


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel with one instruction changed.

    kernel: its entry. at: the instruction's position. what: which part of it.
    """

    kind: str
    kernel: str
    at: int
    before: Instruction
    instead: Instruction
    what: str = ""

    def __str__(self) -> str:
        shown = text_of(self.instead)
        shown = f", now {shown}" if shown != text_of(self.before) else ""
        what = f" ({self.what})" if self.what else ""
        return f"{self.kind}{what} at {self.before.address:#x}, {text_of(self.before)}{shown}"


def mutants(kernel: str, architecture: str, code: Sequence[Instruction], uses: Sequence[Uses]) -> Iterator[Mutant]:
    """Yield every mutant of a kernel that is an instruction."""
    made = _numbers_of_descriptors(code, uses)
    for at, one in enumerate(code):
        for kind, instead, what in _changed(one, uses[at], made.get(at, ())):
            if kind in SCHEDULED or _is_known(architecture, instead):
                yield Mutant(kind, kernel, at, one, instead, what)


def _changed(one: Instruction, used: Uses, bits: Iterable[int]) -> Iterator[tuple[str, Instruction, str]]:
    control = one.control
    for board in range(6):
        if control.awaits >> board & 1:
            less = dataclasses.replace(control, awaits=control.awaits & ~(1 << board))
            yield WAIT, dataclasses.replace(one, control=less), f"SB{board}"
    if control.stall > 1:
        yield STALL, dataclasses.replace(one, control=dataclasses.replace(control, stall=1)), f"{control.stall} clocks"
    if (instead := _without_wait(one)) is not None:
        yield BARRIER, instead, ""
    if one.guard.number != ALWAYS:
        yield PREDICATE, dataclasses.replace(one, guard=_negated(one.guard)), GUARD
    for place, operand in enumerate(one.operands):
        for kind, other, what in _others(operand, used):
            if "tnspA" in what and isinstance(one.operands[1], Register):
                continue  # the first factor lies in registers
            operands = (*one.operands[:place], other, *one.operands[place + 1 :])
            yield kind, dataclasses.replace(one, operands=operands), f"operand {place}{what}"
        if bits and isinstance(operand, Integer):
            for bit in bits:
                flipped = Integer((operand.value ^ 1 << bit) & 0xFFFFFFFF)
                operands = (*one.operands[:place], flipped, *one.operands[place + 1 :])
                yield DESCRIPTOR, dataclasses.replace(one, operands=operands), f"bit {bit}"
            break


def _without_wait(one: Instruction) -> Instruction | None:
    """A barrier's test finds that its phase is over; what else waits does nothing."""
    if one.opcode == "SYNCS" and one.modifiers[0] == "PHASECHK":
        true = Predicate(ALWAYS)
        operands = (one.operands[0], true, Register(ZERO), Register(ZERO), true)
        return dataclasses.replace(one, opcode="ISETP", modifiers=("EQ", "U32", "AND"), operands=operands)
    waits = one.opcode in _WAITS and "ARV" not in one.modifiers
    if waits or one.opcode == "WARPGROUP" and one.modifiers[0] == "DEPBAR":
        return dataclasses.replace(one, opcode="NOP", modifiers=(), operands=(), guard=ALWAYS_DONE)
    return None


def _negated(predicate: Predicate) -> Predicate:
    return dataclasses.replace(predicate, negated=not predicate.negated)


def _others(operand: Operand, used: Uses) -> Iterator[tuple[str, Operand, str]]:
    """Yield what may stand in an operand's place."""
    match operand:
        case Predicate() if operand.number != ALWAYS:
            yield PREDICATE, _negated(operand), ""
        case Register() if operand.number != ZERO:
            yield REGISTER, _next(operand, used), ""
        case Address():
            for what, other in _other_addresses(operand, used):
                yield REGISTER, other, what
        case Constant(index=Register() as index) if index.number != ZERO:
            yield REGISTER, dataclasses.replace(operand, index=_next(index, used)), " index"
        case Descriptor():
            yield REGISTER, dataclasses.replace(operand, register=_next(operand.register, used)), " descriptor"
            for what, address in _other_addresses(operand.address, used) if operand.address else ():
                yield REGISTER, dataclasses.replace(operand, address=address), what
            if operand.kind == "gdesc":
                for suffix in ("tnspA", "tnspB"):
                    changed = tuple(x for x in operand.suffixes if x != suffix)
                    changed = changed if suffix in operand.suffixes else (*changed, suffix)
                    yield DESCRIPTOR, dataclasses.replace(operand, suffixes=changed), f" {suffix}"
            if operand.kind == "tmem":
                for bit in (0, 4, 16):
                    yield DESCRIPTOR, dataclasses.replace(operand, offset=operand.offset ^ 1 << bit), f" bit {bit}"


def _other_addresses(address: Address, used: Uses) -> Iterator[tuple[str, Address]]:
    if address.base is not None and address.base.number != ZERO:
        yield " base", dataclasses.replace(address, base=_next(address.base, used))
    if address.uniform is not None and address.uniform.number != ZERO:
        yield " uniform", dataclasses.replace(address, uniform=_next(address.uniform, used))


def _next(register: Register, used: Uses) -> Register:
    slot, width = register_slot(register), 1
    while width < 4 and all(slot + i in used.read or slot + i in used.written for i in range(2 * width)):
        width *= 2
    if "64" in register.suffixes:
        width = max(width, 2)
    last = _LAST_UNIFORM if register.uniform else ZERO - 1
    number = register.number + width
    return dataclasses.replace(register, number=number if number + width - 1 <= last else register.number - width)


def _is_known(architecture: str, instead: Instruction) -> bool:
    """Whether the changed instruction is one: results have no signs, and registers of products begin at some places."""
    code = Code(architecture, 0, [instead])
    try:
        lower(code, 0, instead)
    except UnknownInstruction:
        return False
    return True


def _numbers_of_descriptors(code: Sequence[Instruction], uses: Sequence[Uses]) -> dict[int, Iterable[int]]:
    """Return the positions of instructions that make a part of a descriptor out of a number, with the bits to try."""
    came: list[list[int]] = [[] for _ in code]
    for at, targets in enumerate(successors(code)):
        for target in targets:
            came[target].append(at)
    found: dict[int, Iterable[int]] = {}
    for at, one in enumerate(code):
        for operand in one.operands:
            if isinstance(operand, Descriptor) and operand.kind in _WORDS and operand.register.number != ZERO:
                for place, slot in enumerate(range(first := register_slot(operand.register), first + 4)):
                    if slot in uses[at].read and place < len(_WORDS[operand.kind]):
                        made = _made_by(code, uses, came, at, slot, _DEPTH)
                        found.update({maker: _BITS[_WORDS[operand.kind][place]] for maker in made - found.keys()})
    return found


def _made_by(
    code: Sequence[Instruction],
    uses: Sequence[Uses],
    came: Sequence[Sequence[int]],
    at: int,
    slot: int,
    depth: int,
) -> set[int]:
    """Return the instructions with a number whose result a slot may hold before one, or that it is made of. Those with
    the same guard are taken to run if it does."""
    waiting, known, found = [*came[at]], set[int](), set[int]()
    while waiting:
        place = waiting.pop()
        if place in known:
            continue
        known.add(place)
        one = code[place]
        if slot not in uses[place].written or one.guard not in (ALWAYS_DONE, code[at].guard):
            waiting += came[place]
        if slot not in uses[place].written or one.opcode not in _MAKING:
            continue
        if any(isinstance(operand, Integer) for operand in one.operands):
            found.add(place)
        for read in uses[place].read - PREDICATES if depth > 1 else ():
            found |= _made_by(code, uses, came, place, read, depth - 1)
    return found
