"""Parses PTX text, runs launches of its entries over given memory, and reports.

>>> module = parse(ptx_text)
>>> report = run_launches(module, [launch], regions, Options(async_mode="late", seed=7))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .ptx.model import Instruction, Module

AsyncMode = Literal["eager", "random", "late"]
SHARED_BYTES_PER_CTA = 227 * 1024
"""Shared memory that one CTA can have on all emulated GPUs (CUDA programming guide). Stated here, too, because kept
PTX is run where kernels' sources are not installed."""


@dataclass(frozen=True)
class Finding:
    """Something that a kernel did and must not: what it is, and the instructions that its text names, in order."""

    kind: str
    text: str
    instructions: tuple[Instruction, ...] = ()


class EmulationError(Exception):
    """A kernel did what it must not do. The message names kernel, CTA, warp, PTX line and source line.

    `kind` is one of "memory", "poison", "race", "deadlock", "barrier", "budget", "tmem", "descriptor", "limit", "trap",
    "exit" (something may reach the memory of a CTA that has ended), "not implemented", "launch". `findings` has what
    the message tells of kernels that ran, one by one.
    """

    def __init__(
        self, message: str, kind: str = "", line: int = 0, source: str = "", findings: tuple[Finding, ...] = ()
    ):
        super().__init__(message)
        self.findings = findings
        self.kind = kind
        self.line = line
        self.source = source


@dataclass(frozen=True)
class Region:
    """Global memory that a kernel may touch: host address and size in bytes. Any other address is an error."""

    address: int
    size: int
    name: str
    writable: bool = True


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `params` is the parameter block as PTX lays it out; `shared_bytes` the dynamic part."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    pdl: bool = False
    cooperative: bool = False


@dataclass(frozen=True)
class Options:
    """How to run. Everything that varies comes from `seed`: equal options give equal runs.

    seed: registers that nobody has written hold bits from it, other ones in every lane; with seed 0 ones (NaN, -1).
    async_mode: when bulk copies, matrix instructions and commits complete: at issue, at random, as late as allowed.
    quantum: warp instructions between two scheduling decisions (0: drawn anew each time).
    starve: warps (index within the CTA) that run only when no other warp can.
    happens_before: report accesses that conflict and that nothing orders.
    poison: report reads of shared and tensor memory that nobody wrote.
    threads: of the host, at most; each runs clusters of its own.
    count: `Report.lanes` says how many lanes executed each instruction.
    elect_highest: `elect.sync` picks the highest lane instead of the lowest.
    lenient_tensor: accept five things that PTX does not promise and kernels of others rely on:
      - barriers order tcgen05 operations without tcgen05.fence;
      - a tcgen05.ld is over where its values are used;
      - barriers hand tensor memory on even if their arrivals are relaxed;
      - tcgen05.ld and st reach the lanes of their own warp, whichever quarter of tensor memory their address names;
      - lanes that initialise one mbarrier together, alike, initialise it once.
    lockstep: happens-before takes each lane of a warp to know what the others do, as if all went in step. Threads need
        not, but kernels rely on it where the compiler keeps them together.
    findings: how many findings of happens-before end a run. What its clusters have found by then, or by their end, is
        reported together, each pair of instructions once, and before the failure that the run ends with, if it does.
    trace: clusters of each launch of which `Report.traces` gets what their warps executed.
    only_traced: run no other clusters: for their work, not for results.
    tests_fail: a warp's mbarrier.test_wait finds the phase open, unless the mbarrier instruction before it was such a
        test, too. It shows the timing model what the warp does where it does not find what it asks about.
    machine_code: run the machine code in the library that was loaded, not its PTX.
    hardware_sums: sum products of matrices as tensor cores do, bit for bit: all terms are cut off at one place, far
        below the largest, and so is the sum. Without it each product is a fused multiply-add of floats.
    limit: warp instructions per cluster after which the run is given up as endless (0: none).
    """

    async_mode: AsyncMode = "eager"
    seed: int = 0
    quantum: int = 64
    starve: tuple[int, ...] | None = None
    happens_before: bool = False
    lenient_tensor: bool = False
    lockstep: bool = False
    poison: bool = True
    threads: int = 1
    elect_highest: bool = False
    count: bool = False
    trace: tuple[int, ...] = ()
    only_traced: bool = False
    findings: int = 8
    limit: int = 0
    tests_fail: bool = False
    machine_code: bool = False
    hardware_sums: bool = False


@dataclass(frozen=True)
class Trace:
    """What one warp executed, in order.

    instructions: uint32 indices in Entry.instructions, with core/trace.h's flags. notes: (n, 6) uint32 rows of that
    file's `Note`: at, kind, a, b, low and high half of c.
    """

    entry: str
    launch: int
    cluster: int
    rank: int
    warp: int
    instructions: Any
    notes: Any


@dataclass
class Report:
    """What a run did.

    lanes (when asked for): (entry, warp in CTA, index in Entry.instructions) -> how many lanes executed the
        instruction, over all CTAs and launches.
    traces: of the clusters asked for.
    """

    warp_instructions: int = 0
    lanes: dict[tuple[str, int, int], int] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)


def parse(ptx_text: str) -> Module:
    """Read PTX text. Raises PtxError, or NotImplementedInstruction (a PtxError), naming the line."""
    from .ptx.parser import parse_module

    return parse_module(ptx_text)


def run_launches(module: Module, launches: list[Launch], regions: list[Region], options: Options) -> Report:
    """Run the launches in order over `regions`. Raises EmulationError at the first thing that is wrong."""
    from .core.binding import execute

    return execute(module, launches, regions, options)
