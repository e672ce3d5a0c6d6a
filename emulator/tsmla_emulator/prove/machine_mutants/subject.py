"""Judges mutants of a variant's machine code: what notices them, or why nothing need notice them."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant, Variant

from ...run.host.compile import Compiled, compile_for_emulation
from ...run.host.memory import GuardError, addresses_from
from ...run.machine import EmulationError, Module, Options, parse
from ...run.record import Record, entries
from ...run.sass.code import text_of
from ...run.sass.decode import decoded
from ...run.sass.model import BYTES, Instruction
from ...run.sass.program import MachineProgram, lowered, machine_code_module
from ...run.sass.uses import Uses, uses_of
from .. import check
from ..dataflow import hazards, latencies
from ..dataflow.flow import PREDICATES, passed
from ..dataflow.multiplied import multiplied
from ..dataflow.unwritten import unwritten
from ..dataflow.values import Values
from ..mutation.mutate import schedules
from ..mutation.reasons import Reasons
from ..mutation.table import DECODE_LENGTHS, LENGTHS, kernels, part_of
from .sites import BARRIER, GUARD, PREDICATE, SCHEDULED, WAIT, Mutant, mutants
from .waits import Waits

REASONS = Path(__file__).parents[3] / "docs" / "mutation-reasons.json"
_FORK = multiprocessing.get_context("fork")
UNREACHED, SURVIVES, EXPLAINED = "unreached", "survives", "explained"
REDUNDANT = {
    "awaited": "registers that the scoreboard guards are awaited again, on every way, before anything uses them",
    "time": "after one clock, too, no result is used sooner than ptxas is known to use such a result",
    "same": "every register that is read later gets the same value, and memory the same access, where what a launch "
    "alone decides is not negative, and an elected lane is not its warp's only one",
}
"""Rules by which a mutant is redundant; a program has checked them for each that is called so."""
_NUMBERS = {
    "pack": frozenset({"k_nope", "k_pe", "v"}),
    "write_cache": frozenset({"kv_c", "k_pe"}),
    "read_cache": frozenset({"cache", "rope_cache", "scale_cache"}),
    "quantize_q": frozenset({"query", "q_pe"}),
}
"""Tensors that may hold any numbers, of operators that treat each by itself or round rows by a scale."""
_DRAWS, _DRAWS_OF_ATTENTION = 24, 2
"""Times that they are drawn for each call, and times that lengths and numbers of a call of attention are. Runs of
these calls have the first schedule only."""
_OF_ATTENTION = frozenset({"query", "kv_cache", "q", "q_pe", "k", "k_pe", "v"})
"""Tensors of attention that hold numbers, where rows have nothing else."""
_MANTISSA = {Dtype.BF16: 7, Dtype.FP16: 10, Dtype.E4M3: 3, Dtype.E5M2: 2}
_LIMIT = 4
_SPARE = 100_000
"""A mutant may run so many times as many instructions as the unchanged kernel, and some more, before it is endless."""
_FIRST = 3
"""Schedules that the unchanged kernel has to pass before anything is said of mutants; `mutate` shows that it passes
the others."""
_ADDRESSES = 0x1000_E000_0000
"""Where recorded memory begins: upper bits of its addresses' lower words are set."""
_FEW, _LONG, _OF_LONG = 4, 2_000_000, 2
"""Schedules that tell what a changed value does; all are for who waits for whom. Calls with a higher limit run under
the first two alone, but for the shortest and where a wait is taken away that is not said to be redundant."""
_JUST_BEHIND = 3
"""Instructions."""
_MANY_ROWS = ((4200, 1), (40, 70))
"""Query and KV lengths of a prefill with many query tiles, which has the first schedule only."""
_WAITS_WITH = {"BRA", "SYNCS"}
"""Opcodes whose predicates may say whether a warp waits."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a mutant.

    verdict: which check noticed it, a rule of REDUNDANT, UNREACHED, SURVIVES, or EXPLAINED: it survives, and so does
        the wait's mutant of the PTX, with a reason. text: the first finding, or that reason.
    """

    mutant: Mutant
    verdict: str
    text: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A recorded call. expected: what it writes. limit: instructions of a mutant. executed: positions that a lane
    executes, by kernel. reached: those, and others that a warp comes by."""

    record: Record
    expected: dict[str, np.ndarray]
    limit: int
    executed: dict[str, frozenset[int]]
    reached: dict[str, frozenset[int]]


class Kernel:
    """One kernel of a variant: its code and what is known of it before anything runs."""

    def __init__(self, name: str, program: MachineProgram):
        self.name, self.program = name, program
        self.architecture = program.kernel.architecture
        self.code = decoded(program.kernel.code, self.architecture)
        self.uses: list[Uses] = uses_of(self.architecture, self.code)

    def mutants(self) -> list[Mutant]:
        """Return the mutants of this kernel."""
        return [*mutants(self.name, self.architecture, self.code, self.uses)]

    @functools.cached_property
    def hazards(self) -> hazards.Analysis:
        return hazards.Analysis(self.code, self.uses, hazards.timed_by_scoreboards([self.code]))

    @functools.cached_property
    def spacing(self) -> latencies.Spacing:
        return latencies.Spacing(self.code, self.uses)

    @functools.cached_property
    def values(self) -> Values:
        return Values(self.architecture, self.code, self.uses)

    @functools.cached_property
    def of_wait(self) -> list[bool]:
        return of_wait(self.code, self.uses)

    @functools.cached_property
    def _unwritten(self) -> set[tuple[int, int]]:
        return unwritten(self.code, self.uses)

    @functools.cached_property
    def _descriptions(self) -> frozenset[str]:
        return frozenset(self.values.descriptions())

    def wrong_use(self, at: int, instead: Instruction) -> str:
        """Return what is wrong with registers where one instruction takes another's place: a read of what nobody wrote
        that the kernel does not have, a use of a product's registers before its wait, or another description of memory;
        empty if nothing is."""
        code = [*self.code[:at], instead, *self.code[at + 1 :]]
        uses = [*self.uses[:at], *uses_of(self.architecture, [instead]), *self.uses[at + 1 :]]
        for place, _ in sorted(unwritten(code, uses) - self._unwritten):
            return f"{code[place].address:#x} {text_of(code[place])}: it may read a register that nobody wrote"
        for one in multiplied(code, uses):  # a shipped kernel has none
            return str(one)
        others = Values(self.architecture, code, uses).descriptions()
        return next((one for one in others if one not in self._descriptions), "")

    def changed(self, at: int, instead: Instruction) -> MachineProgram:
        """Return the program with one instruction in another's place. Raises UnknownInstruction."""
        return lowered(self.program.kernel, [*self.code[:at], instead, *self.code[at + 1 :]])


