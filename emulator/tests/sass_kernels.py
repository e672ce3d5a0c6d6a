"""Small kernels of machine code, written as nvdisasm prints them, run on arrays of a word for each lane."""

from __future__ import annotations

import numpy as np
from nvdisasm_text import parsed
from tsmla_emulator.run.machine import Launch, Options, Region, Report, run_launches
from tsmla_emulator.run.ptx.model import Module
from tsmla_emulator.run.sass.kernel import Kernel
from tsmla_emulator.run.sass.model import Instruction
from tsmla_emulator.run.sass.program import MachineProgram, lowered

FIRST_INPUT, FIRST_RESULT = 10, 20
LANES = 32
_PLAIN = 1 << 105 | 7 << 110 | 7 << 113
"""The word of an instruction that frees no scoreboard."""


def assembled(lines: list[str]) -> list[Instruction]:
    """Return instructions of these texts."""
    text = []
    for position, line in enumerate(lines):
        text.append(f"        /*{16 * position:04x}*/    {line} ;   /* 0x{_PLAIN & (1 << 64) - 1:016x} */")
        text.append(f"        /* 0x{_PLAIN >> 64:016x} */")
    return parsed("\n".join(text))


def run_lines(
    lines: list[str],
    memory: np.ndarray,
    options: Options = Options(),  # noqa: B008 -- frozen
    arch: str = "sm_90a",
    threads: int = LANES,
    shared_bytes: int = 0,
) -> Report:
    """Run lines of machine code over `memory`, whose address is the only parameter, c[0x0][0x210] on sm_90a."""
    return run_program(program_of(assembled(lines), arch, threads), memory, options, shared_bytes)


def program_of(instructions: list[Instruction], arch: str = "sm_90a", threads: int = LANES) -> MachineProgram:
    """Return the kernel of these instructions, with one parameter of eight bytes."""
    first = 0x210 if arch == "sm_90a" else 0x380
    code = bytes(16 * len(instructions))
    return lowered(Kernel("k", arch, code, ((0, 8),), first, 8, (threads, 1, 1), 0x400, b""), instructions)


def run_program(program: MachineProgram, memory: np.ndarray, options: Options, shared_bytes: int = 0) -> Report:
    """Run one CTA of a kernel over `memory`, whose address is its parameter."""
    arch, threads = program.kernel.architecture, (program.kernel.threads or (LANES,))[0]
    module = Module(arch, "machine code", {"k": program.entry}, "")
    module.programs["k"] = program
    address = memory.ctypes.data
    launch = Launch("k", (1, 1, 1), (threads, 1, 1), (1, 1, 1), shared_bytes, address.to_bytes(8, "little"))
    return run_launches(module, [launch], [Region(address, memory.nbytes, "memory")], options)


def computed(lines: list[str], *inputs: np.ndarray, results: int = 1, arch: str = "sm_90a") -> list[np.ndarray]:
    """Return R20 and those behind it after lines that find `inputs`, a word for each lane, in R10 and those behind."""
    memory = np.concatenate([*(np.asarray(i, np.uint32) for i in inputs), np.zeros(LANES * results, np.uint32)])
    first = 0x210 if arch == "sm_90a" else 0x380
    loads = [f"LDG.E R{FIRST_INPUT + i}, desc[UR4][R2.64+{128 * i:#x}]" for i in range(len(inputs))]
    stores = [f"STG.E desc[UR4][R2.64+{128 * (len(inputs) + i):#x}], R{FIRST_RESULT + i}" for i in range(results)]
    start = ["S2R R0, SR_TID.X", f"LDC.64 R2, c[0x0][{first:#x}]", "IMAD.WIDE.U32 R2, R0, 0x4, R2"]
    run_lines([*start, *loads, *lines, *stores, "EXIT"], memory, arch=arch)
    return [memory[LANES * (len(inputs) + i) :][:LANES] for i in range(results)]
