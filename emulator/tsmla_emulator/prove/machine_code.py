"""Runs a kernel's calls twice, from PTX and from machine code, and tells what differs in the memory that it wrote and
in the order in which each warp synchronises, copies and multiplies.

    python -m tsmla_emulator.prove.machine_code [PATTERN...] [--libraries DIRECTORY] [--at-bounds]

does so with the variants of these names, all by default, and says of each what came of it. With `--at-bounds`, calls
are those at bounds (`check`).

The order is that of the notes of a trace (core/trace.h): barriers, with counts, bytes and phases, copies, tcgen05's
products and commits; Hopper's products are not among them.

ptxas may make one fused multiply-add of a product and a sum that PTX does not round on its own (`mul.f32`, `add.f32`
without `.rn`). Where it does, results differ in the last bits. `contracted` does the same to PTX, so that any other
difference shows.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import fnmatch
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

from tsmla.identity.variant import Variant
from tsmla.loading import manifest

from ..run import emulate
from ..run.host.compile import Compiled, CompileError, compile_for_emulation
from ..run.host.memory import GuardError
from ..run.machine import EmulationError, Options, Trace
from ..run.ptx.model import Address, Entry, Instruction, Module, Operand, Pair, Register, Vector
from ..run.sass.image import extracted
from ..run.sass.kernel import RESERVED_SHARED
from .check import Verdict, check, variants

_SUMS = {"add.f32": "mul.f32", "sub.f32": "mul.f32", "add.f32x2": "mul.f32x2"}
"""A sum -> the product that ptxas makes one instruction of with it."""
CLUSTERS = 4
"""How many clusters of each launch have their order compared: the first."""
_NOTES = ("init", "arrive", "wait", "load", "store", "named", "product", "commit", "copy", "copy_arrive")
"""Kinds of notes, as core/trace.h numbers them."""
_ELSEWHERE = {"named", "product", "store", "copy"}
"""Those that have no address in shared memory."""
_OFFSET = (1 << 24) - 1
"""Bits of a shared address that are the place in its CTA."""
_WITHOUT_RESULT = {"st", "red", "bra", "bar", "barrier", "ret", "exit", "cp", "mbarrier", "fence", "tcgen05", "wgmma"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two runs of a variant's calls came to.

    differs: memory that differs after a call, by the call's number and the region's name.
    only_contracted: nothing differs from PTX in which products and sums are one instruction.
    order: warps that do not synchronise in the same order, and the first step that differs.
    """

    ptx: Verdict
    machine_code: Verdict
    differs: tuple[str, ...]
    only_contracted: bool
    order: tuple[str, ...]

    @property
    def wrong(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        memory = () if self.only_contracted else self.differs
        found = [self.ptx.error, self.machine_code.error, *(f"{one} differs" for one in memory), *self.order]
        return "; ".join(one for one in found if one)


def main() -> int:
    """Compare all variants of some names; exit status 1 where something is wrong with one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of variants, such as '*sm_90a*'")
    parser.add_argument("--libraries", type=Path, help="run machine code of the libraries in this directory")
    parser.add_argument("--at-bounds", action="store_true", help="make the calls at bounds (see `check`)")
    given = parser.parse_args()
    counts = collections.Counter[str]()
    began = time.process_time()
    scratch = tempfile.TemporaryDirectory()
    compiled = _files(given.libraries, Path(scratch.name))
    for variant in variants():
        symbol, started = variant.symbol(), time.process_time()
        if not any(fnmatch.fnmatchcase(symbol, pattern) for pattern in given.patterns):
            continue
        try:
            found = compare(variant, compiled=compiled, at_bounds=given.at_bounds)
        except (EmulationError, GuardError, CompileError, RuntimeError, ValueError) as error:
            verdict, text = "wrong", str(error).splitlines()[0]
        else:
            verdict = "wrong" if found.wrong else "contracted" if found.differs else "equal"
            text = found.wrong
        counts[verdict] += 1
        print(f"{symbol}: {verdict} ({time.process_time() - started:.1f} s)", text, flush=True)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{counts.total()} variants: {summary}; {time.process_time() - began:.0f} s of this process")
    scratch.cleanup()
    return int(not counts or counts["wrong"] > 0)


def _files(libraries: Path | None, scratch: Path) -> Callable[[Variant], Compiled]:
    """Return what gives a variant's files: all compiled now, but for machine code, if libraries are given."""
    if libraries is None:
        return compile_for_emulation
    held = manifest.images_of(libraries)

    def files(variant: Variant) -> Compiled:
        if variant not in held:
            raise ValueError(f"no library in {libraries} holds {variant.symbol()}")
        image = extracted(*held[variant], scratch / variant.symbol())
        return dataclasses.replace(compile_for_emulation(variant), machine_code=image)

    return files


def compare(
    variant: Variant,
    options: Options = Options(),  # noqa: B008 -- frozen
    compiled: Callable[[Variant], Compiled] | None = None,
    at_bounds: bool = False,
) -> Comparison:
    """Run the calls of `check` both ways. Raises what `check` raises.

    A warp that asks whether a phase is over, to go on with something else if not, is told so once both ways: else its
    order depends on how fast others are.

    at_bounds: make the calls at bounds (see `check`).
    """
    options = dataclasses.replace(options, trace=tuple(range(CLUSTERS)), tests_fail=True)

    def run(machine_code: bool) -> Verdict:
        own = dataclasses.replace(options, machine_code=machine_code)
        return check(variant, own, compiled=compiled, all_ways=at_bounds, at_bounds=at_bounds)

    from_ptx, from_code = run(False), run(True)
    differs = _differences(from_ptx, from_code)
    same = False
    if differs:
        real = emulate.Emulation._module
        with mock.patch.object(emulate.Emulation, "_module", lambda gpu, text: contracted(real(gpu, text))):
            same = not _differences(run(False), from_code)
    order = (
        f"call {number}: {text}"
        for number, (one, other) in enumerate(zip(from_ptx.calls, from_code.calls, strict=True))
        for text in order_differs(one.report.traces, other.report.traces)
    )
    return Comparison(from_ptx, from_code, differs, same, tuple(order))


def order_differs(one: Iterable[Trace], other: Iterable[Trace]) -> Iterator[str]:
    """Yield the warps that do not do the same steps in the same order, and where they part."""
    left, right = _steps(one), _steps(other)
    for warp in sorted(left.keys() | right.keys()):
        pairs = itertools.zip_longest(left.get(warp, ()), right.get(warp, ()), fillvalue=("nothing",))
        for number, (step, instead) in enumerate(pairs):
            if step != instead:
                launch, cluster, rank, index = warp
                yield f"launch {launch}, cluster {cluster}, CTA {rank}, warp {index}: step {number}: {step}, {instead}"
                break


def _steps(traces: Iterable[Trace]) -> dict[tuple[int, ...], list[tuple]]:
    """Return the steps of each warp. What a copy reads, which lies elsewhere in each run, has a number of its own.

    Steps at barriers of the system's KiB of shared memory are left out: there machine code allocates tensor memory,
    which is one instruction in PTX.
    """
    sources: dict[int, int] = {}
    found: dict[tuple[int, ...], list[tuple]] = {}
    for trace in sorted(traces, key=lambda x: (x.launch, x.cluster, x.rank, x.warp)):
        steps = []
        for _, kind, a, b, low, high in trace.notes.tolist():
            name, more = _NOTES[kind], low | high << 32
            if name not in _ELSEWHERE and a & _OFFSET < RESERVED_SHARED:
                continue
            if name == "load":
                more = sources.setdefault(more, len(sources))
            steps.append((name, a, b, more))
        found[trace.launch, trace.cluster, trace.rank, trace.warp] = steps
    return found


def _differences(one: Verdict, other: Verdict) -> tuple[str, ...]:
    found = [] if len(one.calls) == len(other.calls) else [f"{len(one.calls)} and {len(other.calls)} calls"]
    for number, (a, b) in enumerate(zip(one.calls, other.calls, strict=False)):
        found += [f"call {number}: {name}" for name in a.memory if a.memory[name] != b.memory.get(name)]
    return tuple(found)


def contracted(module: Module) -> Module:
    """Return PTX in which each sum takes the product that only it uses, as ptxas does."""
    module = copy.deepcopy(module)
    for entry in module.entries.values():
        _contract(entry)
    return module


def _contract(entry: Entry) -> None:
    made: dict[Register, list[int]] = collections.defaultdict(list)
    used: collections.Counter[Register] = collections.Counter()
    for position, instruction in enumerate(entry.instructions):
        results = 0 if instruction.opcode.split(".")[0] in _WITHOUT_RESULT else 1
        for register in _registers(instruction.operands[:results]):
            made[register].append(position)
        used.update(_registers(instruction.operands[results:]))
    taken: set[int] = set()
    after = [*map(lambda instruction: [instruction], entry.instructions)]
    for position, instruction in enumerate(entry.instructions):
        if instruction.opcode not in _SUMS or instruction.guard:
            continue
        for factor in instruction.operands[1:]:
            if not isinstance(factor, Register) or used[factor] != 1 or len(made[factor]) != 1:
                continue
            product = entry.instructions[made[factor][0]]
            if product.opcode == _SUMS[instruction.opcode] and not product.guard and made[factor][0] not in taken:
                taken.add(made[factor][0])
                after[position] = _fused(entry, instruction, product, factor, position)
                after[made[factor][0]] = []
                break
    places = []
    together: list[Instruction] = []
    for instructions in after:
        places.append(len(together))
        together += instructions
    places.append(len(together))
    entry.instructions = together
    entry.labels = {name: places[position] for name, position in entry.labels.items()}


def _fused(
    entry: Entry, total: Instruction, product: Instruction, factor: Register, position: int
) -> list[Instruction]:
    """One multiply-add, behind a negation where the sum subtracts."""
    result, x, y = total.operands
    a, b = product.operands[1:]
    other = y if factor == x else x
    kind = total.opcode.split(".")[-1]
    before = []
    if total.opcode.startswith("sub"):
        minus = Register(f"%minus{position}", "f32")
        entry.registers[minus.name] = minus
        before = [dataclasses.replace(total, opcode="neg.f32", operands=(minus, other if factor == x else a))]
        other, a = (minus, a) if factor == x else (other, minus)
    return [*before, dataclasses.replace(total, opcode=f"fma.rn.{kind}", operands=(result, a, b, other))]


def _registers(operands: tuple[Operand, ...]) -> Iterator[Register]:
    for operand in operands:
        match operand:
            case Register():
                yield operand
            case Vector():
                yield from _registers(operand.items)
            case Pair():
                yield from _registers((operand.first, operand.second))
            case Address():
                if isinstance(operand.base, Register):
                    yield operand.base
                yield from _registers(operand.coordinates)


if __name__ == "__main__":
    sys.exit(main())
