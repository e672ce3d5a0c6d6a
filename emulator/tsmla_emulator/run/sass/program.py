"""Makes the machine code of a library ready for the interpreter, with the constant bank that its kernels read."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import struct
from pathlib import Path

from ..machine import Launch, parse
from ..ptx import model as ptx
from ..ptx.encoding import op_number
from ..ptx.program import PACK, Program
from .code import SLOTS, Code, Op, text_of
from .decode import decoded
from .kernel import RESERVED_SHARED, Kernel, kernels
from .lower import lower
from .model import BYTES, Instruction

_WGMMA_OPERAND = 4


@dataclasses.dataclass(frozen=True)
class Bank:
    """Where constant bank 0 has what the driver writes there, in bytes.

    block, grid: three numbers each. in_clusters: 1 for launches in clusters of several CTAs. parameters: the generic
    address of the parameter block. memory: the description of global memory, which every access names. stack: where a
    thread's stack begins, which no shipped kernel uses.
    """

    block: int
    grid: int
    in_clusters: int
    parameters: int
    memory: int
    stack: int


_MEMORY = 0x0123456789ABCDEF
"""Stands for the description of global memory, which is not known: no number that code uses by mistake for another."""
_STACK = 0xFFFDC0
BANKS = {
    "sm_90a": Bank(block=0x0, grid=0xC, in_clusters=0x140, parameters=0x198, memory=0x208, stack=0x28),
    "sm_100a": Bank(block=0x360, grid=0x370, in_clusters=0x36C, parameters=0x348, memory=0x358, stack=0x37C),
    "sm_103a": Bank(block=0x360, grid=0x370, in_clusters=0x36C, parameters=0x348, memory=0x358, stack=0x37C),
}


@dataclasses.dataclass(frozen=True)
class MachineProgram(Program):
    """A kernel's machine code in the interpreter's form. instructions: as they were decoded."""

    kernel: Kernel
    instructions: tuple[Instruction, ...]

    def block_bytes(self, launch: Launch) -> int:
        return second_bank(self.kernel) + len(self.kernel.constants)

    def block(self, launch: Launch, address: int) -> bytes:
        """Return constant bank 0, and bank 2 behind it."""
        kernel, where = self.kernel, BANKS[self.kernel.architecture]
        bank = bytearray(second_bank(kernel))
        struct.pack_into("<III", bank, where.block, *launch.block)
        struct.pack_into("<III", bank, where.grid, *launch.grid)
        struct.pack_into("<I", bank, where.in_clusters, math.prod(launch.cluster) > 1)
        struct.pack_into("<Q", bank, where.memory, _MEMORY)
        struct.pack_into("<I", bank, where.stack, _STACK)
        struct.pack_into("<Q", bank, where.parameters, address + kernel.first_parameter)
        bank[kernel.first_parameter : kernel.first_parameter + len(launch.params)] = launch.params
        return bytes(bank) + kernel.constants


def second_bank(kernel: Kernel) -> int:
    """Return where bank 2 begins behind bank 0."""
    return -(-(kernel.first_parameter + kernel.parameter_bytes) // BYTES) * BYTES


@functools.lru_cache(maxsize=32)
def machine_code_module(library: Path, names: frozenset[str], text: str = "") -> ptx.Module:
    """Return the kernels of these names in a library as their machine code has them.

    text: the PTX that it was made of, to which `Kernel.lines` belongs.

    Raises ValueError when the library lacks one, UnknownInstruction, and MachineCodeError for bits that are no
    instruction.
    """
    entries, programs, target = {}, {}, ""
    found = kernels(library)
    if lacks := sorted(names - found.keys()):
        raise ValueError(f"{library} has no machine code of {', '.join(lacks)}: it is of other sources")
    for kernel in (found[name] for name in sorted(names)):
        program = build_program(kernel)
        entries[kernel.name], programs[kernel.name] = program.entry, program
        target = kernel.architecture
    module = ptx.Module(target, "machine code", entries, text)
    module.programs.update(programs)
    return module


def build_program(kernel: Kernel) -> MachineProgram:
    """Lower every instruction of a kernel. Raises UnknownInstruction for the first that is not known."""
    return lowered(kernel, decoded(kernel.code, kernel.architecture))


def lowered(kernel: Kernel, instructions: list[Instruction]) -> MachineProgram:
    """Lower these instructions as the kernel's code."""
    code = Code(kernel.architecture, second_bank(kernel), instructions)
    first = []
    for position, instruction in enumerate(instructions):
        first.append(len(code.ops))
        lower(code, position, instruction)
    code.ops.append(Op(op_number("exit")))
    at = {instruction.address: first[i] for i, instruction in enumerate(instructions)}
    at[len(kernel.code)] = len(code.ops) - 1
    lists: list[int] = [at.get(BYTES * i, 0) for i in range(len(kernel.code) // BYTES)]
    packed = b"".join(_pack(op, code, lists, at, len(kernel.code) // BYTES) for op in code.ops)
    said = [ptx.Instruction(i.name, (), i.address, text_of(i)) for i in instructions]
    entry = ptx.Entry(
        kernel.name,
        tuple(ptx.Param(f"{i}", offset, size, 1) for i, (offset, size) in enumerate(kernel.parameters)),
        kernel.parameter_bytes,
        kernel.threads,
        shared={"static": ptx.SharedArray("static", kernel.shared_bytes - RESERVED_SHARED, 16)},
        instructions=[said[i] for i in code.of],
        machine_code=True,
    )
    talk = any(_orders_clusters(i) for i in instructions)
    return MachineProgram(
        entry, packed, tuple(lists), tuple(code.constants.values), SLOTS, kernel.shared_bytes, talk, kernel,
        tuple(instructions),
    )  # fmt: skip


def with_sources(program: MachineProgram, text: str) -> ptx.Entry:
    """Return a kernel's entry whose instructions say where they stand in the sources, where the library tells it.

    text: the PTX that it was made of.
    """
    entry, lines = program.entry, program.kernel.lines
    if not lines or entry.name not in (known := parse(text).entries):
        return entry
    sources = {one.line: one.source for one in known[entry.name].instructions}
    starts = sorted(lines)
    made = []
    for one in entry.instructions:
        before = bisect.bisect(starts, one.line)
        line = lines[starts[before - 1]] if before else 0
        made.append(dataclasses.replace(one, source=sources.get(line)))
    return dataclasses.replace(entry, instructions=made)


def _orders_clusters(instruction: Instruction) -> bool:
    return instruction.opcode in ("ATOM", "ATOMG", "RED", "REDG") or (
        instruction.opcode in ("LD", "LDG", "ST", "STG") and "STRONG" in instruction.modifiers
    )


def _pack(op: Op, code: Code, lists: list[int], at: dict[int, int], table: int) -> bytes:
    first = len(lists)
    lists += op.items
    imm = op.imm if op.target is None else at[op.target]
    bits = op.bits
    if op.number != op_number("wgmma") and not code.products.isdisjoint((op.d, *op.items)):
        bits |= _WGMMA_OPERAND
    flags = table if op.table else op.flags
    return PACK.pack(
        op.number, bits, op.width, op.guard, op.d, op.a, op.b, op.c, op.e, flags, 0 if op.table else first,
        len(op.items), op.extra, imm,
    )  # fmt: skip
