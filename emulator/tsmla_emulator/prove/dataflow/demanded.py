"""Tells which bits of a register's value matter to what machine code does with it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from ...run.sass.code import register_slot
from ...run.sass.model import ALWAYS_DONE, ZERO, Instruction, Integer, Operand, Register
from ...run.sass.uses import Uses
from .flow import successors

ALL = 0xFFFFFFFF
_HALVES = {"H0_H0": 0x0000FFFF, "H1_H1": 0xFFFF0000, "H0": 0x0000FFFF, "H1": 0xFFFF0000}


class Demanded:
    """The bits of each register that matter behind each instruction of a kernel."""

    def __init__(self, instructions: Sequence[Instruction], uses: Sequence[Uses]):
        self._instructions, self._uses = instructions, uses
        came: list[list[int]] = [[] for _ in instructions]
        for at, targets in enumerate(successors(instructions)):
            for target in targets:
                came[target].append(at)
        self._behind: list[dict[int, int]] = [{} for _ in instructions]
        waiting = collections.deque(reversed(range(len(instructions))))
        queued = set(waiting)
        while waiting:
            at = waiting.popleft()
            queued.discard(at)
            needed = self._before(instructions[at], uses[at], self._behind[at])
            for source in came[at]:
                behind = self._behind[source]
                more = {slot: mask for slot, mask in needed.items() if mask & ~behind.get(slot, 0)}
                for slot, mask in more.items():
                    behind[slot] = behind.get(slot, 0) | mask
                if more and source not in queued:
                    queued.add(source)
                    waiting.append(source)

    def behind(self, at: int, slot: int) -> int:
        """Return the mask of a slot's bits that something behind an instruction depends on."""
        return self._behind[at].get(slot, 0)

    def read(self, at: int, slot: int) -> int:
        """Return the mask of a slot's bits that an instruction's results depend on, as far as these matter."""
        return _masks(self._instructions[at], self._uses[at], self._behind[at]).get(slot, ALL)

    @staticmethod
    def _before(instruction: Instruction, used: Uses, behind: dict[int, int]) -> dict[int, int]:
        over = used.written if instruction.guard == ALWAYS_DONE else frozenset()
        needed = {slot: mask for slot, mask in behind.items() if slot not in over}
        masks = _masks(instruction, used, behind)
        for slot in used.read:
            mask = masks.get(slot, ALL)
            if mask:
                needed[slot] = needed.get(slot, 0) | mask
        return needed


def _masks(instruction: Instruction, used: Uses, behind: dict[int, int]) -> dict[int, int]:
    """Return the bits of operands that matter, where these are not all of them."""
    found: dict[int, int] = {}
    for operand, mask in _of_operands(instruction, used, behind):
        if isinstance(operand, Register) and operand.number != ZERO:
            slot = register_slot(operand)
            found[slot] = found.get(slot, 0) | mask
    return found


def _of_operands(instruction: Instruction, used: Uses, behind: dict[int, int]) -> Iterator[tuple[Operand, int]]:
    operands = instruction.operands
    wanted = 0
    for slot in used.written:
        wanted |= behind.get(slot, 0)
    match instruction.opcode, operands:
        case "PRMT" | "UPRMT", (_, a, Integer() as selector, b) if not instruction.modifiers:
            yield from zip((a, b), permuted(selector.value, wanted), strict=True)
        case "IMAD", (_, a, Integer() as factor, Register(number=255)) if _is_shift(instruction, factor.value & ALL):
            yield a, wanted >> (factor.value & ALL).bit_length() - 1
        case "SHF" | "USHF", (_, a, Integer() as count, Register(number=255)) if instruction.modifiers == ("L", "U32"):
            yield a, wanted >> min(count.value, 32)
        case "SHF" | "USHF", (_, Register(number=low), Integer() as count, a) if (
            instruction.modifiers == ("R", "U32", "HI") and low == ZERO
        ):
            yield a, wanted << min(count.value, 32) & ALL
        case "SEL" | "USEL", (_, a, b, _):
            yield from ((a, wanted), (b, wanted))
        case "LOP3" | "ULOP3", (_, a, Integer() as mask, Register(number=255), Integer(0xC0), *_):
            yield a, wanted & mask.value & ALL
        case "F2FP" | "HADD2" | "HFMA2" | "HMUL2" | "FADD" | "F2F", _:
            for operand in operands[1:]:
                suffixes = operand.suffixes if isinstance(operand, Register) else ()
                yield operand, _HALVES.get(suffixes[-1], ALL) if suffixes else ALL
        case "SYNCS", (*_, phase) if instruction.modifiers[0] == "PHASECHK":
            yield phase, 1 << 31
        case "IADD3" | "UIADD3" | "VIADD", _ if not instruction.modifiers:
            for operand in operands[1:]:  # a sum's bits depend on none above them
                yield operand, (1 << wanted.bit_length()) - 1
        case "MOV" | "UMOV", (_, a):
            yield a, wanted
        case "IMAD", (_, Register(number=255), Register(number=255), a) if "MOV" in instruction.modifiers:
            yield a, wanted


def _is_shift(instruction: Instruction, factor: int) -> bool:
    plain = set(instruction.modifiers) <= {"U32", "SHL", "MOV"}
    return plain and factor > 0 and factor & factor - 1 == 0


def permuted(selector: int, wanted: int) -> tuple[int, int]:
    """Return the bits of PRMT's first and last operand that a selector puts where bits are wanted.

    A selector's nibble names a byte, 0 to 3 of the first operand and 4 to 7 of the last; with 8 added, its sign.
    """
    first = last = 0
    for byte in range(4):
        if wanted >> 8 * byte & 0xFF:
            nibble = selector >> 4 * byte & 15
            bits = 0x80 if nibble & 8 else wanted >> 8 * byte & 0xFF
            if nibble & 7 < 4:
                first |= bits << 8 * (nibble & 3)
            else:
                last |= bits << 8 * (nibble & 3)
    return first, last
