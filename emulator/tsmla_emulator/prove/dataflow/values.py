"""Finds registers of machine code that hold one value whichever way the code goes.

Values have numbers: equal operations on equal values give one number, loads and the like a new one wherever they stand.
Where ways meet with different values, the register has a value of its own there. So equal numbers are equal values;
different ones need not differ.

What a launch alone decides, such as the number of a row, is taken to be below 2**31, as is what a maximum with 0 made
and what is computed of such: its sign, which addresses of 64 bits and rounded quotients are made with, is 0.

Where ELECT takes a lane, there is another one beside it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Hashable, Iterable, Sequence

from ...run.sass.code import predicate_slot, register_slot, text_of
from ...run.sass.model import (
    ALWAYS_DONE,
    ZERO,
    Address,
    Constant,
    Descriptor,
    Instruction,
    Integer,
    Predicate,
    Register,
    Special,
)
from ...run.sass.program import BANKS
from ...run.sass.uses import Uses, uses_of
from .demanded import ALL, Demanded, permuted
from .flow import PREDICATES, successors
from .known_bits import NOTHING, Known

_COMPUTED = {
    "BMSK", "FADD", "FADD2", "FFMA", "FFMA2", "FLO", "FMNMX", "FMNMX3", "FMUL", "FMUL2", "FSEL", "FSETP", "F2FP", "F2I",
    "HADD2", "HFMA2", "HMNMX2", "I2F", "I2FP", "IABS", "IADD3", "IMAD", "IMNMX", "ISETP", "LDC", "LDCU", "LEA", "LOP3",
    "MOV", "MUFU", "P2R", "PLOP3", "POPC", "PRMT", "R2P", "SEL", "SGXT", "SHF", "UFLO", "UIADD3", "UIMAD", "UISETP",
    "ULDC", "ULEA", "ULOP3", "UMOV", "UPLOP3", "UPOPC", "UPRMT", "USEL", "USGXT", "USHF", "VHMNMX", "VIADD",
    "VIADDMNMX", "VIMNMX", "VIMNMX3", "CS2R",
}  # fmt: skip
"""Opcodes whose results depend on their operands alone."""
_AMONG_LANES = {"R2UR", "REDUX", "SHFL"}
"""Opcodes that give what some lane has."""
_SLEEPS = {"NANOSLEEP", "YIELD"}
"""Opcodes that only take time."""
_FIXED = {"SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId"}
"""Special registers that do not change while a thread runs."""
_LOADS = {"ULDC.64", "LDCU.64", "LDC.64"}
_GLOBAL = {"LDG", "STG", "LDGSTS", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG"}
_AND = Integer(0xC0)
"""The table of LOP3 that takes the bits which both of its first operands have."""
_OR = Integer(0xFC)
"""The table of LOP3 that takes those which one of them has."""
_MOVES = {"MOV", "UMOV", "IMAD.MOV", "IMAD.MOV.U32"}
State = dict[int, int]
"""Slot -> number of its value; a slot that is not there holds what it held at first."""


class Values:
    """The values of registers before each instruction of a kernel."""

    def __init__(self, architecture: str, instructions: Sequence[Instruction], uses: Sequence[Uses]):
        self.instructions, self.uses = instructions, uses
        self._architecture = architecture
        self._numbers: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []
        self._of_launch: set[int] = set()
        self._of_lanes: dict[int, int] = {}  # what R2UR took -> the value that lanes have
        self._zero = self._number("zero")
        self._meet: set[tuple[int, int]] = set()
        self._after = successors(instructions)
        self._before = self._followed()
        self._demanded = Demanded(instructions, uses)

    def same(self, at: int, instead: Instruction) -> bool:
        """Whether another instruction does the same as the one at a position: the same to memory and to where the code
        goes on, and the same values in all registers that are read behind it."""
        before = self._before.get(at)
        own, instead = self.instructions[at], _as_encoded(instead)
        if before is None or own == instead or own.opcode == instead.opcode in _SLEEPS:
            return True
        (used,) = uses_of(self._architecture, [instead])
        if self._whoever(own, instead, before):
            return True
        if not _is_computed(own) and self._done(own, self.uses[at], before) != self._done(instead, used, before):
            return False
        seen = self._under(own, self.uses[at].read | used.read, before) if own.guard == instead.guard else before
        changed = self.uses[at].written | used.written
        if own.opcode == instead.opcode == "PRMT" and len(changed) == 1:
            (slot,) = changed
            wanted = self._demanded.behind(at, slot)
            return self._permuted(own, before, wanted) == self._permuted(instead, before, wanted)
        if self._masked_alike(own, instead, seen) or self._alike_where_read(at, instead, seen):
            return True
        if self._summed_alike(at, instead, seen) or self._multiplied_alike(at, instead, seen):
            return True
        left, other = self._behind(at, own, self.uses[at], before), self._behind(at, instead, used, before)
        return self._agree(at, left, other)

    def _whoever(self, own: Instruction, instead: Instruction, before: State) -> bool:
        """Whether it does not matter that one asks the lane that was elected, and the other those that were not:
        whether there is such a lane, or what is in a register that is the same in all."""
        match own.operands, instead.operands:
            case (*results, Predicate() as one), (*others, Predicate() as other) if own.modifiers == ("ANY",):
                alike = results == others and own.guard == instead.guard and own.opcode in ("VOTE", "VOTEU")
                return alike and one != other and one == _not(other) and self._is_elected(one, before)
            case (_, Register() as one), (_, Register() as other) if own.opcode == "R2UR" and one == other:
                asked = own.guard != instead.guard and own.guard == _not(instead.guard) and own.name == instead.name
                if asked and own.operands == instead.operands and self._is_elected(own.guard, before):
                    slots = (register_slot(one),)
                    values = {self._of(one, self._under(x, slots, before)) for x in (own, instead)}
                    return len(values) == 1 and self._is_uniform(values.pop())
        return False

    def _is_elected(self, predicate: Predicate, before: State) -> bool:
        """Whether a predicate says that a lane is the elected one, or is not. Warps are taken to have others."""
        slot = predicate_slot(predicate)
        match self._keys[before.get(slot, self._first(slot))]:
            case ("at", int(at), _):
                return self.instructions[at].opcode == "ELECT"
        return False

    def _is_uniform(self, value: int) -> bool:
        """Whether a value is the same in all lanes: made of uniform registers, constants and the launch's numbers."""
        match self._keys[value]:
            case "zero":
                return True
            case ("done", str(), tuple(operands), _):
                return all(self._is_uniform_operand(operand) for operand in operands)
        return False

    def _is_uniform_operand(self, operand: Hashable) -> bool:
        match operand:
            case Integer() | Constant(index=None, bank=int()) | Predicate(number=7):
                return True
            case Special(name=name):
                return name.startswith("SR_CTAID") or name == "SR_CgaCtaId"
            case Register(number=number):
                return number == ZERO
            case (Register(), bool(uniform), tuple(values)):
                return uniform or all(self._is_uniform(value) for value in values)
        return False

    def _masked_alike(self, own: Instruction, instead: Instruction, before: State) -> bool:
        """Whether both take, or set, some bits of one value, and differ in bits only that are 0, or 1, anyway."""
        if own.name != instead.name or own.guard != instead.guard or own.name not in ("LOP3.LUT", "ULOP3.LUT"):
            return False
        match own.operands, instead.operands:
            case (result, Register() as one, Integer(mask), *rest), (other, also, Integer(wrong), *more) if (
                result,
                one,
                rest,
            ) == (other, also, more):
                match rest:
                    case [Register(number=zero), Integer() as table, *_] if zero == ZERO and table in (_AND, _OR):
                        known = self._known(self._of(one, before))
                        return not (mask ^ wrong) & ALL & ~(known.zeros if table == _AND else known.ones)
        return False

    def _summed_alike(self, at: int, instead: Instruction, before: State) -> bool:
        """Whether both add numbers that differ only in bits above all that are read; or only in their last ones, which
        nobody reads, to what ends with zeros."""
        own = self.instructions[at]
        if (own.name, own.guard) != (instead.name, instead.guard) or own.name.removeprefix("U") not in (
            "IADD3",
            "VIADD",
        ):
            return False
        pairs = [*zip(own.operands, instead.operands, strict=True)]
        match [pair for pair in pairs if pair[0] != pair[1]]:
            case [(Integer(number), Integer(wrong))]:
                last = ((number ^ wrong) & ALL).bit_length()
                others = [x for x in own.operands[1:] if isinstance(x, Register) and x.number != ZERO]
                read = [self._demanded.behind(at, slot) for slot in self.uses[at].written - PREDICATES]
                differ = (number ^ wrong) & ALL
                if not any(self._demanded.behind(at, slot) >= differ & -differ for slot in self.uses[at].written):
                    return True
                ends = all(self._known(self._of(x, before)).last_zeros >= last for x in others)
                return ends and not any(mask & (1 << last) - 1 for mask in read)
        return False

    def _multiplied_alike(self, at: int, instead: Instruction, before: State) -> bool:
        """Whether both multiply by numbers that differ in bits that nobody reads: 0 or 1; or anything, where nobody
        reads a bit above these either."""
        own = self.instructions[at]
        factors = "IMAD", "IMAD.U32", "IMAD.SHL.U32"
        if own.name not in factors or (own.name, own.guard) != (instead.name, instead.guard):
            return False
        match own.operands, instead.operands:
            case (result, Register() as one, Integer(number), Register(number=255)), (other, also, Integer(wrong), _):
                bit = self._known(self._of(one, before)).zeros | 1 == ALL
                read = [self._demanded.behind(at, slot) for slot in self.uses[at].written]
                differ = (number ^ wrong) & ALL
                unread = not any(differ & mask if bit else mask >= differ & -differ for mask in read)
                return (result, one) == (other, also) and unread
        return False

    def _known(self, value: int) -> Known:
        """Return what is known of a value's bits."""
        if value in self._of_lanes:
            return self._known(self._of_lanes[value])
        match self._keys[value]:
            case "zero":
                return Known.number(0)
            case ("done", "S2R" | "S2UR", (Special(name="SR_CgaCtaId"),), 0):
                return Known(~15 & ALL, 0)
            case ("done", str(name), tuple(operands), 0):
                match name.removeprefix("U"), [self._known_of(x) for x in operands if not isinstance(x, Predicate)]:
                    case "MOV" | "IMAD.MOV" | "IMAD.MOV.U32", [*_, moved]:
                        return moved
                    case "VIADD" | "IADD3", [first, *others]:
                        return sum(others, first)
                    case "IMAD", [one, other, added]:
                        return one * other + added
                    case "LEA", [shifted, added, by] if by.is_whole:
                        return (shifted << by.ones) + added
                    case "SHF.R.U32.HI", [low, by, shifted] if low == Known.number(0) and by.is_whole:
                        return shifted >> min(by.ones, 32)
                    case "SHF.L.U32", [shifted, by, high] if high == Known.number(0) and by.is_whole:
                        return shifted << min(by.ones, 32)
                    case "IMAD.SHL.U32", [shifted, factor, _] if factor.is_whole and factor.ones:
                        return shifted << factor.ones.bit_length() - 1
                    case "LOP3.LUT", [one, mask, third, table] if third == Known.number(0):
                        both = {_AND.value: one & mask, _OR.value: one | mask}
                        return both.get(table.ones, NOTHING)
        return NOTHING

    def _known_of(self, operand: Hashable) -> Known:
        match operand:
            case Integer(number):
                return Known.number(number)
            case Register(number=number, negated=False, inverted=False) if number == ZERO:
                return Known.number(0)
            case (Register(negated=False, absolute=False, inverted=False, suffixes=()), _, (int(value),)):
                return self._known(value)
        return NOTHING

    def _alike_where_read(self, at: int, instead: Instruction, before: State) -> bool:
        """Whether both differ in one register that they read, and these have the same bits where they matter."""
        own = self.instructions[at]
        if not _is_computed(own) or (own.name, own.guard) != (instead.name, instead.guard):
            return False
        match [both for both in zip(own.operands[1:], instead.operands[1:], strict=True) if both[0] != both[1]]:
            case [(Register() as one, Register() as other)] if own.operands[0] == instead.operands[0]:
                mask = self._demanded.read(at, register_slot(one))
                same = dataclasses.replace(other, number=one.number) == one and ZERO not in (one.number, other.number)
                return same and self._within(mask, one, before) == self._within(mask, other, before)
        return False

    def _within(self, mask: int, register: Register, before: State) -> int:
        """Return the number of a value that has the same bits as a register within a mask."""
        value = self._of(register, before)
        while True:
            match self._keys[value]:
                case (_, "LOP3.LUT" | "ULOP3.LUT", ((_, _, (int(inner),)), Integer(kept), _, table, *_), 0) if (
                    table == _AND and not mask & ~kept & ALL
                ):
                    value = inner
                case _:
                    return value

    def _agree(self, at: int, left: State, other: State) -> bool:
        """Whether what follows an instruction does the same from two states, which a few instructions make one again,
        or only differ where nobody reads."""
        waiting = [(at, left, other)]
        known: set[int] = set()
        while waiting:
            at, left, other = waiting.pop()
            differ = {slot for slot in left.keys() | other.keys() if self._in(left, slot) != self._in(other, slot)}
            if not any(self._demanded.behind(at, slot) for slot in differ):
                continue
            for target in self._after[at]:
                one, used = self.instructions[target], self.uses[target]
                if target in known or len(known) > _FAR:
                    return False
                known.add(target)
                if not _is_computed(one) and self._done(one, used, left) != self._done(one, used, other):
                    return False
                waiting.append((target, self._behind(target, one, used, left), self._behind(target, one, used, other)))
        return True

    def _in(self, state: State, slot: int) -> int:
        return state.get(slot, self._first(slot))

    def _permuted(self, one: Instruction, before: State, wanted: int) -> Hashable:
        """What PRMT puts into the bits that matter."""
        _, a, selector, b = one.operands
        if not isinstance(selector, Integer):
            return one
        values = (
            self._valued(operand, Uses(frozenset(range(ZERO * 2)), frozenset()), before) if mask else None
            for operand, mask in zip((a, b), permuted(selector.value, wanted), strict=True)
        )
        return tuple(values), selector, self._guard(one, before) if one.guard != ALWAYS_DONE else None

    def descriptions(self) -> list[str]:
        """Return the accesses to global memory whose description may not be the one that the driver gives, in words."""
        found = []
        for at in sorted(self._before):
            one = self.instructions[at]
            for operand in one.operands if one.opcode in _GLOBAL else ():
                if isinstance(operand, Descriptor) and self.loaded(at, operand.register) != Constant(
                    0, BANKS[self._architecture].memory
                ):
                    found.append(f"{one.address:#x} {text_of(one)}: its description may be another one")
        return found

    def held(self, at: int, slot: int) -> int:
        """Return the number of the value that a slot holds before an instruction."""
        return self._before.get(at, {}).get(slot, self._first(slot))

    def loaded(self, at: int, register: Register) -> Constant | None:
        """Return the constant, 64 bits, that a register and the next one hold before an instruction."""
        first, second = (self.held(at, register_slot(register) + half) for half in (0, 1))
        match self._keys[first]:
            case (what, name, (Constant() as constant,), 0) if name in _LOADS:
                return constant if second == self._numbers.get((what, name, (constant,), 1)) else None
        return None

    def _first(self, slot: int) -> int:
        return self._number(("first", slot))

    def _number(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def _followed(self) -> dict[int, State]:
        before: dict[int, State] = {0: {}}
        came: dict[int, dict[int, State]] = {}
        waiting = [0]
        while waiting:
            at = heapq.heappop(waiting)  # the first, so that ways that meet are known before what follows them
            left = self._behind(at, self.instructions[at], self.uses[at], before[at])
            for target in self._after[at]:
                ways = came.setdefault(target, {})
                ways[at] = left
                state = left if len(ways) == 1 else self._met(target, [*ways.values()])
                if before.get(target) != state:
                    before[target] = state
                    if target not in waiting:
                        heapq.heappush(waiting, target)
        return before

    def _met(self, at: int, ways: Sequence[State]) -> State:
        first, *others = ways
        found = {}
        for slot in set().union(*ways):
            value = first.get(slot, self._first(slot))
            differ = any(other.get(slot, self._first(slot)) != value for other in others)
            if differ or (at, slot) in self._meet:
                self._meet.add((at, slot))
                value = self._number(("met", at, slot))
            found[slot] = value
        return found

    def _behind(self, at: int, instruction: Instruction, used: Uses, before: State) -> State:
        if not used.written:
            return before
        found = dict(before)
        seen = self._under(instruction, used.read, before)
        done = self._done(instruction, used, before) if _is_computed(instruction) else ("at", at)
        for place, slot in enumerate(sorted(used.written)):
            value = self._number((*done, place))
            computed = _is_computed(instruction) or instruction.opcode in _AMONG_LANES
            if instruction.opcode == "R2UR" and isinstance(operand := instruction.operands[-1], Register):
                self._of_lanes[value] = self._of(operand, seen)
            positive = any("RELU" in one for one in instruction.modifiers)
            if computed and (positive or self._is_of_launch(self._done(instruction, used, before))):
                self._of_launch.add(value)
            if len(used.written) == 1:
                value = self._kept(instruction, seen, value)
            elif place and self._is_short(instruction, seen):
                value = self._zero
            if instruction.guard != ALWAYS_DONE:
                old = before.get(slot, self._first(slot))
                value = old if value == old else self._number(("if", self._guard(instruction, before), value, old))
            found[slot] = value
        return found

    def _kept(self, instruction: Instruction, before: State, otherwise: int) -> int:
        """Return the number of the operand that a move, or an addition of what is shifted out, gives unchanged."""
        match instruction.name, instruction.operands:
            case "SHF.R.S32.HI" | "USHF.R.S32.HI", (_, Register(number=low), Integer(31), Register() as number) if (
                low == ZERO and number.number != ZERO and self._of(number, before) in self._of_launch
            ):
                return self._zero
            case "IMAD" | "UIMAD", (_, *factors, Register(negated=False) as added) if any(
                isinstance(factor, Register) and self._of(factor, before) == self._zero for factor in factors
            ):
                return self._of(added, before)
            case name, (*_, Register(suffixes=(), negated=False, absolute=False, inverted=False) as kept) if (
                name in _MOVES and kept.number != ZERO
            ):
                return self._of(kept, before)
            case "LEA" | "ULEA", (
                _,
                Register(negated=False) as shifted,
                Register(negated=False) as kept,
                Integer(by),
            ) if shifted.number != ZERO and kept.number != ZERO:
                match self._keys[self._of(shifted, before)]:
                    case (_, made, (Integer(value),), 0) if made in _MOVES and value << by & ALL == 0:
                        return self._of(kept, before)
        return otherwise

    def _is_short(self, instruction: Instruction, before: State) -> bool:
        """Whether a product has at most 32 of its 64 bits: that of the launch's with 1 or 2."""
        match instruction.name, instruction.operands:
            case "IMAD.WIDE" | "IMAD.WIDE.U32", (_, Register() as one, Integer(1 | 2), Register(number=255)):
                return self._of(one, before) in self._of_launch
        return False

    def _of(self, register: Register, before: State) -> int:
        if register.number == ZERO:
            return self._zero
        slot = register_slot(register)
        return before.get(slot, self._first(slot))

    def _is_of_launch(self, part: Hashable) -> bool:
        """Whether all values in what an instruction does are the launch's."""
        match part:
            case (Register(), bool(), tuple(values)):
                return all(value in self._of_launch for value in values)
            case (int(value), bool()):
                return value in self._of_launch
            case tuple():
                return all(self._is_of_launch(one) for one in part)
        return True

    def _under(self, instruction: Instruction, slots: Iterable[int], before: State) -> State:
        """Return the state as an instruction finds it where it is done: what its guard decided before is decided."""
        if instruction.guard == ALWAYS_DONE:
            return before
        predicate, negated = self._guard(instruction, before)
        found = {}
        for slot in slots:
            value = before.get(slot, self._first(slot))
            while True:
                match self._keys[value]:
                    case ("if", (decided, against), int(then), int(otherwise)) if decided == predicate:
                        found[slot] = value = then if against == negated else otherwise
                    case _:
                        break
        return before | found if found else before

    def _guard(self, instruction: Instruction, before: State) -> tuple[int, bool]:
        slot = predicate_slot(instruction.guard)
        return before.get(slot, self._first(slot)), instruction.guard.negated

    def _done(self, instruction: Instruction, used: Uses, before: State) -> tuple[Hashable, ...]:
        """What an instruction does, with values in the place of the registers that it reads, and without those that it
        writes."""
        given = before
        before = self._under(instruction, used.read, before)
        results = sum(_is_result(operand, used) for operand in instruction.operands[:1])
        sources = instruction.operands[results:]
        scalars = {register_slot(x) for x in sources if isinstance(x, Register) and x.number != ZERO}
        if _is_computed(instruction) and used.read - PREDICATES == scalars and not _is_wide(instruction):
            used = Uses(used.read & PREDICATES, used.written)  # each operand is one register
        operands = tuple(self._valued(operand, used, before) for operand in sources)
        if instruction.guard != ALWAYS_DONE and not _is_computed(instruction):
            return "done", instruction.name, operands, self._guard(instruction, given)
        return "done", instruction.name, operands

    def _valued(self, operand: Hashable, used: Uses, before: State) -> Hashable:
        match operand:
            case Register() if operand.number != ZERO:
                slot = register_slot(operand)
                values = [self._of(operand, before)]
                slot += 1
                while slot in used.read and len(values) < _LONGEST:
                    values.append(before.get(slot, self._first(slot)))
                    slot += 1
                return dataclasses.replace(operand, number=0), operand.uniform, tuple(values)
            case Predicate() if operand.number < 7:
                slot = predicate_slot(operand)
                if slot not in used.read:
                    return "result"
                return before.get(slot, self._first(slot)), operand.negated
            case Address():
                return "address", self._parts(operand.base, operand.uniform, used, before), operand.offset
            case Descriptor():
                parts = self._parts(operand.register, operand.address, used, before)
                return operand.kind, parts, operand.offset, operand.suffixes
            case Constant(index=None, bank=int()):
                return operand
            case Constant():
                parts = self._parts(operand.index, operand.bank, used, before)
                return dataclasses.replace(operand, index=None, bank=0), parts
        return operand

    def _parts(self, one: Hashable, other: Hashable, used: Uses, before: State) -> Hashable:
        return self._valued(one, used, before), self._valued(other, used, before)


_FAR = 100
"""Instructions that two states are followed for at most."""
_LONGEST = 256
"""Registers that an operand has at most: the sums of a product of matrices."""


def _not(predicate: Predicate) -> Predicate:
    return dataclasses.replace(predicate, negated=not predicate.negated)


def _as_encoded(instruction: Instruction) -> Instruction:
    """Return an instruction as its code would be read again: a table of LOP3 has 8 bits."""
    match instruction.opcode, instruction.operands:
        case "LOP3" | "ULOP3", (*first, Integer(table), last):
            return dataclasses.replace(instruction, operands=(*first, Integer(table & 0xFF), last))
    return instruction


def _is_computed(instruction: Instruction) -> bool:
    if instruction.opcode in ("S2R", "S2UR"):
        return isinstance(instruction.operands[1], Special) and instruction.operands[1].name in _FIXED
    return instruction.opcode in _COMPUTED


def _is_wide(instruction: Instruction) -> bool:
    wide = {"WIDE", "64"} & {*instruction.modifiers} or instruction.opcode in ("FADD2", "FMUL2", "FFMA2")
    return bool(wide) or any("64" in x.suffixes for x in instruction.operands if isinstance(x, Register))


def _is_result(operand: object, used: Uses) -> bool:
    match operand:
        case Register():
            return operand.number == ZERO or register_slot(operand) in used.written
        case Predicate():
            return operand.number == 7 or predicate_slot(operand) in used.written
    return False
