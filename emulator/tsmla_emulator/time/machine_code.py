"""What the timing model takes from the machine code of a kernel: what each instruction does, and what ptxas wrote into
it for the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tsmla_emulator.run.sass.decode import control, decoder_for
from tsmla_emulator.run.sass.image import Kernel, kernels
from tsmla_emulator.run.sass.model import ALWAYS, BYTES, Instruction, MachineCodeError, Predicate, Target

WAIT, TEST, ARRIVE, POLL = "wait", "test", "arrive", "poll"
_OPCODES = {
    "alu": "CS2R ELECT FSETP IABS IADD3 ISETP LEA LOP3 MOV P2R PLOP3 PRMT SEL SHF VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE",
    "select": "FSEL",
    "maximum": "FMNMX FMNMX3",
    "fma": "FADD FFMA FMUL",
    "fma2": "FADD2 FFMA2 FMUL2",
    "integer": "HADD2 HFMA2 IMAD",
    "convert": "F2FP",
    "special": "F2I I2F MUFU POPC",
    "ldmatrix": "LDSM",
    "stmatrix": "STSM",
    "load_shared": "ATOMS LDS",
    "store_shared": "STS",
    "shuffle": "CREDUX REDUX SHFL",
    "load_global": "LDG",
    "store_global": "STG",
    "constant": "LDC LDCU S2R S2UR",
    "wgmma": "HGMMA QGMMA",
    "warp_product": "HMMA",
    "product": "UTCHMMA UTCQMMA",
    "commit": "UTCBAR",
    "tensor_store": "STTM",
    "tensor_load": "LDTM",
    "named": "BAR",
    "cluster": "UCGABAR_ARV UCGABAR_WAIT",
    "registers": "USETMAXREG",
    "load": "UTMALDG",
    "store": "UTMASTG",
    "copy": "LDGSTS",
    "fence": "FENCE MEMBAR WARPGROUP",
    "branch": "BRA",
    "exit": "EXIT RET",
    "sleep": "NANOSLEEP",
}
_NAMES = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}
"""Opcode -> its name here. Others take an issue slot and the clocks that they say: uniform instructions, NOP, BSSY, and
what the decoder does not know."""
_WORDS = {"64": 2, "128": 4, "2": 2, "4": 4}
"""Modifier of an access to shared memory -> how many units of 128 bytes a warp moves."""


@dataclasses.dataclass(frozen=True)
class Coded:
    """One instruction of machine code.

    guarded: it may do nothing.
    target: position that a branch goes to.
    size: for shared memory, in units of 128 bytes; for a special function, 2 if it is EX2.
    Scoreboards are numbers from 0, or None.
    """

    name: str
    guarded: bool
    target: int | None
    stall: int
    awaits: int
    result: int | None
    operands: int | None
    size: int


def instructions(library: Path, entry: str) -> list[Coded]:
    """Return the instructions of a kernel in a library or object; none when the library does not hold it."""
    for kernel in kernels(library):
        if kernel.entry == entry:
            code = [_read(kernel, at) for at in range(0, len(kernel.code), BYTES)]
            return [coded(code, position) for position in range(len(code))]
    return []


def _read(kernel: Kernel, at: int) -> Instruction:
    """Return an instruction; one that the decoder does not know, in a kernel of another project, without a name."""
    word = int.from_bytes(kernel.code[at : at + BYTES], "little")
    try:
        return decoder_for(kernel.architecture).instruction(word, at)
    except MachineCodeError:
        return Instruction(at, Predicate(word >> 12 & 7), "", (), (), control(word))


def coded(code: Sequence[Instruction], position: int) -> Coded:
    """Return what one of a kernel's instructions is to the timing model."""
    found = code[position]
    name, modifiers = _NAMES.get(found.opcode, "other"), found.modifiers
    guarded, target, size = found.guard.number != ALWAYS, None, 0
    if found.opcode == "SYNCS":
        name = _barrier(code, position)
    elif modifiers == ("VIEW", "ASYNC", "T"):
        name = "tensor_fence"
    elif found.opcode == "WARPGROUP" and "DEPBAR" in modifiers:
        name = "wgmma_wait"
    elif modifiers in (("DIV",), ("CONV",)):  # of warps whose lanes went apart
        name = "other"
    elif name == "branch":
        *conditions, place = found.operands
        assert isinstance(place, Target)
        target = place.address // BYTES
        guarded = guarded or "U" in modifiers or any(isinstance(one, Predicate) for one in conditions)
    elif name in ("ldmatrix", "stmatrix", "load_shared", "store_shared"):
        size = _WORDS.get(modifiers[-1], 1) if modifiers else 1
    elif name == "special":
        size = 2 if modifiers == ("EX2",) else 0
    said = found.control
    return Coded(name, guarded, target, said.stall, said.awaits, said.result, said.operands, size)


def _barrier(code: Sequence[Instruction], position: int) -> str:
    """Return what is done to an mbarrier; a test behind a pause is one of a loop that polls."""
    modifiers = code[position].modifiers
    if "EXCH" in modifiers:
        return "init"
    if "TRYWAIT" in modifiers:
        return WAIT
    if any(one.opcode == "NANOSLEEP" for one in code[max(0, position - 2) : position]):
        return POLL
    return TEST if "PHASECHK" in modifiers else ARRIVE
