"""Machine code that the emulator executed, for the replay: its own order, stall counts and scoreboards.

What a warp ran is the instruction stream itself, so that of its costs only the machine's rates and latencies are given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..run.ptx.program import PACK
from ..run.sass.code import NONE
from ..run.sass.kernel import RESERVED_SHARED
from ..run.sass.lower_async import asks_once
from ..run.sass.model import BYTES, Predicate
from ..run.sass.program import MachineProgram, with_sources
from .costs import Cost, Operation, Text, acts, effect, operation
from .machine_code import plain
from .machines import Machine
from .replay import ARRIVE, END, IDLE, WAIT, Prepared, table_of

LINE = 128
"""Bytes of a line of code."""
FREE_SCOREBOARDS = ("plain", "wait", "tensor_load", "tensor_wait_store")
"""Kinds whose result frees a scoreboard. What is waited for otherwise, such as groups of copies, has one, too."""
STOPS = ("MEMBAR.ALL.GPU", "MEMBAR.ALL.SYS", "USETMAXREG", "UTCATOMSWS")
"""Instructions that stop their warp for the clocks that the machine's table has; other fences free a scoreboard."""


class Code:
    """A kernel's machine code as the timing model reads it, on any machine.

    text: the PTX that it was made of, from which instructions have their places in the sources.
    operations: what the interpreter makes of the instructions, one or several of each; of: the instruction of each.
    first: operations that stand for their instruction. further: others of it that act on other warps, too.
    tests: operations that ask once whether a phase is complete.
    looks: operations that ask, once or until it is. branches: instruction that asks -> branch that asks for the answer.
    """

    def __init__(self, program: MachineProgram, text: str = ""):
        self.entry = with_sources(program, text)
        self.instructions = program.instructions
        self.operations = [_operation(packed) for packed in PACK.iter_unpack(program.code)]
        self.of = np.array([*(one.line // BYTES for one in program.entry.instructions), len(self.instructions)])
        self.first, self.further = np.zeros(len(self.of), bool), np.zeros(len(self.of), bool)
        starts = np.flatnonzero(np.diff(self.of, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(self.of)], strict=True):
            acting = [at for at in range(start, end) if acts(self.operations[at])] or [end - 1]
            self.first[acting[0]], self.further[acting[1:]] = True, True
        asking = [at for at, one in enumerate(self.instructions) if "PHASECHK" in one.modifiers]
        self.looks = np.flatnonzero(self.first & np.isin(self.of, asking))
        self.tests = {int(at) for at in self.looks if asks_once(self.instructions[self.of[at]])}
        self.branches = {at: branch for at in asking if (branch := self._branch(at)) is not None}

    def _branch(self, asks: int) -> int | None:
        answer = self.instructions[asks].operands[0]
        for at in range(asks + 1, len(self.instructions)):
            one = self.instructions[at]
            if one.opcode == "BRA" and isinstance(answer, Predicate):
                given = [one.guard, *(operand for operand in one.operands if isinstance(operand, Predicate))]
                if any((p.number, p.uniform) == (answer.number, answer.uniform) for p in given):
                    return at
        return None


def _operation(packed: tuple[int, ...]) -> Operation:
    op, _, _, _, _, a, _, _, _, flags, _, items, extra, imm = packed
    return operation(op, flags, extra, imm, items, a != NONE)


class Executed(Prepared):
    """Costs of executed machine code on a machine.

    Numbers in cleaned traces are operations; those from the number of all on are of instructions whose guard was false.
    """

    def __init__(self, code: Code, machine: Machine):
        self.code, self.entry, self.machine = code, code.entry, machine
        costs = [*map(self._cost, range(len(code.of) - 1)), END]
        self.costs = [*costs, *map(_skipped, costs)]
        self.table, self.lists, self.slots = *table_of(self.costs, [([], [])] * len(self.costs)), 1
        barriers = [at for at, one in enumerate(code.instructions) if one.opcode == "SYNCS"]
        self._tests, self._mbarriers = [*code.tests], np.flatnonzero(code.first & np.isin(code.of, barriers)).tolist()
        self._waits = [at for at in code.looks.tolist() if at not in code.tests]
        self._boxes = np.zeros(len(code.of), bool)  # an instruction stores a box once
        self._products = {}

    def position(self, number: int) -> int:
        return number % len(self.code.of)

    def _cost(self, at: int) -> Cost:
        code = self.code
        instruction = code.instructions[code.of[at]]
        cost = effect(code.operations[at], self.machine)
        if cost is None or cost.kind == "stall" and not instruction.name.startswith(STOPS):
            cost = plain(instruction, self.machine)
        cost = dataclasses.replace(cost, rule="code", ordered=1, line=1 + int(code.of[at]) * BYTES // LINE)
        if code.further[at]:
            return dataclasses.replace(cost, slots=0)
        said = instruction.control
        frees = cost.kind in FREE_SCOREBOARDS and said.result is not None
        sets = (said.result + 1 if frees else 0) | (0 if said.operands is None else said.operands + 1) << 4
        return dataclasses.replace(cost, slots=1, stall=said.stall, awaits=said.awaits, sets=sets)

    def _leave_out(self, code: Any, flagged: Any, notes: Any, keep: Any) -> None:
        """Take polling out of `keep`, with operations that only help to do what an instruction does.

        A look that finds the phase open is followed by a branch to a loop that waits. The wait is then the look's, and
        the branch is not taken.
        """
        of = self.code.of[code]
        keep &= (self.code.first | self.code.further)[code]
        if len(notes):  # a store of the system's, which is not traced, brings the bytes that its own barrier awaits
            own = (notes[:, 1] == ARRIVE) & (notes[:, 2] & 0xFFFFFF < RESERVED_SHARED)
            notes[own, 4:] = 0
        waited = notes[notes[:, 1] == WAIT, 0] if len(notes) else []
        until = 0
        for at in np.setdiff1d(np.flatnonzero(np.isin(code, self._waits)), waited):
            branch = self.code.branches.get(int(of[at]))
            taken = np.flatnonzero((of[at:-1] == branch) & (of[at + 1 :] != branch))
            if at < until or not len(taken):
                continue
            jump = at + int(taken[0])
            back = np.flatnonzero(of[jump + 1 :] == of[jump] + 1)
            if not len(back):
                continue
            until = jump + 1 + int(back[0])
            keep[jump + 1 : until] = False
            notes[(notes[:, 0] > jump) & (notes[:, 0] < until), 0] = at

    def _numbers(self, code: Any, flagged: Any) -> Any:
        skipped = (flagged & np.uint32(IDLE)) != 0
        return code + skipped.astype(np.uint32) * np.uint32(len(self.code.of))

    def _flags(self, number: int) -> int:
        return self.code.operations[number].flags


def _skipped(cost: Cost) -> Cost:
    """Return what an instruction costs whose guard is false: its turn, and what it says to the scheduler."""
    return Cost(cost.rule, ordered=cost.ordered, slots=cost.slots, stall=cost.stall, awaits=cost.awaits, line=cost.line)


def costs_on(machine: Machine, read: Text | Code) -> Prepared:
    """Return the costs of a text, or of machine code, on a machine."""
    return Executed(read, machine) if isinstance(read, Code) else Prepared(read, machine)
