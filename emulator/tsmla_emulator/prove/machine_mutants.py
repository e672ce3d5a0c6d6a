"""Changes one instruction of a kernel's machine code at a time, and tells which changes are noticed.

    python -m tsmla_emulator.prove.machine_mutants SYMBOL... [--count N] [--seed S]

What is said to the scheduler (scoreboards, stall counts) is judged by `hazards`, what is computed or synchronised by a
run of `check`'s calls, work completing as late as it may, with the happens-before check.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tsmla.identity.variant import Variant

from ..run.host.compile import Compiled, compile_for_emulation
from ..run.machine import EmulationError, Options
from ..run.ptx.model import PtxError
from ..run.sass.code import text_of
from ..run.sass.decode import decoded, decoder_for
from ..run.sass.fields import Reg
from ..run.sass.forms import CONTROL
from ..run.sass.image import Kernel, kernels
from ..run.sass.model import ALWAYS, BYTES, ZERO, Instruction, MachineCodeError
from ..run.sass.uses import uses_of
from . import check, hazards

_SYNCHRONISE = {"BAR", "FENCE", "MEMBAR", "WARPSYNC", "UCGABAR_ARV", "UCGABAR_WAIT", "DEPBAR", "ARRIVES", "SYNCS"}
_SAID = {"wait", "stall"}
"""Mutants of what is said to the scheduler."""
_NOP = 0x918
_LIMIT = 20
"""How many times as many instructions as the unchanged kernel's a mutant may run before it counts as endless."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One instruction changed.

    kind: "wait" taken away, "stall" shortened, "guard" inverted, "register" exchanged for the next, "synchronisation"
        taken away.
    word: its 16 bytes as a number.
    """

    kind: str
    kernel: Kernel
    position: int
    word: int

    def text(self) -> str:
        (before,) = decoded(self.kernel.code[self.position * BYTES :][:BYTES], self.kernel.architecture)
        return f"{self.kind} at {self.position * BYTES:#x}, {text_of(before)}"


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Yield every mutant of a kernel."""
    decoder = decoder_for(kernel.architecture)
    for position, instruction in enumerate(decoded(kernel.code, kernel.architecture)):
        word = int.from_bytes(kernel.code[position * BYTES :][:BYTES], "little")
        control = instruction.control
        for board in range(6):
            if control.awaits >> board & 1:
                yield Mutant("wait", kernel, position, word & ~(1 << 116 + board))
        if control.stall > 1 and not control.yields:
            yield Mutant("stall", kernel, position, word - (1 << 105))
        if instruction.guard.number != ALWAYS:
            yield Mutant("guard", kernel, position, word ^ 1 << 15)
        if instruction.opcode in _SYNCHRONISE:
            yield Mutant("synchronisation", kernel, position, word & CONTROL | 7 << 12 | _NOP)
        for field in decoder.form(word).operands:
            if isinstance(field, Reg) and field.number(word) not in (ZERO, ZERO - 1) and not field.again:
                other = word + (1 << field.first)
                if _decodes(other, kernel.architecture):
                    yield Mutant("register", kernel, position, other)
                break


def _decodes(word: int, architecture: str) -> bool:
    try:
        decoded(word.to_bytes(BYTES, "little"), architecture)
    except MachineCodeError:
        return False
    return True