class Subject:
    """A variant whose mutants are judged.

    known: latencies, by default the architecture's. compiled: gives the variant's files.
    """

    def __init__(
        self,
        variant: Variant,
        compiled: Callable[[Variant], Compiled] = compile_for_emulation,
        known: latencies.Known | None = None,
    ):
        self.symbol = variant.symbol()
        self._known = latencies.known_latencies(variant.arch.value) if known is None else known
        files = compiled(variant)
        with tempfile.TemporaryDirectory() as scratch:
            recording = _FORK.Process(target=_recorded, args=(variant, files, Path(scratch)))
            recording.start()  # a process of its own: its tensors lie where the records' memory will
            recording.join()
            if recording.exitcode:
                raise RuntimeError(f"{self.symbol} itself fails: its calls cannot be recorded")
            paths = sorted(Path(scratch).glob("[01]/*.npz"))
            records = [Record(path) for path in paths]
            drawn = more = [Record(path) for path in sorted(Path(scratch).glob("2/*.npz"))]
            if numbers := _NUMBERS.get(variant.family):
                several = enumerate(itertools.product(records, range(_DRAWS)))
                drawn = [record.with_any_numbers(numbers, seed) for seed, (record, _) in several]
            names = frozenset[str]().union(*map(entries, paths))
        self._module = machine_code_module(files.machine_code or files.library, names)
        programs = {name: self._module.programs[name] for name in sorted(names)}
        self.kernels = {name: Kernel(name, one) for name, one in programs.items() if isinstance(one, MachineProgram)}
        self._names = _names_in_the_mutation_table(variant, records[: sum(path.parent.name == "0" for path in paths)])
        self._ptx = files.ptx
        self._calls = sorted((self._unchanged(record) for record in records), key=lambda call: call.limit)
        if of_attention := isinstance(variant, PrefillVariant | DecodeVariant):
            drawn = [_drawn(variant, call.record, seed) for seed, call in enumerate(self._calls * _DRAWS_OF_ATTENTION)]
            drawn += more
            if isinstance(variant, DecodeVariant):
                drawn += [_drawn(variant, record, seed) for seed, record in enumerate(more * _DRAWS_OF_ATTENTION)]
        self._drawn = [self._unchanged(record) for record in drawn]
        self._to_reach = self._calls if of_attention else [*self._calls, *self._drawn]
        threads = max(launch.block[0] * launch.block[1] * launch.block[2] for x in records for launch in x.launches)
        self._schedules = [options for _, options in schedules(-(-threads // 32))]
        for options, call in itertools.product(self._schedules[:_FIRST], self._calls):
            if problem := self._problem(self._module, call, options):
                raise RuntimeError(f"{self.symbol} itself fails: {problem}")

    def reaches(self, mutant: Mutant) -> bool:
        """Whether a mutant can be judged: a call of `check` reaches it, or none need."""
        return mutant.kind in SCHEDULED or bool(_reaching(mutant, self._to_reach))

    def judged(self, mutant: Mutant) -> Result:
        """Return what becomes of a mutant that can be judged."""
        kernel = self.kernels[mutant.kernel]
        if mutant.kind in SCHEDULED:
            return _scheduled(kernel, mutant, self._known)
        calls = _reaching(mutant, [*self._calls, *self._drawn])
        if kernel.values.same(mutant.at, mutant.instead):
            return Result(mutant, "same")
        module = self._changed(kernel, mutant)
        asks = kernel.of_wait[mutant.at]
        waits = asks or mutant.kind == BARRIER or mutant.kind == PREDICATE and mutant.before.opcode in _WAITS_WITH
        every = self._schedules if waits else self._schedules[:_FEW]
        reason = self._reason(mutant) if waits else None
        for number, (options, call) in enumerate(itertools.product(every, calls)):
            short = call.limit <= _LONG or call is calls[0] or asks or mutant.kind == BARRIER and reason is None
            if number >= len(calls) * (1 if call in self._drawn else len(every) if short else _OF_LONG):
                continue
            if problem := self._problem(module, call, options):
                return Result(mutant, *problem)
        if wrong := kernel.wrong_use(mutant.at, mutant.instead):
            return Result(mutant, "registers", wrong)
        if reason is not None:
            return Result(mutant, EXPLAINED, reason)
        return Result(mutant, SURVIVES)

    def _reason(self, mutant: Mutant) -> str | None:
        kernel = self.kernels[mutant.kernel]
        waits = Waits(kernel.code, kernel.uses, kernel.program.kernel.lines, self._module_of_ptx, mutant.kernel)
        return waits.reason(mutant.at, self._names[mutant.kernel], Reasons.read(REASONS))

    @functools.cached_property
    def _module_of_ptx(self) -> Module:
        return parse(self._ptx.read_text("utf-8"))

    def _unchanged(self, record: Record) -> _Call:
        executed: dict[str, set[int]] = {name: set() for name in self.kernels}
        steps = 0
        for mode in ("late", "eager"):
            report, expected = record.run(self._module, Options(async_mode=mode, count=True))
            steps = max(steps, report.warp_instructions)
            entries = self._module.entries
            for entry, _, index in report.lanes:
                executed[entry].add(entries[entry].instructions[index].line // BYTES)
        by_lanes = {name: frozenset(ats) for name, ats in executed.items()}
        reached = {name: passed(self.kernels[name].code, ats) for name, ats in by_lanes.items()}
        return _Call(record, expected, _LIMIT * steps + _SPARE, by_lanes, reached)

    def _changed(self, kernel: Kernel, mutant: Mutant) -> Module:
        program = kernel.changed(mutant.at, mutant.instead)
        module = dataclasses.replace(self._module, entries={**self._module.entries, kernel.name: program.entry})
        module.programs.update(self._module.programs)
        module.programs[kernel.name] = program
        return module

    @staticmethod
    def _problem(module: Module, call: _Call, options: Options) -> tuple[str, str] | None:
        try:
            _, results = call.record.run(module, dataclasses.replace(options, limit=call.limit))
        except EmulationError as error:
            return error.kind, str(error).splitlines()[0]
        except GuardError as error:
            return "guard", str(error).splitlines()[0]
        for name, expected in call.expected.items():
            if not np.array_equal(results[name], expected):
                return "values", f"other bytes in {name}"
        return None


def of_wait(code: Sequence[Instruction], uses: Sequence[Uses]) -> list[bool]:
    """Return of each instruction whether it says for which phase, or of which barrier, a test just behind it asks."""
    tests = [at for at, one in enumerate(code) if one.modifiers[:1] == ("PHASECHK",)]
    asked = ((at, before) for at in tests for before in range(max(at - _JUST_BEHIND, 0), at))
    found = {before for at, before in asked if (uses[before].written - PREDICATES) & uses[at].read}
    return [at in found for at in range(len(code))]


def _reaching(mutant: Mutant, calls: Sequence[_Call]) -> list[_Call]:
    """Return the calls that reach a mutant's instruction."""

    def positions(call: _Call) -> frozenset[int]:
        return (call.reached if mutant.what == GUARD else call.executed)[mutant.kernel]

    return [call for call in calls if mutant.at in positions(call)]


def _drawn(variant: PrefillVariant | DecodeVariant, record: Record, seed: int) -> Record:
    """Return a recorded call of attention with other lengths, and with other numbers where rows have nothing else."""
    mixed = isinstance(variant, DecodeVariant) and (variant.row.scales is not None or variant.row.apart)
    dtype = variant.dtype
    return record.with_other_lengths(frozenset() if mixed else _OF_ATTENTION, dtype.bits, _MANTISSA[dtype], seed)


def _names_in_the_mutation_table(variant: Variant, records: Sequence[Record]) -> dict[str, set[str]]:
    """Return the names of each entry: all calls of one name go before those of the next."""
    names = kernels(variant)
    found = collections.defaultdict[str, set[str]](set)
    for number, name in enumerate(names):
        for record in part_of([*records], number, len(names)):
            for launch in record.launches:
                found[launch.entry].add(name)
    return found


def _recorded(variant: Variant, files: Compiled, directory: Path) -> None:
    """Record the calls of `check`. Those of attention have few keys; a second time, its loops go round. Of others, a
    second time rows lie far apart. A third time, a prefill has so many query tiles that quotients of their numbers are
    large, and ranks divide the keys of a decode."""
    ways: list[dict[str, Any]] = [{"all_ways": True, "at_bounds": True}]
    if isinstance(variant, PrefillVariant):
        ways += [{"lengths": LENGTHS}, {"lengths": _MANY_ROWS}]
    elif isinstance(variant, DecodeVariant):
        ways += [{"decode_lengths": DECODE_LENGTHS}, {"divided": True}]
    else:
        ways.append({"spreads": True})
    for number, way in enumerate(ways):
        (into := directory / f"{number}").mkdir()
        with addresses_from(_ADDRESSES):
            verdict = check.check(variant, Options(machine_code=True), record_to=into, compiled=lambda _: files, **way)
        if verdict.error:
            raise RuntimeError(verdict.error)


def judge_all(subject: Subject, some: Sequence[Mutant], processes: int) -> list[Result]:
    """Judge mutants on so many processes; return the results in order."""
    if processes == 1:
        return [subject.judged(mutant) for mutant in some]
    with concurrent.futures.ProcessPoolExecutor(processes, _FORK, _inherit, (subject, some)) as pool:
        return [*pool.map(_one_judged, range(len(some)))]


_given: tuple[Subject, Sequence[Mutant]]


def _inherit(subject: Subject, some: Sequence[Mutant]) -> None:
    global _given
    _given = subject, some


def _one_judged(number: int) -> Result:
    subject, some = _given
    return subject.judged(some[number])


def _scheduled(kernel: Kernel, mutant: Mutant, known: latencies.Known) -> Result:
    found: Iterator[object]
    if mutant.kind == WAIT:
        found = iter(kernel.hazards.hazards_with(mutant.at, mutant.instead))
    else:
        stall = mutant.instead.control.stall
        found = iter(latencies.too_soon(kernel.spacing.with_stall(mutant.at, stall), known))
    first = next(found, None)
    if first is not None:
        return Result(mutant, "hazard", str(first))
    return Result(mutant, "awaited" if mutant.kind == WAIT else "time")