class Subject:
    """A variant whose mutants are judged.

    compiled: gives its files.
    """

    def __init__(self, variant: Variant, compiled: Callable[[Variant], Compiled] = compile_for_emulation):
        self.variant, self._compiled = variant, compiled
        self._files = compiled(variant)
        self._image = (self._files.machine_code or self._files.library).read_bytes()
        self.kernels = [*kernels(self._files.machine_code or self._files.library)]
        self._options = Options(machine_code=True, async_mode="late", happens_before=True)
        verdict = check.check(variant, dataclasses.replace(self._options, count=True), compiled=compiled)
        self.reached = {
            (entry, call.module.entries[entry].instructions[index].line)
            for call in verdict.calls
            for entry, _, index in call.report.lanes
        }
        """Kernel and address of the instructions that some call executes."""
        self._memory = [call.memory for call in verdict.calls]
        steps = max(call.report.warp_instructions for call in verdict.calls)
        self._options = dataclasses.replace(self._options, limit=_LIMIT * steps)
        code = {kernel.entry: decoded(kernel.code, kernel.architecture) for kernel in self.kernels}
        timed = hazards.timed_by_scoreboards([*code.values()])
        self._analyses = {
            kernel.entry: hazards.Analysis(code[kernel.entry], uses_of(kernel.architecture, code[kernel.entry]), timed)
            for kernel in self.kernels
        }
        self._least = json.loads(hazards.LATENCIES.read_text())

    def noticed(self, mutant: Mutant) -> str | None:
        """Return by what a mutant was noticed, None if by nothing."""
        if mutant.kind in _SAID:
            return self._hazard(mutant)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "image"
            at = self._image.index(mutant.kernel.code) + mutant.position * BYTES
            file.write_bytes(self._image[:at] + mutant.word.to_bytes(BYTES, "little") + self._image[at + BYTES :])
            files = dataclasses.replace(self._files, machine_code=file)
            try:
                verdict = check.check(self.variant, self._options, compiled=lambda _: files)
            except (EmulationError, PtxError, RuntimeError, ValueError) as error:
                return f"{type(error).__name__}: {error}".splitlines()[0]
        if verdict.error:
            return verdict.error
        return None if [call.memory for call in verdict.calls] == self._memory else "other bits in memory"

    def _hazard(self, mutant: Mutant) -> str | None:
        analysis = self._analyses[mutant.kernel.entry]
        before: Instruction = analysis.instructions[mutant.position]
        (changed,) = decoded(mutant.word.to_bytes(BYTES, "little"), mutant.kernel.architecture)
        instead = dataclasses.replace(before, control=changed.control)
        if mutant.kind == "wait":
            found = analysis.hazards_with(mutant.position, instead)
            return str(found[0]) if found else None
        first, last = max(0, mutant.position - _NEAR), mutant.position + _NEAR
        part = [
            *analysis.instructions[first : mutant.position],
            instead,
            *analysis.instructions[mutant.position + 1 : last],
        ]
        soon = hazards.too_soon(hazards.distances(part, analysis.uses[first:last]), self._least)
        return str(soon[0]) if soon else None


_NEAR = 40
"""Instructions before and behind one whose stall count matters."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symbols", nargs="+")
    parser.add_argument("--count", type=int, default=40, help="mutants of each kind, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for symbol in given.symbols:
        print(*told(Subject(check.find(symbol)), given.count, given.seed), sep="\n", flush=True)
    return 0


def told(subject: Subject, count: int, seed: int) -> Iterator[str]:
    """Judge so many mutants of each kind; yield what came of it, in words."""
    of_kind: dict[str, list[Mutant]] = collections.defaultdict(list)
    for kernel in subject.kernels:
        for mutant in mutants(kernel):
            of_kind[mutant.kind].append(mutant)
    source = random.Random(seed)
    for kind, every in of_kind.items():
        if kind not in _SAID:
            reached = [x for x in every if (x.kernel.entry, x.position * BYTES) in subject.reached]
            yield f"{subject.variant.symbol()}: {kind}: {len(every) - len(reached)} of {len(every)} reached by no call"
            every = reached
        some = source.sample(every, min(count, len(every)))
        survivors = [mutant for mutant in some if subject.noticed(mutant) is None]
        caught = len(some) - len(survivors)
        yield f"{subject.variant.symbol()}: {kind}: {caught} of {len(some)} noticed ({len(every)} in all)"
        yield from (f"    {mutant.text()}" for mutant in survivors)


if __name__ == "__main__":
    sys.exit(main())
